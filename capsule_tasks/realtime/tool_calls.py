"""Makes the tool calls of a session, each in tasks of its own, and has the model get the outputs.

The way of a call: an event of the model, people's approval if it needs one, the guardrails and the
function, the output in the history, the output at the model. `CallTable` knows how far a call has
come. A call that waits for people has no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec

from capsule_tasks.errors import (
    AgentReplaced,
    CallChanged,
    ModelMisbehaved,
    RealtimeClosed,
    UnknownAgent,
    WrongArguments,
)
from capsule_tasks.realtime.call_table import CallTable
from capsule_tasks.realtime.events import (
    RealtimeErrorEvent,
    RealtimeToolApprovalRequired,
    RealtimeToolEnd,
    RealtimeToolStart,
    RealtimeToolUpdate,
)
from capsule_tasks.realtime.host import AgentSnapshot, SessionHost
from capsule_tasks.realtime.model import SendToolOutput, ToolCalled
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.approvals import PendingCall, RunApprovals
from capsule_tasks.runs.engine.deciding import about_unknown, call_of, output_item
from capsule_tasks.runs.engine.guardrails import Guardrails, shown
from capsule_tasks.runs.engine.nested import run_inner
from capsule_tasks.runs.engine.ports import UNCERTAIN, InProcessPorts, Output
from capsule_tasks.runs.engine.setup import RunSetup, told_of_handoff
from capsule_tasks.runs.engine.tools import ToolCaller, withheld
from capsule_tasks.runs.engine.turn import Turn
from capsule_tasks.runs.engine.waiting import is_ended_by
from capsule_tasks.runs.records import GuardrailResult, Item
from capsule_tasks.runs.state import RunState

_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 2.0
"""How long after a failure an output is sent again: at first, and at most."""


@dataclass(eq=False)
class _OpenCall:
    """The agent and the ports of a call whose output the model does not have yet."""

    table: CallTable
    snapshot: AgentSnapshot
    """The agent that was told to the model when it made the call."""
    ports: InProcessPorts
    is_started: bool = False
    asked: set[str] = field(default_factory=set)
    """The ids of the calls that people were asked about."""
    wants_output: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the model makes the call again, and so lacks the output."""


class ToolCalls:
    """The tool calls of one session."""

    def __init__(self, host: SessionHost, record: Callable[[Item], None], state: RunState) -> None:
        """`record` puts an output into the conversation; `state` is the one to go on from."""
        self._host = host
        self._record = record
        self._first = CallTable(state)
        self._tables: dict[Agent, CallTable] = {}
        """The calls and the decisions of each graph, by the agent that it begins with. An agent of
        another graph is another agent, although it may have the same name."""
        self._open: dict[str, _OpenCall] = {}

    def called(self, event: ToolCalled, snapshot: AgentSnapshot) -> None:
        """Make a call, unless the model has made it before."""
        able = snapshot.able
        item = {"call_id": event.call_id, "name": event.name, "arguments": event.arguments}
        try:
            call = call_of(item, able.identity)
            if call.tool not in able.tools:
                call = msgspec.structs.replace(call, needs_approval=False)
            own = self._table_of(snapshot.run.book.start)
            known = (each for each in self._tables.values() if each.knows(call.call_id))
            table = next(known, own)
            step = table.called(call)
        except (ModelMisbehaved, CallChanged) as error:
            self._host.emit(RealtimeErrorEvent(error))
            return
        if step == "run":
            self._begin([call], snapshot, table)
        elif step == "send":
            self._open[call.call_id].wants_output.set()

    def approve(self, call_id: str, *, always: bool = False) -> None:
        """Approve a waiting call; with `always` also all other calls of its tool by its agent.

        Raises UnknownCall if no such call waits.
        """
        self._go_on(self._table_asking(call_id).decide(call_id, approved=True, always=always))

    def reject(self, call_id: str, *, always: bool = False, message: str | None = None) -> None:
        """Reject a waiting call; the message is for the model. Raises UnknownCall."""
        table = self._table_asking(call_id)
        self._go_on(table.decide(call_id, approved=False, always=always, message=message))

    def resume(self, snapshot: AgentSnapshot) -> None:
        """Go on with the calls of the state: make them, or ask people about them again."""
        table = self._table_of(snapshot.run.book.start)
        self._begin(table.state.calls, snapshot, table)

    def end(self, open_approvals: Literal["return", "abandon"]) -> tuple[PendingCall, ...]:
        """Record the outputs of calls that are not made any more; answers the abandoned ones.

        Calls of another graph than the current one are abandoned: whoever goes on does not have
        their agents. To be called once all tasks of the session have ended. It may be repeated.
        """
        current = self._table_of(self._host.snapshot.run.book.start)
        for table in self._tables.values():
            ends = table.end(open_approvals if table is current else "abandon")
            for call_id, output in ends.items():
                self._record(output_item(call_id, output))
        return tuple(call for table in self._tables.values() for call in table.abandoned)

    def in_state(self, state: RunState, start: Agent) -> RunState:
        """The state with what the graph of `start` can go on with, and the usage of all calls."""
        current = self._table_of(start)
        for table in self._tables.values():
            if table is not current:
                state = table.with_usage(state)
        return msgspec.structs.replace(current.in_state(state), code=self._first.state.code)

    def _table_of(self, start: Agent) -> CallTable:
        if not self._tables:
            self._tables[start] = self._first
        elif start not in self._tables:
            empty = {"calls": (), "approvals": RunApprovals(), "nested": {}, "code": None}
            self._tables[start] = CallTable(msgspec.structs.replace(self._first.state, **empty))
        return self._tables[start]

    def _table_asking(self, call_id: str) -> CallTable:
        """The table of a call that waits for people; any other one refuses a decision."""
        return next((each for each in self._tables.values() if each.asks(call_id)), self._first)

    # --- the way of a call -----------------------------------------------------------------------

    def _begin(
        self, calls: Iterable[PendingCall], snapshot: AgentSnapshot, table: CallTable
    ) -> None:
        for call in calls:
            ports = InProcessPorts(partial(self._publish, call))
            self._open[call.call_id] = _OpenCall(table, snapshot, ports)
        self._go_on(calls)

    def _go_on(self, calls: Iterable[PendingCall]) -> None:
        for call in calls:
            self._host.start(self._answered(call), f"call {call.call_id} of {call.tool.name}")

    async def _answered(self, call: PendingCall) -> None:
        """Make a call as far as that is possible now, and have the model get its output."""
        task = asyncio.current_task()
        failure = None
        output: Output | None
        try:
            output = await self._output(call)
        except RealtimeClosed:  # `end` says what becomes of the call
            return
        except asyncio.CancelledError as cancel:
            self._refuse_cancel(cancel)
            output = UNCERTAIN
        except UnknownAgent:  # the call is of a state whose graph has another agent
            output = f"There is no tool {call.tool.name!r} any more."
        except GeneratorExit as error:
            if is_ended_by(error, task):
                raise
            output = f"The tool failed: it raised {error!r}"
        except Exception as error:  # noqa: BLE001  the model would wait for the output in vain
            failure, output = error, withheld(error)
        if output is not None and self._open[call.call_id].table.made(call.call_id):
            text = _as_text(output)
            self._record(output_item(call.call_id, text))
            if failure is None:
                await self._sent(call, text)
        if failure is not None:
            self._host.end(failure)

    async def _output(self, call: PendingCall) -> Output | None:
        """The output of a call; None if it waits for people."""
        opened = self._open[call.call_id]
        opened.snapshot = await _snapshot_of(call, opened.snapshot)
        able, table = opened.snapshot.able, opened.table
        if call.tool not in able.tools:
            if call.tool.name in able.handoffs:
                return await self._handed_over(call, able.handoffs[call.tool.name], opened.snapshot)
            about = f"agent {able.agent.name!r} called {call.tool.name!r}, which it does not have"
            self._host.emit(RealtimeErrorEvent(ModelMisbehaved(about)))
            return about_unknown(call, able.tools.keys(), able.handoffs.keys())
        tool, caller = able.tools[call.tool], self._caller(opened)
        if call not in table.state.calls:  # else people were asked about it already
            if not await caller.needs_approval(tool, call):
                call = table.without_approval(call)
            elif (rejection := await caller.rejected_early(tool, call)) is not None:
                return rejection
        if call.needs_approval:
            decision = table.state.decision_for(call)
            if decision is None:
                self._waits(call, opened)
                return None
            if not decision.approved:
                return decision.rejection
        if isinstance(tool, AgentTool):
            return await self._output_of_agent(tool, call, opened)
        return await caller.output_of(tool, call)

    async def _output_of_agent(
        self, tool: AgentTool, call: PendingCall, opened: _OpenCall
    ) -> Output | None:
        """The output of an agent used as a tool; None if calls of that agent wait for people."""
        if not opened.is_started:
            opened.ports.publish("tool_started", opened.snapshot.agent.name)
        # A turn notes its number and its usage in the context, and other calls run beside it.
        run = opened.snapshot.run
        run = replace(run, context=copy(run.context))
        note = partial(opened.table.note_inner, call.call_id)
        while True:
            state = opened.table.state
            output = await run_inner(run, state, tool, call, opened.ports, Turn, note)
            if output is not None or self._waits(call, opened):
                return output

    def _waits(self, call: PendingCall, opened: _OpenCall) -> bool:
        """Have a call wait for people, and ask them; False if they have decided meanwhile."""
        if not opened.table.waits(call.call_id):
            return False
        state = msgspec.structs.replace(opened.table.state, calls=(call,))
        for each, agent in _undecided(opened.snapshot.run, state):
            if each.call_id not in opened.asked:
                opened.asked.add(each.call_id)
                about = agent, each.tool.name, each.call_id, each.arguments
                self._host.emit(RealtimeToolApprovalRequired(*about))
        return True

    async def _handed_over(
        self, call: PendingCall, handoff: Handoff, snapshot: AgentSnapshot
    ) -> str:
        try:
            given = handoff.decode(call.arguments)
        except WrongArguments as error:
            return str(error)
        if snapshot is not (current := self._host.snapshot):
            # Another handoff of the same response, or `update_agent`, came first.
            return f"Not done: {AgentReplaced(current.agent.name)}."
        if handoff.on_handoff is not None:
            self._open[call.call_id].table.begun.add(call.call_id)
        output = await told_of_handoff(snapshot.agent, handoff, snapshot.run.context, given)
        try:
            await self._host.hand_over(handoff.agent, snapshot)
        except RealtimeClosed:
            raise
        except AgentReplaced as error:
            return f"Not done: {error}."
        except Exception as error:  # noqa: BLE001  whatever it is, the agent is the same as before
            self._host.emit(RealtimeErrorEvent(error))
            return f"The conversation was not handed over to {handoff.agent.name!r}: {error}"
        return output

    async def _sent(self, call: PendingCall, text: str) -> None:
        """Send an output until the model has it; the function is not called again for that."""
        opened = self._open[call.call_id]
        delay_s, has_failed = _FIRST_RETRY_S, False
        while True:
            opened.wants_output.clear()
            try:
                resets = self._resets_tool_choice(opened.snapshot.agent)
                await self._host.send(SendToolOutput(call.call_id, text, resets))
                break
            except RealtimeClosed:
                return
            except asyncio.CancelledError as cancel:
                self._refuse_cancel(cancel)
            except Exception as error:  # noqa: BLE001  any failure leaves the output to be sent
                if not has_failed:
                    self._host.emit(RealtimeErrorEvent(error))
                has_failed = True
            with suppress(TimeoutError):
                await asyncio.wait_for(opened.wants_output.wait(), delay_s)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
        opened.table.sent(call.call_id)
        del self._open[call.call_id]
        able = opened.snapshot.able
        if call.agent == able.identity and (tool := able.tools.get(call.tool)) is not None:
            agent = opened.snapshot.agent
            self._host.emit(RealtimeToolEnd(agent, tool, call.call_id, call.arguments, text))

    def _resets_tool_choice(self, caller: Agent) -> bool:
        """Whether a call was what the current agent's tool choice asks for, as `caller` made it."""
        current = self._host.snapshot
        choice = current.settings.settings.tool_choice
        is_followed = choice not in (None, "auto", "none") and current.agent is caller
        return is_followed and caller.reset_tool_choice

    def _refuse_cancel(self, cancel: asyncio.CancelledError) -> None:
        """Raise the cancel if it is that of the session's close.

        Other cancels must not keep the output from the model: a tool may cancel its own task.
        """
        if not self._host.is_open:
            raise cancel
        if (task := asyncio.current_task()) is not None:
            task.uncancel()

    def _caller(self, opened: _OpenCall) -> ToolCaller:
        able, run, ports = opened.snapshot.able, opened.snapshot.run, opened.ports

        def report(result: GuardrailResult) -> None:
            ports.publish("guardrail", result.agent.name, shown(result))

        guardrails = Guardrails(able.agent, able.identity, run.context, report)
        code, begun = self._first.state.code, opened.table.begun
        return ToolCaller(able, run, code, ports, guardrails, self._first.note_code, begun)

    def _publish(self, call: PendingCall, kind: str, _agent: str, data: Any) -> None:
        """Show an event of a call, or of the run of an agent that is used as a tool."""
        opened = self._open.get(call.call_id)
        if opened is None:  # the function has left something behind that goes on
            return
        agent, able = opened.snapshot.agent, opened.snapshot.able
        if kind != "tool_started" or opened.is_started:
            self._host.emit(RealtimeToolUpdate(agent, call.call_id, kind, data))
            return
        if not self._host.is_open:
            # A guardrail has held up the close for too long; the call is made by another session.
            raise RealtimeClosed("closed")
        opened.is_started = True
        start = RealtimeToolStart(agent, able.tools[call.tool], call.call_id, call.arguments)
        self._host.emit(start)


async def _snapshot_of(call: PendingCall, snapshot: AgentSnapshot) -> AgentSnapshot:
    """The snapshot of the agent that made the call, which may have handed over meanwhile."""
    if call.agent == snapshot.able.identity:
        return snapshot
    able = await snapshot.run.book.abilities(call.agent, snapshot.run.context)
    return replace(snapshot, able=able)


def _undecided(run: RunSetup, state: RunState) -> Iterator[tuple[PendingCall, Agent]]:
    """The calls of a run, and of inner ones, that wait for people, with the agents that make them.

    The agents of `state` are in the book of `run`.
    """
    for call in state.calls:
        agent = run.book.agent(call.agent)
        if (inner := state.nested.get(call.call_id)) is not None:
            for tool in agent.tools:
                if isinstance(tool, AgentTool) and tool.key == call.tool:
                    yield from _undecided(replace(run, book=run.book_of(tool.agent)), inner)
        elif call.needs_approval and state.decision_for(call) is None:
            yield call, agent


def _as_text(output: Output) -> str:
    """An output as a realtime model gets it, which takes text only.

    Of a list of parts, parts of type `input_text` are their text; any other part, such as an
    image, is its JSON.
    """
    if isinstance(output, str):
        return output
    return "\n".join(
        part["text"]
        if part.get("type") == "input_text" and isinstance(part.get("text"), str)
        else msgspec.json.encode(part).decode()
        for part in output
    )
