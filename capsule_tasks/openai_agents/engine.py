"""Door 1: the engine that drives an agent of openai-agents, one turn at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from agents import (
    Agent,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelRefusalError,
    ModelTimeoutError,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    RunHooks,
    Runner,
    RunState,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
    ToolTimeoutError,
    UserError,
)
from agents.items import HandoffOutputItem
from agents.lifecycle import RunHooksBase
from agents.models.multi_provider import MultiProvider
from agents.run_config import DEFAULT_MAX_TURNS
from agents.run_state import SCHEMA_VERSION_SUMMARIES
from openai import APITimeoutError
from pydantic import TypeAdapter

from capsule_tasks.durable import OnUncertain, RunFailure, TurnEnd, TurnWork
from capsule_tasks.durable.inputs import INPUT_SCHEMA, first_snapshot, input_of
from capsule_tasks.durable.policies import policies
from capsule_tasks.errors import InvalidRunState, InvalidSetting
from capsule_tasks.openai_agents import outputs
from capsule_tasks.openai_agents.current import Causes, CurrentTurn, working_for
from capsule_tasks.openai_agents.events import Publisher
from capsule_tasks.openai_agents.graph import agents_of, prepare
from capsule_tasks.openai_agents.hooks import QuietRunHooks, starts_hidden_of
from capsule_tasks.openai_agents.mcp_servers import disconnect
from capsule_tasks.openai_agents.models import JournalingProvider, journaled
from capsule_tasks.openai_agents.session import BufferedSession
from capsule_tasks.openai_agents.snapshots import SerializedItems, agents_described_once
from capsule_tasks.runs import AgentId
from capsule_tasks.runs.parking import (
    OPENAI_SCHEMA,
    Limits,
    check_tools,
    parked_openai,
    resumed_openai,
)
from capsule_tasks.storage import ApprovalRequest, Claim

GUARDRAILS = (
    InputGuardrailTripwireTriggered,
    OutputGuardrailTripwireTriggered,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
)
FAULTS_OF_MODELS = (ModelBehaviorError, ModelRefusalError)
TIMEOUTS = (ModelTimeoutError, ToolTimeoutError, APITimeoutError)


@dataclasses.dataclass(frozen=True)
class _Live:
    """The state with which the next turn in this process goes on."""

    state: RunState[Any]
    items: SerializedItems


class OpenAIEngine:
    """An agent of openai-agents, unchanged, as an engine of durable runs.

    The agent, its handoffs and the agents that it has as tools are prepared in place: their models
    and tools ask the run's journal and ledger. One engine serves any number of runs.
    """

    readable = (
        INPUT_SCHEMA,
        *(f"{OPENAI_SCHEMA}{version}" for version in SCHEMA_VERSION_SUMMARIES),
    )

    def __init__(
        self,
        agent: Agent[Any],
        *,
        run_config: RunConfig | None = None,
        hooks: RunHooks[Any] | None = None,
        max_turns: int | None = DEFAULT_MAX_TURNS,
        error_handlers: Any = None,
        context_serializer: Callable[[Any], Mapping[str, Any]] | None = None,
        context_deserializer: Callable[[Mapping[str, Any]], Any] | None = None,
        on_uncertain: OnUncertain | Mapping[str, OnUncertain] = "park",
        limits: Limits | Mapping[str, Limits] | None = None,
    ) -> None:
        """`on_uncertain` is one policy, or policies by `ToolKey.text` such as `bare:refund`.

        `limits` are those of approvals: one for all, or some by `ToolKey.text`.
        `context_serializer` and `context_deserializer` are those of the SDK's `RunState`; without
        them a context is a mapping of JSON.
        """
        if not isinstance(agent, Agent):
            raise InvalidSetting("agent", agent, "an Agent of openai-agents")
        given: Any = hooks
        if given is not None and not isinstance(given, RunHooksBase):
            must = "RunHooks; AgentHooks belong to an agent: Agent(..., hooks=...)"
            raise InvalidSetting("hooks", hooks, must)
        self._agent = agent
        self._hooks = QuietRunHooks(hooks) if hooks is not None else None
        self._max_turns = max_turns
        self._error_handlers = error_handlers
        self._serializer = context_serializer
        self._deserializer = context_deserializer
        self._on_uncertain = policies(on_uncertain)
        self._limits: dict[str, Any] = {"limits": limits}
        if isinstance(limits, Mapping):
            check_tools("limits", limits)
            self._limits = {"of_tool": limits}
        self._run_config = _lasting(run_config)
        prepare(agent)

    async def aclose(self) -> None:
        """Close what the model provider opened, and disconnect the MCP servers of the agents.

        No run may be driven any more. An HTTP client stays open, as in the SDK, and so does a
        server that the engine has not connected: they belong to whoever made them.
        """
        for agent in agents_of(self._agent):
            await disconnect(agent.mcp_servers)
        await self._run_config.model_provider.aclose()

    # --- the Engine port -------------------------------------------------------------------------

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        """The snapshot of a new run: its input, a text or items, and its context."""
        if context is not None and self._serializer is not None:
            try:
                context = dict(self._serializer(context))
            except Exception as error:
                must = f"what context_serializer takes; it raised {error!r}"
                raise InvalidSetting("context", context, must) from error
        return first_snapshot(given, context), INPUT_SCHEMA, AgentId(self._agent.name).text

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        if claim.schema == INPUT_SCHEMA:
            return ()
        return parked_openai(claim.snapshot, **self._limits).approval_requests

    def encoded(self, output: Any) -> bytes:
        return outputs.encoded(output)

    async def turn(self, work: TurnWork) -> TurnEnd:
        """Make one turn of the SDK: one model call and its tools, or the calls that were decided.

        A turn that failed ends the run. What the SDK put into the session stays in the history.
        """
        given, context = await self._given(work)
        session = BufferedSession(work.history)
        turn = CurrentTurn(work.ledger, self._on_uncertain, Causes())
        going_on = _agent_that_goes_on(given)
        token = starts_hidden_of.set(going_on)
        try:
            with working_for(turn), agents_described_once():
                result = Runner.run_streamed(
                    self._agent,
                    given,
                    context=context,
                    max_turns=self._max_turns,
                    hooks=self._hooks,
                    run_config=self._run_config,
                    error_handlers=self._error_handlers,
                    session=session,
                )
        finally:
            starts_hidden_of.reset(token)
        if isinstance(given, RunState) and given.get_interruptions():
            result.cancel(mode="after_turn")  # the calls that were decided are a turn of their own
        try:
            await self._consume(result, work, isinstance(given, RunState))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # A tool or a guardrail raised it, as of a task of its own: an error as any other.
            return self._failed(work.claim, session, _failure_of(error, turn.causes))
        except Exception as error:  # noqa: BLE001  each error ends the run; its kind is kept
            return self._failed(work.claim, session, _failure_of(error, turn.causes))
        finally:
            await _stopped(result)
        try:
            with agents_described_once():
                return self._ended(result, session, work.live)
        except InvalidRunState as error:
            # A call that waits cannot be shown to people, here or anywhere: no other worker helps.
            return self._failed(work.claim, session, _failure_of(error, turn.causes))

    # --- before a turn ---------------------------------------------------------------------------

    async def _given(self, work: TurnWork) -> tuple[Any, Any]:
        """The runner's input: that of a new run, or the state after the last turn."""
        claim = work.claim
        if work.live is not None:
            return work.live.state, None
        if claim.schema == INPUT_SCHEMA:
            first = input_of(claim.snapshot)
            context = first.context
            if context is not None and self._deserializer is not None:
                context = self._deserializer(context)
            return first.input, context
        try:
            state = await RunState.from_string(
                self._agent, claim.snapshot.decode(), context_deserializer=self._deserializer
            )
        except UserError as error:
            # As the graph of another release may have the agents and tools that it names.
            raise InvalidRunState("$", str(error)) from error
        return resumed_openai(claim, state), None

    # --- during a turn ---------------------------------------------------------------------------

    async def _consume(self, result: Any, work: TurnWork, is_resumed: bool) -> None:
        """Read the events of the turn, and stop the runner after it.

        The stop is asked for once the model answers: asked for earlier, a run that goes on would
        stop before its turn.
        """
        publisher = Publisher(work.publish, hides_first_agent=is_resumed)
        is_asked = result._cancel_mode != "none"
        async for event in result.stream_events():
            if event.type == "raw_response_event" and not is_asked:
                result.cancel(mode="after_turn")
                is_asked = True
            publisher.publish(event, result.current_agent.name)

    # --- after a turn ----------------------------------------------------------------------------

    def _ended(self, result: Any, session: BufferedSession, before: _Live | None) -> TurnEnd:
        state = result.to_state()
        items = before.items if before is not None else SerializedItems()
        data = items.state_as_json(state, self._serializer)
        snapshot = msgspec.json.encode(data, enc_hook=_plain)
        spent = result.context_wrapper.usage
        usage = {
            "requests": spent.requests,
            "input_tokens": spent.input_tokens,
            "output_tokens": spent.output_tokens,
        }
        if result.interruptions:
            parts = parked_openai(snapshot, **self._limits)
            return TurnEnd(
                snapshot,
                parts.schema,
                parts.agent,
                "interrupted",
                items=session.added,
                approval_requests=parts.approval_requests,
                usage=usage,
            )
        schema = f"{OPENAI_SCHEMA}{data['$schemaVersion']}"
        agent = AgentId(result.current_agent.name).text
        if result.final_output is None and state._current_step is not None:
            live = _Live(state, items)
            return TurnEnd(snapshot, schema, agent, items=session.added, usage=usage, live=live)
        output = _plain_output(result.final_output)
        return TurnEnd(
            snapshot, schema, agent, "completed", session.added, output=output, usage=usage
        )

    def _failed(self, claim: Claim, session: BufferedSession, failure: RunFailure) -> TurnEnd:
        return TurnEnd(
            claim.snapshot,
            claim.schema,
            claim.agent,
            "failed",
            items=session.added,
            failure=failure,
        )


def _lasting(given: RunConfig | None) -> RunConfig:
    """A run configuration whose models are journaled and whose provider outlives the turns.

    The Runner closes the provider of a configuration that it has made itself after each call.
    """
    config = given or RunConfig(model_provider=MultiProvider())
    if getattr(config, "sandbox", None) is not None:
        raise InvalidSetting("run_config.sandbox", config.sandbox, "None: no sandbox lasts a run")
    model = config.model
    if model is not None and not isinstance(model, str):
        model = journaled(model)
    provider = config.model_provider
    if not isinstance(provider, JournalingProvider):
        provider = JournalingProvider(provider)
    return dataclasses.replace(config, model=model, model_provider=provider)


def _agent_that_goes_on(given: Any) -> Any:
    """The agent whose start was told of before: the last turn was its own, and no handoff."""
    if not isinstance(given, RunState) or given._current_turn == 0:
        return None
    items = given._session_items
    if items and isinstance(items[-1], HandoffOutputItem):
        return None
    return given._current_agent


def _is_cancelled() -> bool:
    """Whether somebody cancels the task that drives the run."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _stopped(result: Any) -> None:
    """Wait for the runner's task: nothing of a turn may run after it."""
    task = result.run_loop_task
    if task is None or task.done():
        return
    if not result.is_complete:
        result.cancel()
    with suppress(asyncio.CancelledError):  # a second cancel; the first one is on its way
        await asyncio.wait({task})


def _failure_of(error: BaseException, causes: Causes) -> RunFailure:
    kind: Any = "error"
    chain = list(_chain(error))
    if isinstance(error, MaxTurnsExceeded):
        kind = "max_turns"
    elif isinstance(error, GUARDRAILS):
        kind = "guardrail"
    elif isinstance(error, TIMEOUTS):
        kind = "timeout"
    elif any(each in causes.of_tools for each in chain):
        kind = "tool"
    elif isinstance(error, FAULTS_OF_MODELS) or any(each in causes.of_models for each in chain):
        kind = "model"
    return RunFailure(kind, type(error).__name__, str(error))


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    return json.loads(json.dumps(value, default=str))


def _plain_output(output: Any) -> Any:
    """The final output as JSON: that of an `output_type` as pydantic writes it."""
    try:
        return TypeAdapter(Any).dump_python(output, mode="json")
    except Exception:  # noqa: BLE001  pydantic raises errors of the type's own serializers
        return str(output)
