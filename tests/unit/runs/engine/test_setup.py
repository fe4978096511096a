"""The abilities of an agent in a turn."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.engine.setup import Abilities, AgentBook

CONTEXT = RunContext(run_id="r")


def lookup(name: str) -> str:
    return name


async def abilities_of(agent: Agent) -> Abilities:
    book = AgentBook(agent)
    return await book.abilities(book.identity(agent), CONTEXT)


async def test_a_tool_and_a_handoff_of_one_name_are_refused() -> None:
    agent = Agent(name="A", tools=[function_tool(lookup)])
    agent.handoffs.append(Handoff(Agent(name="B"), name="lookup"))
    with pytest.raises(InvalidSetting, match="a tool of agent A = 'lookup'"):
        await abilities_of(agent)


async def test_only_enabled_tools_count() -> None:
    async def is_never(_context: RunContext, _agent: Agent) -> bool:
        return False

    hidden = function_tool(is_enabled=is_never)(lookup)
    found = await abilities_of(Agent(name="A", tools=[hidden, function_tool(lookup)]))
    assert [spec.name for spec in found.specs] == ["lookup"]
