"""Runs of our own engine whose worker is killed at each await, compared with runs without kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks import Agent, RunConfig, function_tool
from capsule_tasks.durable import Engine, OnUncertain
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.runs.compaction import Compaction, SummaryCompactor
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.models.model import ModelRequest
from capsule_tasks.testing.models import ScriptedModel, calls, says
from tests.integration.agents.runs import office
from tests.integration.durable_agents import Door, Effect, Killer, check_kills, kill_points

STEP = 23
"""Awaits between two kills; these turns have fewer of them than those of openai-agents."""


def engine(effect: Effect, on_call: Callable[[], None], policy: OnUncertain) -> Engine:
    return AgentEngine(office(effect, on_call), on_uncertain=policy)


DOOR = Door(engine, UNCERTAIN)


@pytest.mark.parametrize("policy", ["park", "retry", "tell"])
def test_a_killed_run_ends_as_one_that_was_not_killed(
    valkey_url: str, prefix: str, policy: OnUncertain
) -> None:
    check_kills(Killer(valkey_url, prefix, policy, DOOR), policy, STEP)


@pytest.mark.full
def test_kills_at_many_awaits(valkey_url: str, prefix: str) -> None:
    check_kills(Killer(valkey_url, prefix, "park", DOOR), "park", 1)


# --- a history that is compacted meanwhile -------------------------------------------------------


class Counting(ScriptedModel):
    """Looks at one thing after the other, by the latest output in its view."""

    def __init__(self, on_call: Callable[[], None]) -> None:
        super().__init__()
        self._on_call = on_call

    def choose(self, request: ModelRequest) -> tuple[int, Any]:
        self._on_call()
        outputs = [str(item["output"]) for item in request.input if "output" in item]
        number = int(outputs[-1].split()[-1]) + 1 if outputs else 0
        return 1, calls("look", {"what": str(number)}, f"c{number}") if number < 7 else "all done"


def compacting(effect: Effect, on_call: Callable[[], None], policy: OnUncertain) -> Engine:
    @function_tool
    async def look(what: str) -> str:
        effect(f"look {what}")
        return f"saw {what}"

    summary = SummaryCompactor(ScriptedModel([says("in short")] * 9))
    config = RunConfig(compaction=Compaction(summary, threshold_items=5, keep_last=2))
    agent = Agent(name="a", model=Counting(on_call), tools=[look])
    return AgentEngine(agent, on_uncertain=policy, run_config=config)


@pytest.mark.full
def test_kills_at_many_awaits_while_the_history_is_compacted(valkey_url: str, prefix: str) -> None:
    killer = Killer(valkey_url, prefix, "park", Door(compacting, UNCERTAIN))
    killer.start("whole")
    assert killer.drive("whole", "w", None)
    status, result, history = killer.outcome("whole")
    for at, run_id in kill_points(killer, 3):
        found = killer.outcome(run_id)
        assert found[:2] == (status, result), at
        assert killer.effects(run_id) == killer.effects("whole"), at
        made, answered = (
            sorted(call_id for kind, call_id, _ in found[2] if kind == wanted)
            for wanted in ("function_call", "function_call_output")
        )
        assert made == answered == sorted(set(made)), at
        assert len(found[2]) <= len(history) + 3, at  # that of a turn, if it was compacted later
