"""A dispatcher whose children and listener are made up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from capsule_tasks.errors import SessionStateError
from capsule_tasks.executions.dispatcher import Dispatcher
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import (
    Ack,
    Code,
    Error,
    ErrorKind,
    Message,
    TaskCall,
    TaskResult,
    Terminal,
)
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.pool import session_pool
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import PoolSettings, Profile
from tests.sessions import HANG_S

Work = Execution


def new_work(task_id: str, *, is_async: bool = False) -> Work:
    origin = Origin(execution_id=task_id, task="task", is_async=is_async)
    return Work(TaskCall(name="task", task_id=task_id, body=b""), Lifecycle(origin))


class FakeSession:
    """A session whose child sends and does what the test wants."""

    def __init__(self, *_: object, **__: object) -> None:
        self.session_id = str(id(self))
        self.pid: int | None = os.getpid()
        self.is_alive = True
        self.exit_status: int | None = None
        self.refuses = False
        self.ends_at_once = False
        self.consumers: dict[str, Callable[[Message], object]] = {}
        self.done: list[Any] = []
        self.payloads: list[tuple[TaskCall | Code, float | None]] = []
        self._state_listeners: list[Callable[..., object]] = []

    @property
    def info(self) -> Any:
        return SimpleNamespace(last_error="it was lost", running=tuple(self.consumers))

    def add_heartbeat_listener(self, _: object) -> None: ...

    def add_health_listener(self, _: object) -> None: ...

    def add_state_listener(self, listener: Callable[..., object], _: object) -> None:
        self._state_listeners.append(listener)

    async def start(self) -> None: ...

    async def terminate(self) -> None:
        self.die(-signal.SIGKILL)

    def submit(
        self,
        payload: TaskCall | Code,
        consumer: Callable[[Message], object],
        *,
        execution_id: str,
        timeout_s: float | None,
    ) -> None:
        self.payloads.append((payload, timeout_s))
        if self.refuses or not self.is_alive:
            raise SessionStateError("submit()", "busy", "it is condemned")
        assert execution_id not in self.consumers
        self.consumers[execution_id] = consumer
        if self.ends_at_once:
            self.end(execution_id, lost(execution_id, ErrorKind.TOO_LARGE))

    def ack(self, execution_id: str) -> None:
        self.consumers[execution_id](Ack(ack_of="x", execution_id=execution_id, accepted_at=7.0))

    def end(self, execution_id: str, end: Terminal | None = None) -> None:
        self.consumers.pop(execution_id)(end or TaskResult(execution_id=execution_id))

    def die(self, status: int) -> None:
        """As in a real one: executions end first, then the state changes."""
        if self.is_alive:
            self.is_alive, self.exit_status, self.pid = False, status, None
            for execution_id in list(self.consumers):
                self.end(execution_id, lost(execution_id))
            for listener in self._state_listeners:
                listener(SessionState.BUSY, SessionState.ERROR)

    def signal(self, signum: int) -> None:
        self.done.append(signum)

    def soft_limit(self, execution_id: str) -> bool:
        return execution_id in self.consumers

    def resume_output(self, execution_id: str) -> None:
        self.done.append(("read on", execution_id))


def lost(execution_id: str, kind: ErrorKind = ErrorKind.LOST) -> Error:
    return Error(execution_id=execution_id, kind=kind, type="SessionLost", message="")


class Listener:
    """Notes everything in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.news = asyncio.Event()
        self.fails = False

    def note(self, *what: Any) -> None:
        self.heard.append(what)
        self.news.set()

    def feed(self, work: Execution, event: object, *args: object) -> None:
        if event == Lifecycle.on_sent:
            self.note("sent", work, work.child_execution_id)
        elif event == Lifecycle.on_send_refused:
            self.note("refused", work)
        elif event == Lifecycle.on_child_started:
            self.note("started", work, *args)

    def on_message(self, work: Execution, message: Message) -> bool | None:
        self.note("said", work, message)
        return False

    def finished(self, work: Execution, end: Terminal, exit_status: int | None) -> None:
        self.note("finished", work, type(end), exit_status)
        if self.fails:
            raise ZeroDivisionError

    def of(self, work: Work) -> list[Any]:
        return [what[0] for what in self.heard if what[1] is work]


class Ground:
    def __init__(self, **changes: object) -> None:
        settings = PoolSettings(min_idle=0, fresh=False, **changes)  # type: ignore[arg-type]
        profile = Profile(pool=settings, start="cold")
        self.sessions = SessionPool({"blocking": profile, "async": profile})
        self.listener = Listener()
        self.dispatcher = Dispatcher(self.sessions, self.listener, async_limit=3)

    @property
    def heard(self) -> list[tuple[Any, ...]]:
        return self.listener.heard

    def child_of(self, work: Work) -> FakeSession:
        session: Any = work.child and work.child.session
        assert isinstance(session, FakeSession)
        return session

    def enqueue(self, *works: Work) -> None:
        for work in works:
            is_async = work.life.origin.is_async
            work.lane = self.dispatcher.lanes["async" if is_async else "blocking"]
            self.dispatcher.enqueue(work)

    def children(self) -> list[FakeSession]:
        sessions: list[Any] = [child.session for child in self.dispatcher.children()]
        return sessions

    async def quiescent(self) -> None:
        """Wait until no session is being started or ended."""
        pools = [self.sessions.profile_pool(kind) for kind in ("blocking", "async")]
        async with asyncio.timeout(HANG_S):
            for _ in range(3):  # a decision is made in the turn of the loop after a loss
                await asyncio.sleep(0)
            while tasks := {task for pool in pools for task in pool._tasks._tasks}:
                await asyncio.wait(tasks)
                await asyncio.sleep(0)


@asynccontextmanager
async def ground(blocking: int = 1, asynchronous: int = 0, **changes: object) -> AsyncIterator[Any]:
    made = Ground(**changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_pool, "Session", FakeSession)
        async with made.sessions:
            made.dispatcher.resize("blocking", blocking)
            made.dispatcher.resize("async", asynchronous)
            await made.quiescent()
            yield made
