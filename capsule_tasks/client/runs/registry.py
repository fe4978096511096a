"""`capsule.runs`: agents by name, and runs of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from capsule_tasks.client.cancelling import check_type
from capsule_tasks.client.options import check_options
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.info import RunInfo, WaitingCall
from capsule_tasks.client.runs.messages import RUN_TASK, message_of, send_and_note
from capsule_tasks.client.sessions.named_session import check_id
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.durable import INPUT_SCHEMA, Engine, first_snapshot
from capsule_tasks.durable.settling import SETTLE
from capsule_tasks.errors import AgentNotRegistered, CodeNotRun, InvalidSetting
from capsule_tasks.runs import ToolKey
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.identity import ToolKind
from capsule_tasks.settings import PositiveSeconds, check_value
from capsule_tasks.storage.runs.types import Status

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

        `agent` is an Agent of `capsule_tasks`, with `options` of `AgentEngine` (`run_config`,
        `on_uncertain`, `limits`, `max_turns`, …); an Agent of openai-agents, with those of
        `OpenAIEngine`; or an `Engine`. A turn that takes longer than `turn_timeout_s` fails its
        run. Do this where the app is made, so that workers do it too.
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
    ) -> RunHandle:
        """Store a run and queue it. Its id is the id of its task and of its execution.

        `given` is the user's message, or a list of items. The run reads and writes the history of
        `session`, by default one of its own. `options` are those of `apply_async`. Raises RunExists
        for an id that is taken.
        """
        _check(agent, session)
        if "task_id" in options:
            raise TypeError("capsule.runs.start has no argument 'task_id'; did you mean run_id?")
        check_options("capsule.runs.start", options, _ARGUMENTS)
        if self.app.conf.task_always_eager:
            raise CodeNotRun("runs are driven by workers, and not eagerly (task_always_eager)")
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
        return self.get(run_id)

    start = blocking(astart)

    def get(self, run_id: str) -> RunHandle:
        """The handle of a run, by its id. Asks nothing of Redis."""
        return RunHandle(self.app, run_id)

    async def alist(
        self,
        *,
        status: Status | None = None,
        agent: str | None = None,
        session: str | None = None,
        limit: int = 50,
    ) -> Sequence[RunInfo]:
        """Runs, those whose status changed last first; of a status, an agent, a session, if given.

        `agent` is the name under which the agent is registered.
        """
        store = (await watch_thread.watcher(self.app)).runs
        page = await store.list(status=status, agent=agent, session_id=session, limit=limit)
        return [RunInfo.of(record) for record in page.runs]

    list = blocking(alist)

    async def apending(
        self, *, agent: str | None = None, tool: str | None = None, limit: int = 100
    ) -> Sequence[WaitingCall]:
        """The calls that wait for a person in all runs, oldest first.

        `agent` is the own name of the agent that asks, and `tool` the name of a function tool, or
        the `ToolKey.text` of any tool.
        """
        approvals = (await watch_thread.watcher(self.app)).runs.approvals
        names = [None] if tool is None else [_tool_key(tool), f"{SETTLE}{_tool_key(tool)}"]
        found: list[WaitingCall] = []
        for name in names:
            page = await approvals.pending(agent=agent, tool=name, limit=limit)
            found += map(WaitingCall.of, page.calls)
        return sorted(found, key=lambda call: call.asked_at)[:limit]

    pending = blocking(apending)

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


_AGENTS = "an Agent of capsule_tasks or of openai-agents, or an Engine"
_KINDS = tuple(f"{kind}:" for kind in get_args(ToolKind))
_ARGUMENTS = ("agent", "given", "session", "context", "run_id")


def _tool_key(tool: str) -> str:
    """The key of a tool as text; a name alone is that of a function tool."""
    check_type("tool", tool, str)
    return tool if tool.startswith(_KINDS) else ToolKey(tool).text


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
    if isinstance(agent, Agent):
        from capsule_tasks.durable.agent_engine import AgentEngine  # noqa: PLC0415  when needed

        return AgentEngine(agent, **options)
    try:
        from capsule_tasks.openai_agents import OpenAIEngine  # noqa: PLC0415  an extra
    except ImportError as fault:
        must = f"{_AGENTS}; those of openai-agents need the extra `openai-agents` ({fault})"
        raise InvalidSetting("agent", agent, must) from fault
    try:
        return OpenAIEngine(agent, **options)
    except InvalidSetting as refused:
        if refused.name != "agent":
            raise
        raise InvalidSetting("agent", agent, _AGENTS) from None
