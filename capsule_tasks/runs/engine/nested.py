"""Agents that are used as tools: a run of their own within a tool call.

The items of an inner run are in no history. While it waits for people, the state of the outer run
has its state, with its items; it goes on when the outer run does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from capsule_tasks.errors import (
    GuardrailTripped,
    MaxTurnsExceeded,
    ModelMisbehaved,
    WrongArguments,
)
from capsule_tasks.runs.agents.outputs import output_text
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.approvals import PendingCall, RunApprovals
from capsule_tasks.runs.conversation import Conversation, conversation_of
from capsule_tasks.runs.engine.ends import TurnDone, TurnFailed
from capsule_tasks.runs.engine.ports import Output, TurnPorts
from capsule_tasks.runs.engine.setup import RunSetup, called_back
from capsule_tasks.runs.records import Spent
from capsule_tasks.runs.state import RunState

MakeTurn = Callable[[RunSetup, RunState, Conversation, TurnPorts], Awaitable[TurnDone]]

TOLD = (GuardrailTripped, MaxTurnsExceeded, ModelMisbehaved)
"""The ends of an inner run that the outer model is told of; others end the outer run, too."""


@dataclass(frozen=True)
class InnerEnd:
    """What came of an inner run: an output, or a state that waits for people."""

    output: Output | None
    waiting: RunState | None
    spent: Spent


async def run_inner(
    outer: RunSetup,
    outer_state: RunState,
    tool: AgentTool,
    call: PendingCall,
    ports: TurnPorts,
    make_turn: MakeTurn,
) -> InnerEnd:
    """Run the agent of a tool to its end, or until it waits; from where it waited, if it did.

    The guardrails of the run's configuration are for the outer run alone.
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
            return InnerEnd(str(error), None, Spent())
        first = book.identity(tool.agent)
        state = RunState(
            run_id=outer_state.run_id,
            start_agent=first,
            agent=first,
            input=given,
            approvals=RunApprovals(standing=outer_state.approvals.standing),
        )
    began_with = state.total_usage()
    conversation = await conversation_of(state)
    while True:
        try:
            done = await make_turn(run, state, conversation, ports)
        except TurnFailed as failure:
            if not isinstance(failure.cause, TOLD):
                raise failure.cause from failure
            text = f"The agent {tool.agent.name!r} failed: {failure.cause}"
            return InnerEnd(text, None, _since(began_with, failure.state))
        state, conversation = done.state, done.conversation
        if done.step == "interrupted":
            return InnerEnd(None, state, _since(began_with, state))
        if done.step == "final":
            output = done.output
            if tool.output is not None:
                output = await called_back("output", tool.agent, tool.output, output)
            return InnerEnd(output_text(tool.name, output), None, _since(began_with, state))


def _since(before: Spent, state: RunState) -> Spent:
    """What the inner run used in this turn of the outer run, which has counted the rest."""
    after = state.total_usage()
    names = Spent.__struct_fields__
    return Spent(**{name: getattr(after, name) - getattr(before, name) for name in names})
