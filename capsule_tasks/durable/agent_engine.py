"""Door 2: the engine that drives an agent of ours durably, one turn at a time.

The turns are those that `Runner` makes in process. Here their models and tools go through the
run's journal and ledger, and what a turn has to store is committed with the state after it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import msgspec
from msgspec.structs import replace

from capsule_tasks.durable.engine import OnUncertain, RunFailure, ToolCall, TurnEnd, TurnWork
from capsule_tasks.durable.inputs import INPUT_SCHEMA, first_snapshot, input_of
from capsule_tasks.durable.ledger import TurnStopped
from capsule_tasks.durable.policies import policies
from capsule_tasks.errors import (
    ContextNotStorable,
    InvalidRunState,
    InvalidSetting,
    StorageError,
    ToolTimeout,
    UnknownAgent,
    UnreadableSchema,
)
from capsule_tasks.protocol.messages import RunEvent
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.outputs import output_text
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.agents.schemas import as_json
from capsule_tasks.runs.agents.tools import AgentTool, Tool
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.compaction import CompactionReport
from capsule_tasks.runs.compaction.of_run import CompactedHistory
from capsule_tasks.runs.contexts import (
    Deserializer,
    SavedContext,
    Serializer,
    restored_context,
    saved_context,
)
from capsule_tasks.runs.conversation import Conversation, conversation_of
from capsule_tasks.runs.engine.ends import TurnDone, TurnFailed
from capsule_tasks.runs.engine.ports import UNCERTAIN, Output, key_of
from capsule_tasks.runs.engine.setup import DEFAULT_MAX_TURNS, AgentBook, RunSetup
from capsule_tasks.runs.engine.turn import Turn
from capsule_tasks.runs.identity import AgentGraph
from capsule_tasks.runs.items import normalized
from capsule_tasks.runs.models.model import ModelReply
from capsule_tasks.runs.parking import Limits, check_tools, parked, readable_versions, resumed
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.redaction import without_secrets
from capsule_tasks.runs.schema import CURRENT_SCHEMA_VERSION
from capsule_tasks.runs.state import RunState, ServerConversation
from capsule_tasks.settings import PositiveCount, check_value
from capsule_tasks.storage import ApprovalRequest, Claim

_log = logging.getLogger(__name__)

_NOT_OF_THE_TURN = (StorageError, InvalidRunState, UnreadableSchema, UnknownAgent)
"""Errors that say nothing about the run: the driver knows what to do."""

_read_reply = msgspec.json.Decoder(ModelReply).decode
_read_output = msgspec.json.Decoder(Output).decode


@dataclass(frozen=True)
class _Live:
    """A run between two turns of this process."""

    setup: RunSetup
    state: RunState
    conversation: Conversation
    compacted: CompactedHistory | None
    """The history, if it is kept short by a policy."""
    is_shown: bool = False
    """Whether those who watch were told of the agent whose turn is next."""


class AgentEngine:
    """An agent of ours as an engine of durable runs. One engine serves any number of runs."""

    readable = (INPUT_SCHEMA, *readable_versions())

    def __init__(
        self,
        agent: Agent,
        *,
        run_config: RunConfig | None = None,
        max_turns: int | None = DEFAULT_MAX_TURNS,
        context_serializer: Serializer | None = None,
        context_deserializer: Deserializer | None = None,
        keep_secrets: bool = False,
        on_uncertain: OnUncertain | Mapping[str, OnUncertain] = "park",
        limits: Limits | Mapping[str, Limits] | None = None,
    ) -> None:
        """`on_uncertain` is one policy, or policies by `ToolKey.text` such as `bare:refund`; that
        of a tool itself comes first. `limits` are those of approvals: one for all, which those of a
        tool itself override, or some by `ToolKey.text`, which override these.

        A context is a mapping of JSON, unless there are a serializer and a deserializer. Values
        that look like secrets are left out of it, unless `keep_secrets` is set. None as `max_turns`
        lets a run ask its models as often as it likes.
        """
        given: object = agent
        if not isinstance(given, Agent):
            raise InvalidSetting("agent", agent, "an Agent of capsule_tasks")
        given = run_config
        if given is not None and not isinstance(given, RunConfig):
            raise InvalidSetting("run_config", run_config, "a RunConfig of capsule_tasks")
        check_value("max_turns", max_turns, PositiveCount | None)
        self._book = AgentBook(agent)
        self._graph = AgentGraph(agent)  # type: ignore[arg-type]
        self._first_agent = self._book.identity(agent)
        self._config = run_config or RunConfig()
        self._max_turns = max_turns
        self._serializer = context_serializer
        self._deserializer = context_deserializer
        self._keeps_secrets = keep_secrets
        self._on_uncertain = policies(on_uncertain)
        of_tool = {tool.key.text: tool.limits for tool in _tools_of(agent) if tool.limits}
        self._limits: dict[str, Any] = {"limits": limits, "of_tool": of_tool}
        if isinstance(limits, Mapping):
            check_tools("limits", limits)
            self._limits = {"of_tool": of_tool | dict(limits)}

    # --- the Engine port -------------------------------------------------------------------------

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        """The snapshot of a new run: its input, a text or items, and its context."""
        normalized(given)  # refuses what is no item
        try:
            saved = self._saved(context)
        except Exception as error:
            must = f"a mapping of JSON, or what context_serializer takes: {error}"
            raise InvalidSetting("context", context, must) from error
        if saved.left_out:
            _log.warning("the context of a new run is stored without %s", saved.left_out)
        return first_snapshot(given, saved.value), INPUT_SCHEMA, self._first_agent.text

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        if claim.schema == INPUT_SCHEMA:
            return ()
        return parked(RunState.from_string(claim.snapshot), **self._limits).approval_requests

    def encoded(self, output: Any) -> bytes:
        return msgspec.json.encode(output_text("a tool", output))

    async def turn(self, work: TurnWork) -> TurnEnd:
        """Make one turn: one model call and its tools, or the calls that were decided.

        A turn that failed ends the run; what it has done goes into the history all the same.
        """
        ports = _LedgerPorts(work, self._on_uncertain)
        if isinstance(work.live, _Live):
            live = await _compacted(work.live, ports)
        else:
            live = await self._live(work, ports)
        if ports.is_watched and not live.is_shown:
            ports.publish("agent", live.state.agent.name)
        turn = Turn(live.setup, live.state, live.conversation, ports)
        try:
            done = await turn.make()
        except TurnFailed as failure:
            return _failed(work.claim, failure.cause, failure.items, failure.state, failure.kind)
        except asyncio.CancelledError:
            items, state = turn.cut()
            work.cut_items.extend(items if state.conversation is None else [])
            raise
        except _NOT_OF_THE_TURN:
            raise
        except Exception as error:  # noqa: BLE001  a run that raises must not be tried for ever
            if not isinstance(error, TurnStopped):  # else the driver knows why
                _log.warning("run %s fails", work.claim.run_id, exc_info=error)
            items, state = turn.cut()
            return _failed(work.claim, error, items, state)
        try:
            return self._ended(live, done)
        except Exception as error:  # noqa: BLE001  the state cannot be stored, here or anywhere
            return _failed(work.claim, error, done.items, done.state)

    # --- before a turn ---------------------------------------------------------------------------

    async def _live(self, work: TurnWork, ports: _LedgerPorts) -> _Live:
        """The run as it was last committed, with the decisions that were taken since."""
        claim = work.claim
        if claim.schema == INPUT_SCHEMA:
            first = input_of(claim.snapshot)
            server = ServerConversation() if self._config.auto_previous_response_id else None
            if server is not None and await work.history.get_items(1):
                must = "one without items, since the model's server keeps those of the conversation"
                raise InvalidSetting("session", claim.session_id, must)
            state = RunState(
                run_id=claim.run_id,
                start_agent=self._first_agent,
                agent=self._first_agent,
                max_turns=self._max_turns,
                input=first.input,
                conversation=server,
            )
            context = self._given(first.context)
        else:
            state = resumed(claim)
            state.with_graph(self._graph)
            context = restored_context(state.context, deserializer=self._deserializer)
        about = RunContext(run_id=claim.run_id, session_id=claim.session_id, context=context)
        setup = RunSetup(self._book, self._config, about, state.max_turns)
        history = work.history if state.conversation is None else None
        compacted = CompactedHistory.of(self._config, history, state)
        # A turn that was begun has replies to the view that it had: it is not compacted before the
        # next one.
        if compacted is not None and not claim.journal:
            state, conversation = await compacted.begun(state, ports.tell_compaction(state))
        else:
            callback = self._config.session_input_callback
            conversation = await conversation_of(state, history, callback=callback)
        return _Live(setup, state, conversation, compacted)

    def _given(self, context: Any) -> Any:
        """The context that a run was started with."""
        if isinstance(context, dict) and not self._keeps_secrets:
            context, _ = without_secrets(context)
        if context is None or self._deserializer is None:
            return context
        return self._deserializer(context)

    # --- after a turn ----------------------------------------------------------------------------

    def _ended(self, live: _Live, done: TurnDone) -> TurnEnd:
        context = self._saved(live.setup.context.context)
        state = replace(done.state, context=context)
        items = done.items if done.conversation.has_history else []
        about: dict[str, Any] = {"items": items, "usage": _usage(state)}
        if done.step == "interrupted":
            parts = parked(state, **self._limits)
            about["approval_requests"] = parts.approval_requests
            return TurnEnd(parts.snapshot, parts.schema, parts.agent, "interrupted", **about)
        snapshot, agent = state.to_string().encode(), state.agent.text
        if done.step == "final":
            output = as_json(done.output)
            about["output"] = output
            return TurnEnd(snapshot, CURRENT_SCHEMA_VERSION, agent, "completed", **about)
        is_shown = state.agent == live.state.agent
        after = _Live(live.setup, state, done.conversation, live.compacted, is_shown)
        return TurnEnd(snapshot, CURRENT_SCHEMA_VERSION, agent, live=after, **about)

    def _saved(self, context: Any) -> SavedContext:
        keeps = self._keeps_secrets
        saved = saved_context(context, serializer=self._serializer, keep_secrets=keeps)
        if saved.kind == "omitted":
            raise ContextNotStorable(saved.type or "unknown", saved.warning or "")
        return saved


async def _compacted(live: _Live, ports: _LedgerPorts) -> _Live:
    """The run before its next turn, once its history is compacted, if that is due."""
    if live.compacted is None:
        return live
    told = ports.tell_compaction(live.state)
    state, conversation = await live.compacted.between_turns(live.state, live.conversation, told)
    return changed(live, state=state, conversation=conversation)


class _LedgerPorts:
    """The ports of a turn over the journal and the ledger of its run."""

    def __init__(self, work: TurnWork, on_uncertain: Callable[[str], OnUncertain]) -> None:
        self.is_watched = work.publish is not None
        self._ledger = work.ledger
        self._publish = work.publish
        self._on_uncertain = on_uncertain
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def ask(
        self,
        path: tuple[str, ...],
        question: str,
        make: Callable[[], Awaitable[ModelReply]],
        *,
        is_held: bool,
    ) -> ModelReply:
        call = self._ledger.model_call(key_of(path[:-1], path[-1]) if path else "", question)
        if call.reply is not None:
            return _read_reply(call.reply)
        if path:
            await self._ledger.journal_held()
        reply = await make()
        if is_held:
            call.hold(msgspec.json.encode(reply))
        else:
            await call.record(msgspec.json.encode(reply))
        return reply

    async def call(
        self,
        call: PendingCall,
        key: str,
        on_uncertain: OnUncertain | None,
        make: Callable[[bool], Awaitable[Output]],
    ) -> Output:
        policy = on_uncertain or self._on_uncertain(call.tool.text)
        planned = ToolCall(key, call.tool.text, call.agent.text, call.arguments, policy)

        async def make_and_encode() -> bytes:
            return msgspec.json.encode(await make(self._ledger.is_repeat(key)))

        try:
            outcome = await self._ledger.tool_call(planned, make_and_encode)
        except ToolTimeout:
            # The call is uncertain now, as if the process that made it had been lost.
            if policy == "fail":
                raise
            outcome = await self._ledger.tool_call(planned, make_and_encode)
        return _read_output(outcome.output) if outcome.is_known else UNCERTAIN

    def publish(self, kind: str, agent: str, data: Any = None) -> None:
        if self._publish is None:
            return
        try:
            event = RunEvent.of(kind, agent, data)
        except (TypeError, ValueError, RecursionError):
            event = RunEvent.of(kind, agent, repr(data))
        if threading.get_ident() == self._thread:
            self._publish(event)
        else:  # a tool in a thread
            self._loop.call_soon_threadsafe(self._publish, event)

    def tell_compaction(self, state: RunState) -> Callable[[CompactionReport], None]:
        """Publishes what came of a compaction in a run of this state."""

        def tell(report: CompactionReport) -> None:
            for kind, data in report.events():
                self.publish(kind, state.agent.name, data)

        return tell


def _failed(
    claim: Claim, cause: Exception, items: list[Item], state: RunState, kind: Any = "error"
) -> TurnEnd:
    """The end of a run whose turn failed; its snapshot stays that of the turn before."""
    failure = RunFailure(kind, type(cause).__name__, str(cause))
    stored = items if state.conversation is None else []
    about: dict[str, Any] = {"items": stored, "failure": failure, "usage": _usage(state)}
    return TurnEnd(claim.snapshot, claim.schema, claim.agent, "failed", **about)


def _usage(state: RunState) -> dict[str, int]:
    spent = state.total_usage()
    return {
        "requests": spent.requests,
        "input_tokens": spent.input_tokens,
        "output_tokens": spent.output_tokens,
    }


def _tools_of(agent: Agent, seen: set[int] | None = None) -> Iterator[Tool | AgentTool]:
    """The tools of an agent, and of all agents to which a run of it may come."""
    seen = set() if seen is None else seen
    if id(agent) in seen:
        return
    seen.add(id(agent))
    for tool in agent.tools:
        if isinstance(tool, Tool | AgentTool):
            yield tool
        if isinstance(tool, AgentTool):
            yield from _tools_of(tool.agent, seen)
    for handoff in agent.handoffs:
        yield from _tools_of(handoff.agent if isinstance(handoff, Handoff) else handoff, seen)
