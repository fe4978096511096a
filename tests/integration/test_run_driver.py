"""The driver of runs with an engine that follows a script, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks import SyncHistory
from capsule_tasks.durable import (
    OnUncertain,
    RunDriver,
    RunEvent,
    RunFailure,
    RunStop,
    ToolCall,
    TurnEnd,
    TurnWork,
    settle,
)
from capsule_tasks.errors import (
    AlreadyDecided,
    InvalidRunState,
    RunClaimLost,
    UnknownCall,
    UnreadableSchema,
)
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage import ApprovalRequest, PlannedCall, RunStore, SyncRunStore
from capsule_tasks.storage.runs.store import SyncLease
from tests.integration.killing import LASTING, runs_to_its_end
from tests.integration.scripted_engine import ASK, ScriptedEngine, items_of, started

TWO_TURNS = [["model", "tool a", "tool b"], ["model"]]


async def test_a_run_is_driven_to_its_end(store: RunStore) -> None:
    engine = ScriptedEngine(TWO_TURNS)
    driver = await started(store, engine)
    events: list[RunEvent] = []
    stop = await driver.drive("r", engine, publish=events.append)
    assert stop == RunStop("r", "completed", result=b'["reply 1"]')
    assert engine.effects == ["a", "b"]
    assert [event.kind for event in events] == ["run_resumed", "turn", "turn"]
    assert [event.data["status"] for event in events[1:]] == ["running", "completed"]
    record = await store.read("r")
    assert (record.status, record.turn, record.result) == ("completed", 2, b'["reply 1"]')
    assert [item["turn"] for item in await items_of(store)] == [0, 1]


async def test_a_run_waits_for_a_decision_and_goes_on(store: RunStore) -> None:
    engine = ScriptedEngine([["model"], ["ask", "tool pay"]])
    driver = await started(store, engine)
    assert (await driver.drive("r", engine)).status == "interrupted"
    assert (await store.approvals.approve("r", "ask")).resume
    assert (await driver.drive("r", engine)).result == b'["pay"]'
    assert engine.asked == 1


async def test_a_decision_that_came_before_the_run_was_parked_resumes_it(store: RunStore) -> None:
    engine = ScriptedEngine([["ask", "tool pay"]])
    driver = await started(store, engine)
    await driver.drive("r", engine)
    claimed = store.commit

    async def decide_first(*args: Any, **kwargs: Any) -> Any:
        kwargs["approval_requests"] = (ASK,)
        return await claimed(*args, **{**kwargs, "status": "interrupted"})

    await store.approvals.approve("r", "ask")
    claim = await store.claim("r", "w1")
    # Parked again under a decision that exists: the commit answers `queued`.
    done = await decide_first(claim, b"0", turn=1)
    assert done.status == "queued"
    assert (await driver.drive("r", engine)).status == "completed"


async def test_a_run_that_fails_keeps_why(store: RunStore) -> None:
    engine = ScriptedEngine([["model"], ["fail"]])
    stop = await (await started(store, engine)).drive("r", engine)
    assert stop.status == "failed"
    assert stop.failure == RunFailure("max_turns", "MaxTurns", "too many")
    record = await store.read("r")
    assert json.loads(record.error)["kind"] == "max_turns"
    assert [item["turn"] for item in await items_of(store)] == [0, 1]


async def test_an_engine_that_raises_fails_the_run(
    store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine([["model"], ["raise no such thing"]])
    stop = await (await started(store, engine)).drive("r", engine)
    assert stop.failure == RunFailure("error", "ValueError", "no such thing")
    assert [item["turn"] for item in await items_of(store)] == [0]
    assert "run r fails" in caplog.text


async def test_a_turn_that_takes_too_long_fails_the_run(store: RunStore) -> None:
    engine = ScriptedEngine([["sleep"]])
    await started(store, engine)
    stop = await RunDriver(store, "w1", turn_timeout_s=0.01).drive("r", engine)
    assert stop.failure is not None
    assert stop.failure.kind == "timeout"


async def test_a_turn_that_cannot_be_stored_fails_the_run(store: RunStore) -> None:
    engine = ScriptedEngine([[f"large {17 * 2**20}"]])
    stop = await (await started(store, engine)).drive("r", engine)
    assert stop.failure is not None
    assert stop.failure.type == "RunTooLarge"


async def test_a_run_of_another_version_is_left_to_others(store: RunStore) -> None:
    engine = ScriptedEngine(TWO_TURNS, readable=("script/2",))
    driver = await started(store, engine)
    with pytest.raises(UnreadableSchema):
        await driver.drive("r", engine)
    assert (await store.read("r")).status == "queued"


async def test_a_run_that_the_engine_cannot_read_is_handed_back(store: RunStore) -> None:
    engine = ScriptedEngine([["model"], ["unreadable"]])
    driver = await started(store, engine)
    with pytest.raises(InvalidRunState):
        await driver.drive("r", engine)
    record = await store.read("r")
    assert (record.status, record.turn) == ("queued", 1)


async def test_a_cancelled_drive_hands_the_run_back(store: RunStore) -> None:
    engine = ScriptedEngine([["model"], ["sleep"]])
    driver = await started(store, engine)
    is_second = asyncio.Event()

    def publish(event: RunEvent) -> None:
        if event.kind == "turn":
            is_second.set()

    drive = asyncio.create_task(driver.drive("r", engine, publish=publish))
    await is_second.wait()
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    record = await store.read("r")
    assert (record.status, record.turn) == ("queued", 1)


async def test_a_cancelled_run_ends_at_its_next_call(store: RunStore) -> None:
    class Cancelling(ScriptedEngine):
        async def turn(self, work: TurnWork) -> TurnEnd:
            if int(work.claim.snapshot) == 1:
                await store.cancel("r", by="ann")
            return await super().turn(work)

    engine = Cancelling([["model"], ["swallow a", "tool b"], ["model"]])
    stop = await (await started(store, engine)).drive("r", engine)
    assert (stop.status, stop.cancelled_by, engine.effects) == ("cancelled", "ann", [])
    assert [item["turn"] for item in await items_of(store)] == [0]


async def test_a_run_that_was_taken_over_is_left_alone(store: RunStore) -> None:
    class Losing(ScriptedEngine):
        async def turn(self, work: TurnWork) -> TurnEnd:
            await store.release(work.claim)
            await store.claim("r", "w1")
            return await super().turn(work)

    engine = Losing([["swallow a"]])
    driver = await started(store, engine)
    with pytest.raises(RunClaimLost):
        await driver.drive("r", engine)
    assert engine.effects == []
    assert (await store.read("r")).status == "running"


async def uncertain(store: RunStore, engine: ScriptedEngine) -> RunStop:
    """Drive a run whose call `a` was started by an owner who is gone."""
    driver = await started(store, engine)
    claim = await store.claim("r", "w1")
    call = ToolCall("a", "bare:a", "a", "{}")
    await store.start_calls(claim, [PlannedCall("a", call.fingerprint)])
    await store.release(claim)
    return await driver.drive("r", engine)


@pytest.mark.parametrize("word", ["tool", "swallow"])
async def test_an_uncertain_call_parks_the_run(store: RunStore, word: str) -> None:
    engine = ScriptedEngine([["model", f"{word} a"]], on_uncertain="park")
    stop = await uncertain(store, engine)
    assert (stop.status, engine.effects) == ("interrupted", [])
    record = await store.read("r")
    assert [(call.call_id[-2:], call.tool) for call in record.pending] == [(":a", "settle:bare:a")]
    assert record.turn == 0


@pytest.mark.parametrize(
    ("answer", "output"),
    [({"made": True, "output": "receipt 7"}, "receipt 7"), ({"made": False}, "a")],
)
async def test_a_call_is_settled_and_the_run_goes_on_within_its_turn(
    store: RunStore, answer: dict[str, Any], output: str
) -> None:
    engine = ScriptedEngine([["model", "tool b", "tool a"]], on_uncertain="park")
    await uncertain(store, engine)
    request_id = (await store.read("r")).pending[0].call_id
    assert (await settle(store, "r", "a", by="ann", **answer)).resume
    with pytest.raises(AlreadyDecided):
        await settle(store, "r", request_id, made=False)
    stop = await RunDriver(store, "w1").drive("r", engine)
    assert json.loads(stop.result) == ["reply 0", "b", output]
    assert engine.asked == 1
    assert engine.effects == (["b"] if answer["made"] else ["b", "a"])


async def test_a_call_that_was_approved_is_asked_about_again_once_it_is_uncertain(
    store: RunStore,
) -> None:
    """Neither its approval nor a standing one answers whether it was made."""
    engine = ScriptedEngine([["tool a"]], on_uncertain="park")
    call = ToolCall("a", "bare:a", "a", "{}")
    request = ApprovalRequest(
        call_id="a", tool="bare:a", agent="a", fingerprint=call.fingerprint, arguments="{}"
    )
    await store.create(
        "r", "user-42", b"0", schema="script/1", agent="a", approval_requests=[request]
    )
    await store.approvals.approve("r", "a", always=True)
    claim = await store.claim("r", "w1")
    await store.start_calls(claim, [PlannedCall("a", call.fingerprint)])
    await store.release(claim)
    driver = RunDriver(store, "w1")
    assert (await driver.drive("r", engine)).status == "interrupted"
    await settle(store, "r", "a", made=False)
    # Made again, and cut again: people are asked again.
    claim = await store.claim("r", "w1")
    await store.start_calls(claim, [PlannedCall("a", call.fingerprint, retry=True)])
    await store.release(claim)
    assert (await driver.drive("r", engine)).status == "interrupted"
    assert engine.effects == []
    request_id = (await store.read("r")).pending[0].call_id
    await store.approvals.reject("r", request_id, message="leave it")
    assert (await driver.drive("r", engine)).result == b'["leave it"]'
    with pytest.raises(UnknownCall, match="does not wait"):
        await settle(store, "r", "b", made=False)


async def test_an_uncertain_call_fails_the_run(store: RunStore) -> None:
    engine = ScriptedEngine([["swallow a"]], on_uncertain="fail")
    stop = await uncertain(store, engine)
    assert stop.failure is not None
    assert stop.failure.kind == "uncertain"


async def test_the_model_is_told_of_an_uncertain_call(store: RunStore) -> None:
    engine = ScriptedEngine([["tool a"]], on_uncertain="tell")
    assert (await uncertain(store, engine)).result == b'["told"]'
    assert engine.effects == []


async def test_an_uncertain_call_is_made_again(store: RunStore) -> None:
    engine = ScriptedEngine([["tool a"]], on_uncertain="retry")
    assert (await uncertain(store, engine)).result == b'["a"]'


async def test_a_call_with_other_arguments_fails_the_run(store: RunStore) -> None:
    driver = await started(store, engine := ScriptedEngine([["swallow a"]]))
    claim = await store.claim("r", "w1")
    await store.start_calls(claim, [PlannedCall("a", "another fingerprint")])
    await store.release(claim)
    stop = await driver.drive("r", engine)
    assert stop.failure is not None
    assert (stop.failure.type, engine.effects) == ("CallChanged", [])


async def test_a_reply_that_nobody_asks_for_is_discarded_and_reported(store: RunStore) -> None:
    driver = await started(store, engine := ScriptedEngine([["model"]]))
    claim = await store.claim("r", "w1")
    await store.journal(claim, ":another question:0", b"old")
    await store.release(claim)
    events: list[RunEvent] = []
    stop = await driver.drive("r", engine, publish=events.append)
    assert stop.result == b'["reply 0"]'
    assert (events[1].kind, events[1].agent) == ("replies_discarded", "a")
    assert events[1].data == {"keys": [":another question:0"]}


async def test_calls_side_by_side_are_settled_without_asking_twice(store: RunStore) -> None:
    """Each answer wakes the run, which must not lose the answer by then waiting for another."""

    class SideBySide(ScriptedEngine):
        async def turn(self, work: TurnWork) -> TurnEnd:
            names = ["a", "b", "c"]
            did = await asyncio.gather(
                *(self.call_tool(work, name) for name in names), return_exceptions=True
            )
            self.rounds += 1
            assert self.rounds < 10, "the run is woken and parked for ever"
            return TurnEnd(
                b"1",
                "script/1",
                "a",
                "completed",
                [{"turn": 0}],
                output=[str(each) for each in did],
            )

        rounds = 0

    engine = SideBySide([[]], on_uncertain="park")
    driver = await started(store, engine)
    claim = await store.claim("r", "w1")
    planned = [PlannedCall(name, ToolCall(name, f"bare:{name}", "a", "{}").fingerprint)
               for name in "abc"]  # fmt: skip
    await store.start_calls(claim, planned)
    await store.release(claim)
    answers = 0
    while (await driver.drive("r", engine)).status == "interrupted":
        for waiting in (await store.read("r")).pending:
            answers += 1
            made = waiting.call_id.endswith(":a")
            await settle(store, "r", waiting.call_id, made=made, output="told")
    assert json.loads((await store.read("r")).result) == ["told", "b", "c"]
    assert sorted(engine.effects) == ["b", "c"]
    assert answers == 3


async def test_calls_that_cut_each_other_short_are_settled(store: RunStore) -> None:
    """As in openai-agents, where a call that ends the turn cuts short those beside it.

    One call is known to be uncertain before the other one, so people are asked about them in turn.
    """

    class CuttingShort(ScriptedEngine):
        rounds = 0

        async def turn(self, work: TurnWork) -> TurnEnd:
            self.rounds += 1
            assert self.rounds < 10, "the run is woken and parked for ever"
            async with asyncio.TaskGroup() as calls:
                first = calls.create_task(self.call_tool(work, "a"))
                if self.rounds % 2:  # settled, it is being made while the other one is asked for
                    await asyncio.wait({first}, timeout=0.01)
                second = calls.create_task(self.call_tool(work, "b"))
            return TurnEnd(
                b"1", "script/1", "a", "completed", output=[first.result(), second.result()]
            )

    engine = CuttingShort([[]], on_uncertain="park")
    driver = await started(store, engine)
    claim = await store.claim("r", "w1")
    planned = [PlannedCall(name, ToolCall(name, f"bare:{name}", "a", "{}").fingerprint)
               for name in "ab"]  # fmt: skip
    await store.start_calls(claim, planned)
    await store.release(claim)
    while (await driver.drive("r", engine)).status == "interrupted":
        for waiting in (await store.read("r")).pending:
            await settle(store, "r", waiting.call_id, made=False)
    assert json.loads((await store.read("r")).result) == ["a", "b"]
    assert engine.effects == ["a", "b"]


# --- killed at each await ------------------------------------------------------------------------


@pytest.fixture
def blocking_store(valkey_url: str, prefix: str) -> Iterator[SyncRunStore]:
    with SyncRunStore(valkey_url, settings=RunSettings(prefix=prefix)) as store:
        yield store


@pytest.mark.parametrize("first", [0, 1], ids=["even awaits", "odd awaits"])
@pytest.mark.parametrize(("policy", "model"), [("tell", "model"), ("retry", "held")])
def test_a_worker_that_is_killed_at_any_await_loses_and_repeats_nothing(
    blocking_store: SyncRunStore,
    valkey_url: str,
    prefix: str,
    policy: OnUncertain,
    model: str,
    first: int,
) -> None:
    script = [[model, "tool a", "tool b"], [model, "tool c"], [model]]
    client = redis.Redis.from_url(valkey_url)

    def drive(run_id: str, worker: str, dies_at: int | None) -> bool:
        async def main() -> None:
            settings = RunSettings(prefix=prefix)
            async with RunStore(valkey_url, settings=settings) as store:
                engine = ScriptedEngine(script, on_uncertain=policy)
                engine.redis = redis.Redis.from_url(valkey_url)
                engine.effects_key = f"{prefix}:effects:{run_id}"
                await RunDriver(store, worker).drive(run_id, engine)

        with SyncLease(worker, valkey_url, settings=LASTING, prefix=prefix) as lease:
            lease.acquire()
            is_done = runs_to_its_end(main, dies_at)
            lease.release()
        return is_done

    for at in range(first, 10_000, 2):
        run_id = f"run-{at}"
        blocking_store.create(run_id, run_id, b"0", schema="script/1", agent="a")
        if drive(run_id, f"w{at}", at):
            break
        if blocking_store.read(run_id).status != "completed":
            assert drive(run_id, f"w{at}+", None)
        record = blocking_store.read(run_id)
        assert record.status == "completed", at
        effects = client.lrange(f"{prefix}:effects:{run_id}", 0, -1)
        asked = client.lrange(f"{prefix}:effects:{run_id}:asked", 0, -1)
        # A model call that was cut before its reply was journaled is made again.
        assert len(asked) <= 4, at
        with SyncHistory(run_id, valkey_url, settings=HistorySettings(prefix=prefix)) as history:
            items = history.get_items()
        assert [item["turn"] for item in items] == [0, 1, 2], at
        did = [word for item in items for word in item["did"]]
        if policy == "tell":
            assert len(effects) == len(set(effects)), at
            told = did.count("told")
            assert told <= 1, at
            assert len(effects) >= 3 - told, at
        else:
            assert did == ["reply 0", "a", "b", "reply 1", "c", "reply 2"], at
            assert len(effects) <= 4, at
            assert set(effects) == {b"a", b"b", b"c"}, at
    assert at > 30
