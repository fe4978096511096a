"""`capsule.runs`: agents by name, and runs of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from capsule_tasks.client.cancelling import check_type
from capsule_tasks.client.options import check_options
from capsule_tasks.client.runs.messages import RUN_TASK, message_of, send_and_note
from capsule_tasks.client.sessions.named_session import check_id
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.durable import INPUT_SCHEMA, Engine, first_snapshot
from capsule_tasks.errors import AgentNotRegistered, InvalidSetting
from capsule_tasks.settings import PositiveSeconds, check_value

_ATTRIBUTE = "capsule_runs"
OptionalSeconds = PositiveSeconds | None


@dataclass(frozen=True)
class RegisteredAgent:
    """An agent under the name by which its runs are started."""

    name: str
    engine: Engine
    turn_timeout_s: float | None = None


class Runs:
    """The durable runs of an app. A worker needs the agents; a producer may start runs without."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._registered: dict[str, RegisteredAgent] = {}

    # --- agents ---------------------------------------------------------------------------------

    def register(
        self, name: str, agent: Any, *, turn_timeout_s: float | None = None, **options: Any
    ) -> Engine:
        """Give an agent a name by which its runs are started; the engine that drives them.

        `agent` is an Agent of openai-agents, with `options` of `OpenAIEngine` (`run_config`,
        `on_uncertain`, `limits`, `hooks`, `max_turns`, …), or an `Engine`. A turn that takes longer
        than `turn_timeout_s` fails its run. Do this where the app is made, so that workers do it
        too.
        """
        check_id("name", name)
        check_value("turn_timeout_s", turn_timeout_s, OptionalSeconds)
        if name in self._registered:
            raise InvalidSetting("name", name, "a name under which no agent is registered yet")
        engine = _engine_of(agent, options)
        self._registered[name] = RegisteredAgent(name, engine, turn_timeout_s)
        return engine

    @property
    def agents(self) -> Mapping[str, Engine]:
        """The engines of the registered agents, by name."""
        return MappingProxyType({each.name: each.engine for each in self._registered.values()})

    def agent(self, name: str) -> RegisteredAgent:
        """The agent that is registered under a name; AgentNotRegistered lists those there are."""
        found = self._registered.get(name)
        if found is None:
            raise AgentNotRegistered(name, None, tuple(sorted(self._registered)))
        return found

    def engine_of(self, name: str) -> Engine:
        """The engine of a registered agent; AgentNotRegistered lists those there are."""
        return self.agent(name).engine

    def _first(self, agent: str, given: Any, context: Any) -> tuple[bytes, str]:
        """The first snapshot of a run. A producer without any agent writes what it was given."""
        if not self._registered:
            return first_snapshot(given, context), INPUT_SCHEMA
        snapshot, schema, _ = self.engine_of(agent).first(given, context)
        return snapshot, schema

    # --- runs -----------------------------------------------------------------------------------

    async def astart(
        self,
        /,
        agent: str,
        given: Any,
        *,
        session: str | None = None,
        context: Any = None,
        run_id: str | None = None,
        **options: Any,
    ) -> str:
        """Store a run and queue it; its id, which is the id of its task and of its execution.

        `given` is the user's message, or a list of items. The run reads and writes the history of
        `session`, by default one of its own. `options` are those of `apply_async`. Raises RunExists
        for an id that is taken.
        """
        _check(agent, session)
        if "task_id" in options:
            raise TypeError("capsule.runs.start has no argument 'task_id'; did you mean run_id?")
        check_options("capsule.runs.start", options, _ARGUMENTS)
        if run_id is None:
            run_id = str(uuid.uuid4())
        check_id("run_id", run_id)
        snapshot, schema = self._first(agent, given, context)
        signature = self.app.signature(RUN_TASK, (), {"agent": agent}, options=options)
        message = message_of(signature)
        store = (await watch_thread.watcher(self.app)).runs
        created = await store.create(
            run_id, session or run_id, snapshot, schema=schema, agent=agent, message=message
        )
        await send_and_note(self.app, store, run_id, message, created.updated_us)
        return run_id

    start = blocking(astart)

    def s(self, agent: str, *given: Any, session: str | None = None, context: Any = None) -> Any:
        """A signature of a run; in a chain without an input, the input is the value before."""
        return self.signature(agent, given, session=session, context=context)

    def si(self, agent: str, *given: Any, session: str | None = None, context: Any = None) -> Any:
        """A signature that ignores the value before."""
        return self.signature(agent, given, session=session, context=context, immutable=True)

    def signature(
        self,
        agent: str,
        given: tuple[Any, ...] = (),
        *,
        session: str | None = None,
        context: Any = None,
        **options: Any,
    ) -> Any:
        """A signature, as that of any task; `given` is the input alone, or is to come."""
        _check(agent, session)
        if len(given) > 1:
            raise TypeError(f"a run has one input, and was given {len(given)}: {given!r:.200}")
        self._first(agent, given[0] if given else "to come", context)
        kwargs = {"agent": agent, "session": session, "context": context}
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        return self.app.signature(RUN_TASK, given, kwargs, **options)


_ARGUMENTS = ("agent", "given", "session", "context", "run_id")


def runs_of(app: Any) -> Runs:
    """The runs of an app: one object, whichever process or thread asks."""
    found: Runs | None = vars(app).get(_ATTRIBUTE)
    if found is None:
        found = Runs(app)
        setattr(app, _ATTRIBUTE, found)
    return found


def _check(agent: Any, session: Any) -> None:
    check_type("agent", agent, str)
    check_id("agent", agent)
    if session is not None:
        check_id("session", session)


def _engine_of(agent: Any, options: dict[str, Any]) -> Engine:
    if isinstance(agent, Engine):
        if options:
            raise TypeError(f"an Engine takes no options, and was given {', '.join(options)}")
        return agent
    try:
        from capsule_tasks.openai_agents import OpenAIEngine  # noqa: PLC0415  an extra
    except ImportError as fault:
        must = f"an Engine; agents of openai-agents need the extra `openai-agents` ({fault})"
        raise InvalidSetting("agent", agent, must) from fault
    return OpenAIEngine(agent, **options)
