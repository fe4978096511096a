"""The ledger of a turn over a store that a test answers: what goes together, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from capsule_tasks.durable.batches import MAX_BATCH_BYTES
from capsule_tasks.durable.engine import OnUncertain, ToolCall, ToolOutcome
from capsule_tasks.durable.ledger import TurnLedger, TurnStopped
from capsule_tasks.errors import (
    CallChanged,
    CapsuleError,
    RunClaimLost,
    RunTooLarge,
    StorageUnavailable,
)
from capsule_tasks.storage import Claim, PlannedCall
from capsule_tasks.storage.runs.types import CallStart, CallStarts, Decisions

CLAIM = Claim("r", "s", 1, 1, 0, "1", "a", b"", Decisions(), None, 0)


class FakeStore:
    """Notes each call, does what it says, and waits at the gate if it is closed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.journaled: dict[str, bytes] = {}
        self.started = dict[str, datetime]()
        self.outputs: dict[str, bytes] = {}
        self.refusals: dict[str, CapsuleError] = {}
        """Those of calls by their ids, of outputs by `output <id>`, of replies by their keys."""
        self.cancelled_by: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def journal(self, claim: Claim, key: str, reply: bytes) -> str | None:
        await self._noted("journal", claim, [key])
        self.journaled[key] = reply
        return self.cancelled_by

    async def start_calls(
        self, claim: Claim, calls: Sequence[PlannedCall], *, replies: Mapping[str, bytes]
    ) -> CallStarts:
        named = [*replies, *(call.call_id for call in calls)]
        await self._noted("start", claim, named)
        self.journaled |= replies
        return CallStarts([self._start(call) for call in calls], self.cancelled_by)

    def _start(self, call: PlannedCall) -> CallStart:
        if call.call_id in self.outputs:
            return CallStart(call.call_id, "finished", output=self.outputs[call.call_id])
        known = self.started.get(call.call_id)
        if known and not call.retry:
            return CallStart(call.call_id, "uncertain", started_at=known)
        self.started[call.call_id] = datetime(2026, 1, 1, tzinfo=UTC)
        return CallStart(call.call_id, "go", started_at=known)

    async def finish_calls(self, claim: Claim, outputs: Mapping[str, bytes]) -> None:
        await self._noted("finish", claim, [*outputs], "output ")
        self.outputs |= outputs

    async def _noted(self, what: str, claim: Claim, names: Sequence[str], prefix: str = "") -> None:
        assert claim is CLAIM
        self.calls.append((what, sorted(names)))
        await self.gate.wait()
        for name in names:
            if prefix + name in self.refusals:
                raise self.refusals[prefix + name]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def ledger(store: FakeStore) -> TurnLedger:
    given: Any = store
    return TurnLedger(given, CLAIM, {}, lambda output: str(output).encode())


def call_of(name: str, on_uncertain: OnUncertain = "park") -> ToolCall:
    return ToolCall(name, f"bare:{name}", "a", "{}", on_uncertain)


def making(name: str, made: list[str] | None = None) -> Callable[[], Awaitable[bytes]]:
    async def make() -> bytes:
        if made is not None:
            made.append(name)
        return name.encode()

    return make


async def together(ledger: TurnLedger, names: str, made: list[str] | None = None) -> list[Any]:
    """The outcomes of calls that are made side by side."""
    calls = (ledger.tool_call(call_of(name), making(name, made)) for name in names)
    return await asyncio.gather(*calls, return_exceptions=True)


async def passed(count: int = 20) -> None:
    """Let the event loop do everything that does not wait for the gate."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- what goes together --------------------------------------------------------------------------


async def test_calls_side_by_side_start_together_and_end_together(
    ledger: TurnLedger, store: FakeStore
) -> None:
    ledger.model_call("", "question").hold(b"reply")
    outcomes = await together(ledger, "abcde")
    assert outcomes == [ToolOutcome(name.encode()) for name in "abcde"]
    assert store.calls == [("start", [":question:0", *"abcde"]), ("finish", [*"abcde"])]
    assert store.journaled == {":question:0": b"reply"}


async def test_a_call_that_is_made_again_is_known_as_a_repeat(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.started["b"] = datetime(2026, 1, 1, tzinfo=UTC)
    for name, is_repeat in (("a", False), ("b", True)):
        await ledger.tool_call(call_of(name, "retry"), making(name))
        assert ledger.is_repeat(name) is is_repeat


async def test_what_is_asked_for_meanwhile_goes_with_the_next(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.gate.clear()
    tasks = [asyncio.create_task(together(ledger, "a"))]
    await passed()
    for name in "bc":  # in different iterations of the loop
        tasks.append(asyncio.create_task(together(ledger, name)))
        await passed()
    assert store.calls == [("start", ["a"])]
    store.gate.set()
    await asyncio.gather(*tasks)
    assert store.calls[1] == ("start", ["b", "c"])
    assert store.outputs == {name: name.encode() for name in "abc"}


async def test_large_outputs_are_written_one_by_one(ledger: TurnLedger, store: FakeStore) -> None:
    async def make() -> bytes:
        return b"x" * MAX_BATCH_BYTES

    calls = [ledger.tool_call(call_of(name), make) for name in "ab"]
    await asyncio.gather(*calls)
    assert store.calls[1:] == [("finish", ["a"]), ("finish", ["b"])]


async def test_one_id_twice_is_made_once(ledger: TurnLedger, store: FakeStore) -> None:
    """Two calls of one id are not started in one call of the store, which refuses that."""
    made: list[str] = []
    first, second = await together(ledger, "aa", made)
    assert made == ["a"]
    assert isinstance(second, TurnStopped)
    assert first == ToolOutcome(b"a")
    assert [*ledger.to_settle] == ["a"]
    assert [what for what, _ in store.calls].count("start") == 2


# --- replies -------------------------------------------------------------------------------------


async def test_a_held_reply_is_not_written_by_itself(ledger: TurnLedger, store: FakeStore) -> None:
    ledger.model_call("", "question").hold(b"reply")
    await ledger.drained()
    assert store.calls == []


async def test_replies_are_journaled_in_their_order(ledger: TurnLedger, store: FakeStore) -> None:
    """Of the agent and of the agents it has as tools; a recorded one takes along those before."""
    ledger.model_call("", "outer").hold(b"1")
    ledger.model_call("c1", "inner").hold(b"2")
    await together(ledger, "c")
    ledger.model_call("c1", "inner").hold(b"3")
    await ledger.model_call("c2", "inner").record(b"4")
    await ledger.model_call("c2", "inner").record(b"5")
    assert store.calls == [
        ("start", [":outer:0", "c", "c1:inner:0"]),
        ("finish", ["c"]),
        ("start", ["c1:inner:1", "c2:inner:0"]),
        ("journal", ["c2:inner:1"]),
    ]
    assert [*store.journaled.values()] == [b"1", b"2", b"3", b"4", b"5"]


async def test_held_replies_are_journaled_before_something_that_takes_long(
    ledger: TurnLedger, store: FakeStore
) -> None:
    """Two agents used as tools are asked at once, by a reply that is held."""
    ledger.model_call("", "outer").hold(b"1")
    await asyncio.gather(*(ledger.journal_held() for _ in range(2)))
    assert store.calls == [("journal", [":outer:0"])]
    await ledger.journal_held()
    assert len(store.calls) == 1
    ledger.model_call("", "outer").hold(b"2")
    store.cancelled_by = "ann"
    with pytest.raises(TurnStopped):
        await ledger.journal_held()


async def test_a_start_waits_for_the_replies_before_it(
    ledger: TurnLedger, store: FakeStore
) -> None:
    """If the reply's write fails, the call that comes from a later reply is not started."""
    store.gate.clear()
    store.refusals[":one:0"] = StorageUnavailable("away")
    recording = asyncio.create_task(ledger.model_call("", "one").record(b"1"))
    await passed()
    ledger.model_call("", "two").hold(b"2")
    starting = asyncio.create_task(ledger.tool_call(call_of("a"), making("a")))
    await passed()
    store.gate.set()
    outcomes = await asyncio.gather(recording, starting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [TurnStopped, TurnStopped]
    assert store.calls == [("journal", [":one:0"])]
    assert isinstance(ledger.error, StorageUnavailable)


async def test_several_replies_at_once_are_recorded_together(
    ledger: TurnLedger, store: FakeStore
) -> None:
    calls = [ledger.model_call(path, "question") for path in ("a", "b")]
    await asyncio.gather(*(call.record(b"reply") for call in calls))
    assert store.calls == [("start", ["a:question:0", "b:question:0"])]


async def test_a_turn_that_is_parked_within_keeps_its_replies(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.started["a"] = datetime(2026, 1, 1, tzinfo=UTC)
    late = ledger.model_call("b", "question")  # on its way while the call `a` is looked up
    with pytest.raises(TurnStopped):
        await ledger.tool_call(call_of("a"), making("a"))
    with pytest.raises(TurnStopped):
        late.hold(b"reply")
    await ledger.save_held()
    assert store.journaled == {"b:question:0": b"reply"}
    await ledger.save_held()
    assert len(store.calls) == 2


async def test_a_reply_that_is_too_large_is_an_error_of_the_model(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.refusals[":question:0"] = RunTooLarge("the journal of the turn", 2, 1)
    ledger.model_call("", "question").hold(b"reply")
    made: list[str] = []
    assert [type(each) for each in await together(ledger, "ab", made)] == [TurnStopped] * 2
    assert ledger.failure is not None
    assert (ledger.failure.kind, ledger.failure.type, made) == ("model", "RunTooLarge", [])
    await ledger.save_held()
    assert len(store.calls) == 1


# --- refusals, faults, cancels -------------------------------------------------------------------


async def test_a_refused_start_stops_the_turn(ledger: TurnLedger, store: FakeStore) -> None:
    store.refusals["b"] = CallChanged("b", "it had other arguments")
    made: list[str] = []
    assert [type(each) for each in await together(ledger, "abc", made)] == [TurnStopped] * 3
    assert ledger.failure is not None
    assert (ledger.failure.kind, ledger.failure.type, made) == ("tool", "CallChanged", [])
    with pytest.raises(TurnStopped):
        await ledger.tool_call(call_of("d"), making("d"))
    assert len(store.calls) == 1


async def test_a_lost_claim_is_no_failure_of_the_run(ledger: TurnLedger, store: FakeStore) -> None:
    store.refusals["a"] = RunClaimLost("r", "queued")
    await together(ledger, "a")
    assert isinstance(ledger.error, RunClaimLost)
    assert ledger.failure is None


async def test_a_cancel_of_the_run_starts_nothing_more(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.cancelled_by = "ann"
    made: list[str] = []
    assert [type(each) for each in await together(ledger, "ab", made)] == [TurnStopped] * 2
    assert (ledger.cancelled_by, made) == ("ann", [])


async def test_a_refused_output_is_that_of_one_call(ledger: TurnLedger, store: FakeStore) -> None:
    store.refusals["output b"] = RunTooLarge("the output of call 'b'", 2, 1)
    outcomes = await together(ledger, "abc")
    assert [type(each) for each in outcomes] == [ToolOutcome, TurnStopped, ToolOutcome]
    assert store.outputs == {"a": b"a", "c": b"c"}
    assert ledger.failure is not None
    assert ledger.failure.type == "RunTooLarge"


async def test_an_uncertain_call_does_not_stop_the_others(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.started["b"] = datetime(2026, 1, 1, tzinfo=UTC)
    store.outputs["c"] = b"made before"
    outcomes = await together(ledger, "abc")
    assert outcomes[0] == ToolOutcome(b"a")
    assert outcomes[2] == ToolOutcome(b"made before")
    assert isinstance(outcomes[1], TurnStopped)
    assert store.outputs["a"] == b"a"


@pytest.mark.parametrize("what", ["start", "finish"])
async def test_a_caller_that_is_cancelled_leaves_the_others_alone(
    ledger: TurnLedger, store: FakeStore, what: str
) -> None:
    made: list[str] = []
    if what == "start":
        store.gate.clear()
    tasks = [
        asyncio.create_task(ledger.tool_call(call_of(name), making(name, made))) for name in "abc"
    ]
    while [each for each, _ in store.calls] != ["start", "finish"][: 1 + (what == "finish")]:
        await asyncio.sleep(0)
        if made:
            store.gate.clear()
    tasks[1].cancel()
    await passed()
    store.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] == ToolOutcome(b"a")
    assert outcomes[2] == ToolOutcome(b"c")
    assert isinstance(outcomes[1], asyncio.CancelledError)
    if what == "start":
        # Started and not made: another attempt is told of it.
        assert made == ["a", "c"]
        (again,) = await together(ledger, "b")
        assert isinstance(again, TurnStopped)
        assert [*ledger.to_settle] == ["b"]
    else:
        assert store.outputs == {"a": b"a", "b": b"b", "c": b"c"}, "an output was lost"


async def test_a_caller_that_is_cancelled_before_its_start_starts_nothing(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.gate.clear()
    first = asyncio.create_task(ledger.tool_call(call_of("a"), making("a")))
    await passed()
    second = asyncio.create_task(ledger.tool_call(call_of("b"), making("b")))
    await passed()
    second.cancel()
    await passed()
    store.gate.set()
    await first
    assert [*store.started] == ["a"]


async def test_what_cancelled_callers_left_on_its_way_is_waited_for(
    ledger: TurnLedger, store: FakeStore
) -> None:
    ledger.model_call("", "question").hold(b"reply")
    store.gate.clear()
    calling = asyncio.create_task(together(ledger, "ab"))
    await passed()
    calling.cancel()
    saving = asyncio.create_task(ledger.save_held())
    await passed()
    assert not saving.done()
    store.gate.set()
    await saving
    assert store.calls == [("start", [":question:0", "a", "b"])]


async def test_a_start_that_is_cancelled_alone_keeps_its_replies(
    ledger: TurnLedger, store: FakeStore
) -> None:
    """Whether it was done is not known: the replies are journaled again."""
    ledger.model_call("", "question").hold(b"reply")
    store.gate.clear()
    calling = asyncio.create_task(together(ledger, "a"))
    await passed()
    calling.cancel()
    await passed()
    store.gate.set()
    await ledger.save_held()
    assert store.calls == [("start", [":question:0", "a"]), ("journal", [":question:0"])]


async def test_an_output_is_recorded_although_its_caller_is_cancelled(
    ledger: TurnLedger, store: FakeStore
) -> None:
    """Those on their way, alone or not, and those that wait for their turn."""
    is_made = {name: asyncio.Event() for name in "abc"}

    async def call(name: str) -> ToolOutcome:
        async def make() -> bytes:
            await is_made[name].wait()
            return name.encode()

        return await ledger.tool_call(call_of(name), make)

    calling = [asyncio.create_task(call(name)) for name in "abc"]
    await passed()
    store.gate.clear()
    for name in "abc":
        is_made[name].set()
        await passed()
    for each in calling:
        each.cancel()
    await passed()
    store.gate.set()
    await ledger.drained()
    assert [each.cancelled() for each in calling] == [True] * 3
    assert store.outputs == {name: name.encode() for name in "abc"}


async def test_a_turn_that_is_handed_back_keeps_its_replies(
    ledger: TurnLedger, store: FakeStore
) -> None:
    ledger.model_call("", "question").hold(b"reply")
    await ledger.save_held()
    assert store.calls == [("journal", [":question:0"])]


async def test_an_event_loop_that_ends_leaves_nobody_waiting(
    ledger: TurnLedger, store: FakeStore
) -> None:
    store.gate.clear()
    asking = [asyncio.create_task(ledger.tool_call(call_of(name), making(name))) for name in "ab"]
    await passed()
    asking.append(asyncio.create_task(ledger.tool_call(call_of("c"), making("c"))))
    await passed()
    (writer,) = asyncio.all_tasks() - {asyncio.current_task(), *asking}
    writer.cancel()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError] * 3
