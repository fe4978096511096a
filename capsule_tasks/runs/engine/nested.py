"""Agents that are used as tools: a run of their own within a tool call.

The items of an inner run are in no history. While it waits for people, the state of the outer run
has its state, with its items; it goes on when the outer run does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from capsule_tasks.errors import (
    GuardrailTripped,
    MaxTurnsExceeded,
    ModelMisbehaved,
    WrongArguments,
)
from capsule_tasks.runs.agents.outputs import output_text
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.approvals import PendingCall, RunApprovals
from capsule_tasks.runs.conversation import conversation_of
from capsule_tasks.runs.engine.ends import TurnFailed
from capsule_tasks.runs.engine.ports import Output, TurnPorts
from capsule_tasks.runs.engine.setup import RunSetup, called_back
from capsule_tasks.runs.state import RunState

if TYPE_CHECKING:
    from capsule_tasks.runs.engine.turn import Turn

TOLD = (GuardrailTripped, MaxTurnsExceeded, ModelMisbehaved)
"""The ends of an inner run that the outer model is told of; others end the outer run, too."""


async def run_inner(
    outer: RunSetup,
    outer_state: RunState,
    tool: AgentTool,
    call: PendingCall,
    ports: TurnPorts,
    turn_of: type[Turn],
    note: Callable[[RunState], None],
) -> Output | None:
    """Run the agent of a tool to its output, or until it waits for people: None.

    An inner run that was cut before goes on from there; `note` gets its state after each turn,
    also after one that was cut. The guardrails of the configuration are for the outer run alone.
    """
    book = outer.book_of(tool.agent)
    run = replace(
        outer,
        book=book,
        config=replace(outer.config, input_guardrails=[], output_guardrails=[], compaction=None),
        max_turns=tool.max_turns or outer.max_turns,
        path=(*outer.path, call.call_id),
    )
    state = outer_state.nested.get(call.call_id)
    if state is None:
        try:
            given = tool.input_of(call.arguments)
        except WrongArguments as error:
            return str(error)
        first = book.identity(tool.agent)
        state = RunState(
            run_id=outer_state.run_id,
            start_agent=first,
            agent=first,
            input=given,
            approvals=RunApprovals(standing=outer_state.approvals.standing),
        )
    conversation = await conversation_of(state)
    while True:
        turn = turn_of(run, state, conversation, ports)
        try:
            done = await turn.make()
        except TurnFailed as failure:
            note(failure.state)
            if not isinstance(failure.cause, TOLD):
                raise failure.cause from failure
            return f"The agent {tool.agent.name!r} failed: {failure.cause}"
        except BaseException:
            note(turn.cut()[1])
            raise
        note(done.state)
        if done.step == "interrupted":
            return None
        if done.step == "final":
            output = done.output
            if tool.output is not None:
                output = await called_back("output", tool.agent, tool.output, output)
            return output_text(tool.name, output)
        state, conversation = done.state, done.conversation
