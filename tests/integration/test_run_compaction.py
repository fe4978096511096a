"""Runs whose history is compacted between their turns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from capsule_tasks import History, SyncHistory
from capsule_tasks.durable import OnUncertain
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff, HandoffInput
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.compaction import (
    Compaction,
    OldItems,
    ResponsesCompactor,
    SummaryCompactor,
    compact,
    summary_message,
)
from capsule_tasks.runs.compaction.cutting import has_halves, is_compaction
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.results import RunResult
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.models.model import ModelReply, ModelRequest, ModelSettings
from capsule_tasks.runs.models.openai_responses import OpenAIResponses
from capsule_tasks.runs.records import Item, Spent
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage import AsyncConnections, RunStore
from capsule_tasks.testing.models import ScriptedModel, StatelessModel, calls, says
from tests.integration.durable_agents import Door, Effect, Killer, Runs, kill_points
from tests.integration.histories import own_settings
from tests.integration.killing import cancelled_at
from tests.integration.responses_server import KEY, ResponsesServer

SUMMARY = summary_message("orders")


@function_tool
async def look_up(order: int) -> str:
    """Look an order up."""
    return f"order {order} " * 20


@function_tool(needs_approval=True)
async def refund(order: int) -> str:
    """Pay an order back."""
    return f"paid {order} back " * 20


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def shop(*replies: Any, **options: Any) -> tuple[Agent, ScriptedModel]:
    model = ScriptedModel(replies)
    return Agent(name="shop", model=model, tools=[look_up, refund], **options), model


def look(number: int) -> Item:
    return calls("look_up", {"order": number}, f"c{number}")


def policy(threshold_items: int = 4, **changes: Any) -> RunConfig:
    changes = {"keep_last": 0} | changes
    compactor = changes.pop("compactor", SummaryCompactor(ScriptedModel([says("orders")] * 9)))
    return RunConfig(compaction=Compaction(compactor, threshold_items=threshold_items, **changes))


def kinds(items: Sequence[Item]) -> list[str]:
    """Items in short: what they are, and the call or the text."""
    found = []
    for item in items:
        if is_compaction(item):
            found.append("compaction")
        elif item.get("type", "message") == "message":
            found.append(item["role"])
        else:
            found.append(
                f"{item['type'].removeprefix('function_call') or 'call'} {item['call_id']}"
            )
    return found


@pytest.fixture
async def history(valkey_url: str) -> AsyncIterator[History]:
    async with History("s", valkey_url, settings=own_settings()) as history:
        yield history


async def plain(agent: Agent, given: Any, **options: Any) -> RunResult:
    return await Runner.run(agent, given, **options)


async def streamed(agent: Agent, given: Any, **options: Any) -> RunResult:
    return await Runner.run_streamed(agent, given, **options).result()


MODES = pytest.mark.parametrize("run", [plain, streamed])
Run = Callable[..., Any]


@MODES
async def test_a_long_run_is_compacted_between_its_turns(history: History, run: Run) -> None:
    agent, model = shop(look(1), look(2), look(3), "done")
    result = await run(agent, "my orders?", session=history, run_config=policy(5, keep_last=2))
    assert result.final_output == "done"
    # After two turns there are five items; the summary takes the place of all but the last two.
    assert [kinds(request.input) for request in model.requests] == [
        ["user"],
        ["user", "call c1", "_output c1"],
        ["compaction", "call c2", "_output c2"],
        ["compaction", "call c2", "_output c2", "call c3", "_output c3"],
    ]
    stored = await history.get_items()
    assert kinds(stored) == ["compaction", "call c3", "_output c3", "assistant"]
    assert [kinds([item]) for item in result.items].count(["compaction"]) == 2
    assert result.usage.requests == 6  # four of the run, two of its compactions
    # The state goes on from here, in any process.
    again = RunState.from_string(result.state.to_string())
    assert again.total_usage().requests == 6


async def test_a_watched_run_shows_its_compactions(history: History) -> None:
    agent, _ = shop(look(1), look(2), "done")
    stream = Runner.run_streamed(agent, "hi", session=history, run_config=policy(5))
    events = [(event.kind, event.data) async for event in stream.events()]
    (report,) = [data for kind, data in events if kind == "compaction"]
    assert report["outcome"] == "replaced"
    assert report["replaced_items"] == 5
    assert report["spent"]["requests"] == 1
    at = events.index(("compaction", report))
    assert events[at - 1] == ("item", SUMMARY)


@MODES
async def test_a_history_that_is_long_already_is_compacted_first(
    history: History, run: Run
) -> None:
    await history.add_items([user("old " * 20)] * 7)
    agent, model = shop("done")
    asked: list[Any] = []

    def callback(before: list[Item], new: list[Item]) -> list[Item]:
        asked.append(before)
        return before + new

    config = policy(5)
    config = RunConfig(compaction=config.compaction, session_input_callback=callback)
    await run(agent, "hi", session=history, run_config=config)
    assert list(model.requests[0].input) == [SUMMARY, user("hi")]
    assert asked == [[SUMMARY]]
    assert kinds(await history.get_items()) == ["compaction", "user", "assistant"]


@MODES
async def test_nothing_is_compacted_while_a_call_waits(history: History, run: Run) -> None:
    pay = calls("refund", {"order": 7}, "pay")
    agent, model = shop(look(1), [look(2), pay], "done")
    config = policy(6)
    result = await run(agent, "hi", session=history, run_config=config)
    assert [call.call_id for call in result.interruptions] == ["pay"]
    expected = ["user", "call c1", "_output c1", "call c2", "call pay", "_output c2"]
    assert kinds(await history.get_items()) == expected
    state = RunState.from_string(result.state.approve("pay").to_string())
    result = await run(agent, state, session=history, run_config=config)
    assert result.final_output == "done"
    assert kinds(model.requests[-1].input) == ["compaction"]
    assert kinds(await history.get_items()) == ["compaction", "assistant"]


async def test_a_call_of_a_parked_run_survives_compactions_of_other_runs(history: History) -> None:
    pay = calls("refund", {"order": 7}, "pay")
    agent, _ = shop(pay, "paid")
    parked = await Runner.run(agent, "pay me back", session=history)
    other, _ = shop(look(1), "done")
    await Runner.run(other, "look " * 20, session=history, run_config=policy(5))
    assert kinds(await history.get_items()) == ["compaction", "call pay"]
    result = await Runner.run(agent, parked.state.approve("pay"), session=history)
    assert result.final_output == "paid"
    stored = await history.get_items()
    assert kinds(stored) == ["compaction", "call pay", "_output pay", "assistant"]


@MODES
async def test_a_compaction_that_fails_is_no_failure_of_the_run(history: History, run: Run) -> None:
    writer = ScriptedModel([says(""), says("orders")])
    agent, model = shop(look(1), look(2), look(3), look(4), "done")
    config = policy(3, compactor=SummaryCompactor(writer, settings=ModelSettings()))
    result = await run(agent, "hi", session=history, run_config=config)
    assert result.final_output == "done"
    # The compaction is tried again when there is a quarter more.
    assert [kinds(request.input)[0] for request in model.requests] == [
        *("user", "user", "compaction", "compaction", "compaction")
    ]
    assert result.usage.requests == 6  # of one that failed nobody knows


@pytest.mark.parametrize("mode", ["auto", "input"])
@pytest.mark.parametrize("store", [None, False])
async def test_a_server_is_sent_the_response_that_it_has_stored_or_the_items(
    history: History, store: bool | None, mode: Any
) -> None:
    made = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
    with ResponsesServer() as server:
        server.add(look(1), says("done"), [made])
        model = OpenAIResponses("stand-in-1", base_url=server.url, api_key=KEY)
        agent = Agent(name="shop", model=model, tools=[look_up])
        config = RunConfig(
            compaction=Compaction(ResponsesCompactor(model, mode), threshold_items=4),
            model_settings=ModelSettings(store=store),
        )
        result = await Runner.run(agent, "hi", session=history, run_config=config)
        await model.aclose()
    assert result.items[-1] == made
    assert await history.get_items() == [made]
    body = server.requests[-1].body
    assert server.requests[-1].path.endswith("/responses/compact")
    if mode == "auto" and store is None:
        assert body == {"model": "stand-in-1", "previous_response_id": "resp_2"}
    else:
        assert kinds(body["input"]) == ["user", "call c1", "_output c1", "assistant"]
        assert "previous_response_id" not in body
    assert result.usage.requests == 3


async def test_a_filtered_view_becomes_the_compacted_history(history: History) -> None:
    def only_the_last(handed: HandoffInput) -> list[Item]:
        return [*handed.earlier[-1:], *handed.turn]

    clerk, clerk_model = shop(look(3), look(4), "done", handoffs=[])
    first = ScriptedModel([look(1), calls("transfer_to_shop", {}, "h")])
    triage = Agent(
        name="triage",
        model=first,
        tools=[look_up],
        handoffs=[Handoff(agent=clerk, input_filter=only_the_last)],
    )
    result = await Runner.run(triage, "hi", session=history, run_config=policy(6))
    assert result.final_output == "done"
    assert [kinds(request.input) for request in clerk_model.requests] == [
        ["call h", "_output h"],
        ["call h", "_output h", "call c3", "_output c3"],
        ["compaction"],
    ]
    assert kinds(await history.get_items()) == ["compaction", "assistant"]


async def test_what_a_compaction_cannot_make_shorter_is_not_compacted_every_turn(
    history: History,
) -> None:
    writer = ScriptedModel([says("orders")] * 9)
    agent, _ = shop(*(look(number) for number in range(8)), "done")
    rule = Compaction(SummaryCompactor(writer), should=lambda since: len(since) > 1, keep_last=2)
    result = await Runner.run(agent, "hi", session=history, run_config=RunConfig(compaction=rule))
    assert result.final_output == "done"
    assert len(writer.requests) == 5  # after every second of the nine turns


async def test_what_somebody_else_has_compacted_is_seen(history: History) -> None:
    @function_tool
    async def tidy() -> str:
        """Compact the history from elsewhere."""
        await compact(history, SummaryCompactor(ScriptedModel([says("tidied")]), keep_last=0))
        return "tidy"

    model = ScriptedModel([look(1), calls("tidy", {}, "t"), "done"])
    agent = Agent(name="shop", model=model, tools=[look_up, tidy])
    config = policy(5, keep_last=2)
    await Runner.run(agent, "hi", session=history, run_config=config)
    assert kinds(model.requests[-1].input) == ["compaction", "call t", "_output t"]


def test_a_run_that_blocks_compacts_a_blocking_history(valkey_url: str) -> None:
    with SyncHistory("s", valkey_url, settings=own_settings()) as history:
        agent, _ = shop(look(1), look(2), "done")
        result = Runner.run_sync(agent, "hi", session=history, run_config=policy(5))
        assert result.final_output == "done"
        assert kinds(history.get_items()) == ["compaction", "assistant"]


async def test_a_policy_beside_a_conversation_of_the_server_is_refused() -> None:
    agent, _ = shop("done")
    with pytest.raises(InvalidSetting, match="compaction"):
        await Runner.run(agent, "hi", previous_response_id="resp_1", run_config=policy())
    with pytest.raises(InvalidSetting, match="compaction"):
        RunConfig(compaction=policy().compaction, auto_previous_response_id=True)


async def test_items_of_others_are_seen_after_a_compaction(history: History) -> None:
    agent, model = shop(look(1), look(2), "done")

    async def interfere() -> None:
        await history.add_items([user("wait, one more thing")])

    class Interfered(SummaryCompactor):
        async def compacted(self, old: Any) -> Any:
            await interfere()
            return await super().compacted(old)

    compactor = Interfered(ScriptedModel([says("orders")]))
    config = policy(5, compactor=compactor)
    await Runner.run(agent, "hi", session=history, run_config=config)
    assert kinds(model.requests[-1].input) == ["compaction", "user"]
    assert kinds(await history.get_items()) == ["compaction", "user", "assistant"]


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancel_at_any_await_of_a_run_leaves_a_whole_history(
    valkey_url: str, times: int
) -> None:
    shared = AsyncConnections(valkey_url)
    history = History("s", shared, settings=own_settings())
    old = [user("old " * 20), says("yes"), user("older " * 20), says("no")]
    seen = set()
    for at in range(200):
        await history.clear_session()
        await history.add_items(old)
        agent, _ = shop(look(1), look(2), "done")

        async def run(agent: Agent = agent) -> None:
            await Runner.run(agent, "hi", session=history, run_config=policy(4))

        ended = await cancelled_at(run, at, times)
        left = await history.get_items()
        assert not has_halves(left)
        compactions = [is_compaction(item) for item in left]
        assert compactions == sorted(compactions, reverse=True)
        assert left[: len(old)] == old or compactions.count(True) == 1
        seen.add(tuple(kinds(left)))
        if ended:
            break
    assert ended
    assert seen >= {("user", "assistant", "user", "assistant"), ("compaction",)}
    assert kinds(left)[-1] == "assistant"
    await shared.close()


async def test_runs_of_one_session_compact_it_side_by_side(history: History) -> None:
    """Each of them finishes, whoever's compaction is made."""

    async def run(number: int) -> str:
        agent, _ = shop(*(look(10 * number + turn) for turn in range(6)), f"done {number}")
        result = await Runner.run(agent, f"{number}", session=history, run_config=policy(6))
        return str(result.final_output)

    found = await asyncio.gather(*map(run, range(4)))
    assert found == [f"done {number}" for number in range(4)]
    assert not has_halves(await history.get_items())


# --- durable runs --------------------------------------------------------------------------------

LAST = 6


def _latest(items: Sequence[Item]) -> int:
    """The number of the last order that these items, or a summary among them, tell of."""
    numbers = [re.findall(r"order-(\d+)", str(item)) for item in items]
    return max((int(each) for found in numbers for each in found), default=0)


class Orders(StatelessModel):
    """Looks at one order after the other. It goes on from a summary, too, in any process."""

    def choose(self, request: ModelRequest) -> tuple[int, Any]:
        number = _latest(request.input) + 1
        if number > LAST:
            return number, [says("all done")]
        return number, [calls("look", {"what": f"order-{number}"}, f"c{number}")]


class Numbers:
    """A compactor that says which order was the last."""

    keep_last = 2

    async def compacted(self, old: OldItems) -> ModelReply:
        summary = summary_message(f"all up to order-{_latest(old.items)}")
        return ModelReply(items=[summary], spent=Spent(requests=1))


def orders(effect: Effect, on_call: Callable[[], None], policy: OnUncertain) -> AgentEngine:
    @function_tool
    async def look(what: str) -> str:
        effect(f"look {what}")
        return f"saw {what} " * 10

    agent = Agent(name="front", model=Orders([], on_call=lambda _: on_call()), tools=[look])
    compaction = Compaction(Numbers(), threshold_items=5)
    return AgentEngine(agent, run_config=RunConfig(compaction=compaction), on_uncertain=policy)


async def test_a_durable_run_is_compacted_between_its_turns(store: RunStore) -> None:
    runs = Runs(store, orders(lambda _: None, lambda: None, "park"))
    await runs.start()
    assert await runs.to_end() == "completed"
    assert (await store.read("r")).result == b'"all done"'
    assert kinds(await runs.items()) == ["compaction", "call c6", "_output c6", "assistant"]
    reports = [event for event in runs.events if event.kind == "compaction"]
    assert [event.agent for event in reports] == ["front"] * 3
    assert (await store.read("r")).usage.requests == LAST + 1 + len(reports)


def test_a_kill_around_a_compaction_loses_nothing(valkey_url: str, prefix: str) -> None:
    killer = Killer(valkey_url, prefix, "park", Door(orders, UNCERTAIN))
    killer.start("whole")
    assert killer.drive("whole", "w", None)
    wanted = killer.outcome("whole")[:2]
    assert wanted == ("completed", b'"all done"')
    count = 0
    for at, run_id in kill_points(killer, 13):
        count += 1
        assert killer.outcome(run_id)[:2] == wanted, at
        assert killer.effects(run_id) == killer.effects("whole"), at
        history = asyncio.run(_history(killer, run_id))
        assert not has_halves(history), at
        assert kinds(history)[0] == "compaction", at
        assert sum(map(is_compaction, history)) == 1, at
    assert count > 5


async def _history(killer: Killer, run_id: str) -> list[Item]:
    async with killer.store() as store:
        return await Runs(store, killer.door.of_office()).items(run_id)
