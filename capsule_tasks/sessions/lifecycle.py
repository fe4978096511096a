"""The life of a session: its child from start to end, its states, and what is known of both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Self, TypeVar

from capsule_tasks.errors import (
    OperatorError,
    SessionStartFailed,
    SessionStateError,
    reason_of,
)
from capsule_tasks.protocol.ids import new_id
from capsule_tasks.protocol.messages import Error, ErrorKind, Shutdown, Terminal
from capsule_tasks.sessions.arguments import check_callable, check_loop, check_text, check_type
from capsule_tasks.sessions.info import Counters, Health, QueueStats, SessionInfo
from capsule_tasks.sessions.listeners import SessionListeners, notify
from capsule_tasks.sessions.process.child_process import ChildProcess, ColdSpawner, Spawner
from capsule_tasks.sessions.process.live_child import LiveChild
from capsule_tasks.sessions.states import ALIVE, OVER, TRANSITIONS, SessionState
from capsule_tasks.sessions.stopping import KillReason
from capsule_tasks.sessions.stream import CANCEL_CREDIT, ExecutionStream
from capsule_tasks.sessions.tasks import SessionTasks, shielded
from capsule_tasks.settings import SessionConfig

log = logging.getLogger("capsule_tasks.sessions")

T = TypeVar("T")

_EXIT_S = 5.0
"""How long a killed process may take to leave the process table."""


class SessionLifecycle(SessionListeners):
    """Starts, stops, replaces and observes the child of a session.

    `Session` adds what is done with a running child. Every change of state is made here, by
    `_move`, and every execution ends in `_on_stream_end`.
    """

    def __init__(
        self,
        config: SessionConfig | None = None,
        *,
        session_id: str | None = None,
        spawner: Spawner | None = None,
    ) -> None:
        check_type("config", config, SessionConfig, None)
        check_text("session_id", session_id)
        if spawner is not None:
            check_callable("spawner.spawn", getattr(spawner, "spawn", None))
        self.config = config or SessionConfig()
        super().__init__(self.config.routing)
        self._spawner = spawner or ColdSpawner()
        self.session_id = session_id or new_id()
        self._state = SessionState.CREATING
        self._created_at = time.monotonic()
        self._background = SessionTasks(f"session {self.session_id}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        """Starts a child: the first one, or that of a restart."""
        self._restarting: asyncio.Task[None] | None = None
        """The same task, if it is a restart."""
        self._restarts = 0
        self._ready_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._forget_child()

    def _forget_child(self) -> None:
        self._child: LiveChild | None = None
        self._last_used_at: float | None = None
        self._last_error = ""

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether a child runs, in a state in which it can be used again."""
        return self._state in ALIVE and self._child is not None and not self._child.is_over

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        child = self._child
        return child.process.pid if child is not None and not child.is_over else None

    @property
    def exit_status(self) -> int | None:
        """How the last child exited, negative for a signal; None while it has not."""
        exited = self._child.process.exited if self._child is not None else None
        return int(exited.result()) if exited is not None and exited.done() else None

    @property
    def metrics(self) -> dict[str, Any]:
        """Counters since the last start; empty if `enable_metrics` is off."""
        return self._counters.metrics() if self.config.enable_metrics else {}

    @property
    def info(self) -> SessionInfo:
        child, counters = self._child, self._counters
        metadata = child.metadata if child else {}
        return SessionInfo(
            session_id=self.session_id,
            state=self._state,
            pid=self.pid,
            created_at=self._created_at,
            ready_at=child.ready_at if child else None,
            last_used_at=self._last_used_at,
            execution_count=counters.execution_count,
            error_count=counters.error_count,
            restarts=self._restarts,
            running=tuple(child.streams) if child else (),
            condemned_by=child.stopper.condemned_by if child else None,
            last_heartbeat=child.watch.heartbeat if child else None,
            last_heartbeat_at=child.watch.heartbeat_at if child else None,
            health=child.watch.health if child else Health(),
            inputs=dataclasses.replace(counters.inputs),
            queues=child.queues if child else QueueStats(),
            metadata=metadata,
            isolation=metadata.get("isolation", ()),
            last_error=self._last_error,
        )

    def _move(self, target: SessionState) -> bool:
        """Change the state if the table allows it. No I/O, no waiting."""
        current = self._state
        if target not in TRANSITIONS[current]:
            return False
        self._state = target
        if self._child is not None and (confinement := self._child.confinement) is not None:
            if target is SessionState.BUSY:
                confinement.watch()
            else:
                confinement.rest()
        if target is SessionState.READY:
            self._plan_idle()
        elif target in OVER and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if listeners := self._state_listeners.get(target):
            notify(listeners, current, target)
        return True

    def _plan_idle(self) -> None:
        """Plan the move to IDLE. One timer serves any number of short executions."""
        loop = asyncio.get_running_loop()
        self._ready_since = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self.config.timeouts.idle_s, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        self._idle_timer = None
        loop, idle_at = asyncio.get_running_loop(), self._ready_since + self.config.timeouts.idle_s
        if self._state is SessionState.READY and loop.time() < idle_at:
            self._idle_timer = loop.call_at(idle_at, self._on_idle_timer)
        elif self._state is SessionState.READY:
            self._move(SessionState.IDLE)

    # --- start and stop ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Start the child and wait until it is ready; SessionStartFailed says why it is not."""
        if self._state is not SessionState.CREATING:
            raise SessionStateError("start()", self._state, "use restart() for a new child")
        self._loop = asyncio.get_running_loop()
        self._move(SessionState.WARMING)
        self._starting = starting = self._loop.create_task(self._start_child())
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            starting.cancel()
            await shielded(asyncio.wait({starting}))
            raise
        finally:
            if self._starting is starting:
                self._fail_start()  # the task may have been cancelled before its first step
        if starting.cancelled():
            raise self._stopped_early()
        starting.result()

    async def _start_child(self) -> None:
        """Move from WARMING to READY; or to ERROR, with nothing of the child left."""
        try:
            await self._prepare_child()
        except BaseException as error:
            self._last_error = reason_of(error)
            reason = KillReason(f"the start failed: {self._last_error}", ErrorKind.LOST)
            try:
                await self._discard(reason)
            finally:
                self._fail_start()
            if isinstance(error, asyncio.CancelledError | OperatorError):
                raise
            raise SessionStartFailed(f"the session did not start: {error}") from error

    def _stopped_early(self) -> SessionStartFailed:
        return SessionStartFailed(f"the session was {self._state} before it was ready")

    def _fail_start(self) -> None:
        if self._state is SessionState.WARMING:
            self._move(SessionState.ERROR)

    async def _prepare_child(self) -> None:
        process = await ChildProcess.start(self._spawner, self.config)
        self._child = child = LiveChild(
            self.session_id,
            self.config,
            process,
            self._counters,
            self._interceptors,
            on_health=partial(notify, self._health_listeners),
            on_heartbeat=partial(notify, self._heartbeat_listeners),
            on_session_output=partial(notify, self._output_listeners),
            on_stream_end=self._on_stream_end,
            on_end=self._on_child_end,
        )
        if self._state is not SessionState.WARMING:  # stopped while the process was started
            raise self._stopped_early()
        await child.wait_ready()
        if child.is_over:  # it died between its last message and this moment
            raise SessionStartFailed(f"the child was lost: {self._last_error}")
        if not self._move(SessionState.READY):
            raise self._stopped_early()
        child.watch.start()

    async def shutdown(self, reason: str = "") -> None:
        """Ask the child to stop, let `finally` blocks run, and kill it after `shutdown_s`.

        Executions end with an error of kind `shutdown`; safe at any time, any number of times.
        """
        check_text("reason", reason)
        self._check_loop("shutdown()")
        starting, child = self._starting, self._child
        is_stopping = self._state is SessionState.SHUTTING_DOWN
        if (
            child is None
            or child.is_over
            or self._is_restarting
            or not (is_stopping or self._move(SessionState.SHUTTING_DOWN))
        ):
            await self.terminate()
            return
        if not is_stopping:
            message = f"the session was shut down{f': {reason}' if reason else ''}"
            child.expect_exit(KillReason(message, ErrorKind.SHUTDOWN))
            self._count_ended_waits(child, message)
            for stream in child.streams.values():  # a paused consumer must not hold it up
                stream.allow_cancel_credit()
            child.send_control(Shutdown(reason=reason, credit=CANCEL_CREDIT))
        try:
            async with asyncio.timeout(self.config.timeouts.shutdown_s):
                await asyncio.shield(child.ended)
        except TimeoutError:
            log.warning("session %s did not shut down in time; it is killed", self.session_id)
        finally:
            if self._starting is starting:  # else a restart came meanwhile and owns the child
                await self.terminate()

    async def terminate(self) -> None:
        """Kill the child and all its descendants; safe at any time, any number of times."""
        self._check_loop("terminate()")
        starting = self._starting
        if starting is not None:
            starting.cancel()
        await shielded(self._end(starting))

    async def _end(self, starting: asyncio.Task[None] | None) -> None:
        """Leave nothing behind, unless a restart has started another child meanwhile."""
        restarts, child = self._restarts, self._child
        self._move(SessionState.SHUTTING_DOWN)
        message = "the session was terminated"
        if child is not None and not child.is_over:
            self._count_ended_waits(child, message)
        await self._discard(KillReason(message, ErrorKind.SHUTDOWN))
        if starting is not None and not starting.done():
            await asyncio.wait({starting})
        if self._restarts == restarts:
            self._move(SessionState.TERMINATED)
            self._interceptors.close()
            await self._background.end(_EXIT_S)

    async def _discard(self, reason: KillReason) -> None:
        """Kill the child, if there is one, and wait for its end."""
        child = self._child
        if child is not None and not child.is_over:
            child.kill(reason)
            with contextlib.suppress(TimeoutError):
                await shielded(asyncio.wait_for(asyncio.shield(child.ended), _EXIT_S))

    async def restart(self) -> None:
        """Start a new child under the same id. Concurrent callers share one restart."""
        self._check_loop("restart()")
        restarting = self._restarting
        if restarting is None or restarting.done() or restarting.cancelling():
            restarting = self._spawn_restart()
        await asyncio.wait({restarting})
        if restarting.cancelled():  # the restart was cancelled, not this caller
            raise SessionStateError("restart()", self._state, "it was stopped on the way up")
        restarting.result()

    def _spawn_restart(self) -> asyncio.Task[None]:
        self._loop = asyncio.get_running_loop()
        restarting = self._loop.create_task(self._restart(self._starting))
        restarting.add_done_callback(_log_failed_restart)
        self._starting = self._restarting = restarting
        return restarting

    async def _restart(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            previous.cancel()
        await self._end(previous)
        self._counters = Counters()
        self._interceptors.counters = self._counters
        self._forget_child()
        self._restarts += 1
        self._move(SessionState.CREATING)
        self._move(SessionState.WARMING)
        await self._start_child()

    @property
    def _is_restarting(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    def _count_ended_waits(self, child: LiveChild, message: str) -> None:
        """Count the waits that the end of the session ends, and the executions it cancels."""
        waits = sum(stream.is_waited_for for stream in child.streams.values())
        waits += child.router.fail_receivers(message)
        self._counters.cancel_event_triggers += waits
        for stream in child.streams.values():
            child.stopper.count_cancelled(stream)

    # --- what the child reports ----------------------------------------------------------------

    def _on_stream_end(self, stream: ExecutionStream, terminal: Terminal) -> None:
        """End an execution. Its consumer may still be reading."""
        stream.name_after_stop(terminal)
        if isinstance(terminal, Error) and stream.terminal is None:
            self._counters.error_count += 1
            self._last_error = f"{terminal.type}: {terminal.message}"
        stream.finish(terminal)
        child = self._child
        if self._state is not SessionState.BUSY:
            return  # the end of the warmup: `start` says when the session is ready
        if child is not None and not child.streams and not child.is_over:
            self._move(SessionState.READY)

    def _on_child_end(self, reason: KillReason) -> None:
        self._interceptors.finish()
        if not reason.expected:
            self._last_error = reason.message
            level = logging.INFO if reason.is_asked else logging.WARNING
            log.log(level, "session %s %s", self.session_id, reason)
        if self._state is SessionState.WARMING:
            return  # `start` is waiting and reports the failure
        is_stopping = self._state is SessionState.SHUTTING_DOWN
        is_error = not reason.expected and not is_stopping
        self._move(SessionState.ERROR if is_error else SessionState.TERMINATED)
        if reason.replace and self.config.replace_killed and not is_stopping:
            self._spawn_restart()

    # --- event loops ---------------------------------------------------------------------------

    def _check_loop(self, call: str) -> None:
        """WrongEventLoop unless called on the loop of the session, while it has a child."""
        is_over = self._state in OVER and (self._child is None or self._child.is_over)
        if not is_over:
            check_loop(call, f"session {self.session_id!r}", self._loop)

    def _check_reachable(self, call: str) -> None:
        """WrongEventLoop if the loop of the session is closed, so that no loop can reach it."""
        if self._loop is not None and self._loop.is_closed():
            self._check_loop(call)

    async def _on_own_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the loop that owns the session, wherever the caller runs."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _log_failed_restart(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a session could not be restarted: %s", reason_of(error))
