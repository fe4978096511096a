"""A prepared agent is still an agent that its owner may copy and look at."""

from __future__ import annotations

import copy
from typing import Any

from agents import Agent, ApplyPatchTool, function_tool

from capsule_tasks.openai_agents.graph import prepare
from tests.agents_script import ScriptedModel, says


class Editor:
    def __init__(self) -> None:
        self.deleted: list[str] = []

    def create_file(self, operation: Any) -> None: ...

    def update_file(self, operation: Any) -> None: ...

    def delete_file(self, operation: Any) -> None:
        self.deleted.append(operation.path)


@function_tool
def look() -> str:
    return "saw"


def test_a_prepared_agent_can_be_copied_deeply() -> None:
    tools = [look, ApplyPatchTool(editor=Editor())]
    agent = Agent(name="a", model=ScriptedModel(says("hi")), tools=tools)
    prepare(agent)
    # A handoff's input filter may copy the items of a run, which refer to their agents.
    twin: Any = copy.deepcopy(agent)
    assert twin.model.asked == []
    assert twin.model is not agent.model
    assert twin.tools[1].editor.deleted == []


def test_agents_that_share_a_model_are_as_equal_as_they_were() -> None:
    model = ScriptedModel()
    one, same, other = (Agent(name="a", model=each) for each in (model, model, ScriptedModel()))
    for agent in (one, same, other):
        prepare(agent)
    assert one.model == same.model
    assert len({one.model, same.model, other.model}) == 2
