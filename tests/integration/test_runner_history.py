"""Runs in process with histories in Redis: each kind of session, rewinds, limits, compaction."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks import Agent, History, RunConfig, Runner, SyncHistory, function_tool
from capsule_tasks.errors import HistoryFull, MaxTurnsExceeded, TurnNotStored
from capsule_tasks.runs import RunState
from capsule_tasks.runs.compaction import Compaction, SummaryCompactor
from capsule_tasks.settings import HistorySettings
from capsule_tasks.testing.models import ScriptedModel, calls
from tests.unit.runs.engine.runs import MODES, Mode, spelled


@function_tool
def look(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


CALL = calls("look", {"order": 1}, "c1")
TURNS = ["user hi", "call c1", "output c1 order 1", "says done"]


def agent_of(*replies: Any, **options: Any) -> Agent:
    return Agent(name="Agent", model=ScriptedModel(replies), tools=[look], **options)


def settings(prefix: str, **options: Any) -> HistorySettings:
    return HistorySettings(prefix=prefix, **options)


@pytest.mark.parametrize("mode", MODES)
async def test_a_run_is_in_its_history_once(valkey_url: str, prefix: str, mode: Mode) -> None:
    async with History("s1", valkey_url, settings=settings(prefix)) as history:
        before = [{"role": "user", "content": "earlier"}]
        await history.add_items(before)
        with_error = await mode.run(agent_of(CALL, "done"), "hi", session=history, max_turns=1)
        assert isinstance(with_error.error, MaxTurnsExceeded)
        state = RunState.from_string(with_error.error.state.to_string())
        ended = await mode.run(agent_of("done"), state, session=history, max_turns=2)
        assert spelled(await history.get_items()) == ["user earlier", *TURNS]
        # Others that append keep a run from being rewound; what it has stored stays whole.
        other = [{"role": "user", "content": "other"}]
        await history.add_items(other)
        refused = await ended.result.rewind()
        assert (refused.removed, refused.found) == (False, other)
        await history.pop_suffix(other)
        assert (await ended.result.rewind()).removed
        assert (await with_error.error.rewind()).removed
        assert await history.get_items() == before


def test_a_program_that_blocks_uses_either_history(valkey_url: str, prefix: str) -> None:
    with SyncHistory("s1", valkey_url, settings=settings(prefix)) as history:
        result = Runner.run_sync(agent_of(CALL, "done"), "hi", session=history)
        assert result.final_output == "done"
        assert spelled(history.get_items()) == TURNS
        other = History("s1", valkey_url, settings=settings(prefix))
        for _ in range(2):  # each in an event loop of its own
            Runner.run_sync(agent_of("more"), "again", session=other)
        assert spelled(history.get_items()) == [*TURNS, *["user again", "says more"] * 2]


async def test_outputs_that_a_limit_orphans_are_not_shown(valkey_url: str, prefix: str) -> None:
    limit = {"limit": 2}
    async with History(
        "s1", valkey_url, settings=settings(prefix), session_settings=limit
    ) as history:
        await Runner.run(agent_of(CALL, "done"), "hi", session=history)
        agent = agent_of("more")
        model: Any = agent.model
        await Runner.run(agent, "again", session=history)
        assert spelled(list(model.requests[0].input)) == ["says done", "user again"]
        assert spelled(await history.get_items(100)) == [*TURNS, "user again", "says more"]


async def test_a_history_that_is_full_ends_the_run_with_its_items(
    valkey_url: str, prefix: str
) -> None:
    async with History("s1", valkey_url, settings=settings(prefix, max_items=3)) as history:
        with pytest.raises(TurnNotStored) as caught:
            await Runner.run(agent_of(CALL, "done"), "hi", session=history)
        assert isinstance(caught.value.__cause__, HistoryFull)
        assert spelled(list(caught.value.unsaved)) == ["says done"]
        assert spelled(await history.get_items()) == TURNS[:3]


@pytest.mark.parametrize("mode", MODES)
async def test_a_history_is_compacted_between_turns(
    valkey_url: str, prefix: str, mode: Mode
) -> None:
    summary = ScriptedModel(["short", "short"])
    policy = Compaction(SummaryCompactor(summary), threshold_items=6, keep_last=2)
    replies = [calls("look", {"order": number}, f"c{number}") for number in range(4)]
    agent = agent_of(*replies, "done")
    model: Any = agent.model
    async with History("s1", valkey_url, settings=settings(prefix)) as history:
        await history.add_items([{"role": "user", "content": "long " * 300}])
        config = RunConfig(compaction=policy)
        ended = await mode.run(agent, "hi", session=history, run_config=config)
        assert ended.result.final_output == "done"
        items = await history.get_items()
        assert "short" in str(items[0])
        assert len(items) < 8
        assert spelled(items)[-1] == "says done"
        assert "long" not in str(model.requests[-1].input)
        assert ended.result.usage.requests == 5 + len(summary.requests)
        assert not (await ended.result.rewind()).removed
        if mode.streamed:
            assert "compaction" in [event.kind for event in ended.events]
