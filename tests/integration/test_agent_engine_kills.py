"""Runs of our own engine whose worker is killed at each await, compared with runs without kills."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from capsule_tasks.durable import Engine, OnUncertain
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.runs.engine.ports import UNCERTAIN
from tests.integration.agents.runs import office
from tests.integration.durable_agents import Door, Effect, Killer, check_kills

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
