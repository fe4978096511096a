"""A pytest plugin for the SDK's own tests: each call of their runner becomes a durable run.

`Runner.run` and `Runner.run_streamed` store a run, drive it turn by turn with `RunDriver` and
`OpenAIEngine`, and return what the SDK returned for the last turn, or raise what it raised. A state
that is given to the runner goes on as the run that waits, with the decisions of the state taken
through the store; a state that no run of the test left behind begins a run with its snapshot.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import uuid
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import agents.agent
import capsule_session
from agents import Model, ModelResponse, RunState
from agents.result import RunResultStreaming
from agents.run import AgentRunner
from agents.run_config import DEFAULT_MAX_TURNS
from capsule_session import CapsuleSession, server
from openai.types.responses import Response, ResponseCompletedEvent, ResponseUsage

from capsule_tasks.durable import RunDriver, RunEvent, TurnEnd, TurnWork
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.openai_agents import engine as engine_module
from capsule_tasks.openai_agents import models as models_module
from capsule_tasks.openai_agents.events import Publisher
from capsule_tasks.runs import AgentId
from capsule_tasks.runs.parking import OPENAI_SCHEMA
from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage import RunStore
from capsule_tasks.storage.runs.store import SyncLease

INCARNATION = uuid.uuid4().hex

_contexts: dict[str, Any] = {}
"""The contexts of the tests, which are objects of any kind, by what stands for them in a state."""


@dataclass
class Watch:
    """What the SDK gave, raised and told during one drive of a run."""

    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    result: Any = None
    error: BaseException | None = None
    awaits_result: bool = False
    is_streamed: bool = False
    state: Any = None
    """The state with which the last turn began, and which the SDK has changed."""


_watch: ContextVar[Watch | None] = ContextVar("capsule_watch", default=None)


class WatchedEngine(OpenAIEngine):
    """The engine, with notes of what the SDK returned and raised."""

    async def turn(self, work: TurnWork) -> TurnEnd:
        watch = _watch.get()
        assert watch is not None
        watch.awaits_result = True
        try:
            return await super().turn(work)
        except BaseException as error:
            watch.error = error
            raise


def _session_of(state: Any) -> Any:
    """The session that the test gave to the run of the state."""
    return getattr(state, "_capsule_session", None)


def _is_asked_by_an_agent_tool() -> bool:
    """Whether the runner runs for `Agent.as_tool`; such a run is never one of its own."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == agents.agent.__file__:
            return True
        frame = frame.f_back
    return False


def _serialized(context: Any) -> dict[str, Any]:
    name = str(id(context))
    _contexts[name] = context  # and so the id stays its own
    return {"capsule_context": name}


def _deserialized(stored: Any) -> Any:
    return _contexts[stored["capsule_context"]] if "capsule_context" in stored else stored


@dataclass
class Call:
    """One call of the runner."""

    agent: Any
    given: Any
    options: dict[str, Any]

    @property
    def is_durable(self) -> bool:
        """Whether the door is for it; all else goes to the SDK as it is."""
        options = self.options
        session = options.get("session")
        config = options.get("run_config")
        if _watch.get() is not None:
            return False  # a runner within a tool, or the engine's own
        if _is_asked_by_an_agent_tool():
            return False  # a tool that the test calls itself
        if session is not None and type(session) not in (
            capsule_session.CapsuleSession,
            capsule_session.CapsuleSQLiteSession,
        ):
            return False
        if isinstance(config, dict) or getattr(config, "sandbox", None) is not None:
            return False
        if any(options.get(name) for name in SERVERS):
            return False
        if isinstance(self.given, RunState):
            state = self.given
            if session is None and (_session_of(state) or state._pending_session_write):
                return False  # a durable run is never without the session that it began with
            return not (
                state._conversation_id
                or state._previous_response_id
                or state._auto_previous_response_id
            )
        return bool(self.given) and isinstance(self.given, (str, list))

    def engine(self) -> WatchedEngine:
        options = self.options
        return WatchedEngine(
            self.agent,
            run_config=options.get("run_config"),
            hooks=options.get("hooks"),
            max_turns=options.get("max_turns", DEFAULT_MAX_TURNS),
            error_handlers=options.get("error_handlers"),
            context_serializer=_serialized,
            context_deserializer=_deserialized,
        )

    async def drive(self, watch: Watch) -> Any:
        _watch.set(watch)
        given = self.options.get("session")
        session = given or getattr(self.given, "_capsule_own_session", None)
        session = session or CapsuleSession(uuid.uuid4().hex)
        stored = session.stored
        store = RunStore(server().awaiting, settings=RunSettings(prefix=session.prefix))
        _have_lease(session.prefix)
        engine = self.engine()
        run_id = await self._stored_run(store, engine, stored.session_id)
        driver = RunDriver(store, INCARNATION, history_of=lambda _: stored)
        stop = await driver.drive(run_id, engine, publish=_ignore)
        if isinstance(self.given, RunState) and watch.state is not None:
            # The SDK changes the state that it is given, and tests look at it.
            vars(self.given).update(vars(watch.state))
        if stop.status == "failed":
            assert watch.error is not None, stop
            raise watch.error
        assert stop.status in ("completed", "interrupted"), stop
        assert watch.result is not None
        about = (
            {"_capsule_own_session": session} if given is None else {"_capsule_session": session}
        )
        vars(watch.result).update(about, _capsule_run_id=run_id)
        return watch.result

    async def _stored_run(self, store: RunStore, engine: WatchedEngine, session_id: str) -> str:
        run_id = uuid.uuid4().hex
        if not isinstance(self.given, RunState):
            snapshot, schema, agent = engine.first(self.given, self.options.get("context"))
            await store.create(run_id, session_id, snapshot, schema=schema, agent=agent)
            return run_id
        parked = getattr(self.given, "_capsule_run_id", None)
        if parked and await self._decided(store, parked):
            return str(parked)
        data = self.given.to_json(context_serializer=_serialized)
        if self.options.get("context") is not None:
            data["context"]["context"] = _serialized(self.options["context"])
        snapshot = json.dumps(data, default=str).encode()
        schema = f"{OPENAI_SCHEMA}{data['$schemaVersion']}"
        agent = AgentId(self.given._current_agent.name).text
        await store.create(run_id, session_id, snapshot, schema=schema, agent=agent)
        return run_id

    async def _decided(self, store: RunStore, run_id: str) -> bool:
        """Take the decisions of the state through the store; whether the run goes on by them.

        A state that the test has changed in other ways is another run.
        """
        decisions = vars(self.given).get("_capsule_decisions", [])
        record = await store.read(run_id)
        waiting = {call.call_id for call in record.pending}
        if record.status == "queued":
            return True  # the test has cut it, and it goes on where it was
        if record.status != "interrupted" or waiting != {call_id for call_id, *_ in decisions}:
            return False
        data = self.given.to_json(context_serializer=_serialized)
        if self.options.get("context") is not None or not _is_same(data, record.snapshot):
            return False
        for call_id, approved, always, message in decisions:
            if approved:
                await store.approvals.approve(run_id, call_id, always=always)
            else:
                await store.approvals.reject(run_id, call_id, always=always, message=message)
        return True


def _is_same(data: Any, snapshot: bytes) -> bool:
    """Whether a state differs from a snapshot in decisions only."""
    return _undecided(json.loads(snapshot)) == _undecided(json.loads(json.dumps(data, default=str)))


def _undecided(data: Any) -> Any:
    if isinstance(data, list):
        return [_undecided(each) for each in data]
    if isinstance(data, dict):
        return {name: _undecided(each) for name, each in data.items() if name not in _DECISIONS}
    return data


_DECISIONS = ("approvals", "function_tool_approvals", "tool_invocations")


@cache
def _have_lease(prefix: str) -> None:
    """For as long as the tests may take."""
    settings = LeaseSettings(lease_s=3600)
    SyncLease(INCARNATION, server().blocking, settings=settings, prefix=prefix).acquire()


def _ignore(event: RunEvent) -> None:
    pass


SERVERS = ("conversation_id", "previous_response_id", "auto_previous_response_id")


def _run(original: Any) -> Any:
    @wraps(original)
    async def run(self: Any, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002
        call = Call(starting_agent, input, options)
        if type(self) is not AgentRunner or not call.is_durable:
            return await original(self, starting_agent, input, **options)
        # A task of its own, so that the tools of the run know that they are in one.
        return await asyncio.create_task(call.drive(Watch()))

    return run


def _run_streamed(original: Any) -> Any:
    @wraps(original)
    def run_streamed(self: Any, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002
        call = Call(starting_agent, input, options)
        if type(self) is AgentRunner and call.is_durable:
            return Stream(call)
        watch = _watch.get()
        expected = watch is not None and watch.awaits_result
        if expected:
            watch.awaits_result = False
            watch.state = input if isinstance(input, RunState) else None
        result = original(self, starting_agent, input, **options)
        if expected:
            watch.result = result
        return result

    return run_streamed


class Stream(RunResultStreaming):
    """The result of `run_streamed`: that of the run's last turn, and the events of all turns."""

    _OWN = frozenset(
        ("stream_events", "run_loop_task", "cancel", "to_state", "__class__", "_watch")
    )

    def __init__(self, call: Call) -> None:
        own = object.__getattribute__(self, "__dict__")
        own["_watch"] = Watch(is_streamed=True)
        own["run_loop_task"] = asyncio.get_running_loop().create_task(call.drive(own["_watch"]))
        own["run_loop_task"].add_done_callback(lambda _: own["_watch"].events.put_nowait(None))

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in Stream._OWN or name == "__dict__":
            return object.__getattribute__(self, name)
        result = own["_watch"].result
        return None if result is None else getattr(result, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._watch.result, name, value)

    async def stream_events(self) -> AsyncIterator[Any]:
        try:
            while (event := await self._watch.events.get()) is not None:
                yield event
        except (
            asyncio.CancelledError
        ):  # who reads it is cancelled, and so is the worker's coroutine
            self.run_loop_task.cancel()
            await asyncio.wait({self.run_loop_task})
            raise
        self._watch.events.put_nowait(None)
        await self.run_loop_task

    def cancel(self, mode: str = "immediate") -> None:
        """Stop the worker's coroutine, as far as a stream can stop a durable run."""
        self.run_loop_task.cancel()

    def to_state(self) -> RunState[Any]:
        return self._watch.result.to_state()

    def __del__(self) -> None:
        pass


def _to_state(original: Any) -> Any:
    def to_state(self: Any) -> Any:
        state = original(self)
        for name in ("_capsule_run_id", "_capsule_session", "_capsule_own_session"):
            if name in vars(self):
                setattr(state, name, vars(self)[name])
        return state

    return to_state


def _noting(original: Any, *, approved: bool) -> Any:
    """Note a decision of the test, to take it through the store."""

    @wraps(original)
    def decide(self: Any, approval_item: Any, *args: Any, **options: Any) -> Any:
        done = original(self, approval_item, *args, **options)
        if hasattr(self, "_capsule_run_id"):
            always = bool(
                (args and args[0]) or options.get("always_approve") or options.get("always_reject")
            )
            decision = (approval_item.call_id, approved, always, options.get("rejection_message"))
            vars(self).setdefault("_capsule_decisions", []).append(decision)
        return done

    return decide


def _publish(original: Any) -> Any:
    def publish(self: Any, event: Any, agent: str) -> None:
        is_hidden = event.type == "agent_updated_stream_event" and self._hides_agent
        original(self, event, agent)
        if not is_hidden:
            _watch.get().events.put_nowait(event)

    return publish


class AskedWhole(Model):
    """A model of a test that does not stream, for the engine, which always does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        raise NotImplementedError

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        whole = await self.inner.get_response(*args, **kwargs)
        spent = whole.usage
        response = Response.construct(
            id=whole.response_id,
            output=whole.output,
            usage=ResponseUsage.construct(
                input_tokens=spent.input_tokens,
                output_tokens=spent.output_tokens,
                total_tokens=spent.total_tokens,
                input_tokens_details=spent.input_tokens_details,
                output_tokens_details=spent.output_tokens_details,
            ),
        )
        yield ResponseCompletedEvent.construct(
            response=response, sequence_number=0, type="response.completed"
        )


def _journaled_stream(original: Any) -> Any:
    def stream(turn: Any, model: Any, args: Any, kwargs: Any) -> Any:
        watch = _watch.get()
        if not turn.path and not watch.is_streamed:
            model = AskedWhole(model)
        return original(turn, model, args, kwargs)

    return stream


def _failure_of(original: Any) -> Any:
    def failure_of(error: Exception, causes: Any) -> Any:
        _watch.get().error = error
        return original(error, causes)

    return failure_of


def pytest_configure() -> None:
    capsule_session.pytest_configure()
    AgentRunner.run = _run(AgentRunner.run)  # type: ignore[method-assign]
    AgentRunner.run_streamed = _run_streamed(AgentRunner.run_streamed)  # type: ignore[method-assign]
    RunResultStreaming.to_state = _to_state(RunResultStreaming.to_state)  # type: ignore[method-assign]
    RunState.approve = _noting(RunState.approve, approved=True)  # type: ignore[method-assign]
    RunState.reject = _noting(RunState.reject, approved=False)  # type: ignore[method-assign]
    Publisher.publish = _publish(Publisher.publish)  # type: ignore[method-assign]
    models_module._journaled_stream = _journaled_stream(models_module._journaled_stream)
    engine_module._failure_of = _failure_of(engine_module._failure_of)


def pytest_unconfigure() -> None:
    capsule_session.pytest_unconfigure()
