"""The life of a session: its child, from start to end, its states, and what is known of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from capsule_tasks.errors import (
    IncompatibleProtocol,
    SessionLost,
    SessionStartFailed,
    SessionStateError,
    Unconfined,
    reason_of,
)
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Heartbeat,
    Output,
    Terminal,
    new_id,
)
from capsule_tasks.sessions.arguments import (
    check_callable,
    check_loop,
    check_text,
    check_type,
)
from capsule_tasks.sessions.health import Health, HealthWatch
from capsule_tasks.sessions.info import Counters, QueueStats, SessionInfo
from capsule_tasks.sessions.interceptors import Interceptor, Interceptors
from capsule_tasks.sessions.process.confinement import Confinement
from capsule_tasks.sessions.process.live_child import NAMED_AFTER, KillReason, LiveChild
from capsule_tasks.sessions.process.spawn import ColdSpawner, Spawner
from capsule_tasks.sessions.process.startup import await_ready, start_process, warm_up
from capsule_tasks.sessions.states import ALIVE, EVERY, OVER, SessionState, may_move
from capsule_tasks.sessions.stopping import Stopper
from capsule_tasks.sessions.stream import ExecutionStream
from capsule_tasks.settings import SessionConfig

log = logging.getLogger("capsule_tasks.sessions")

HealthListener = Callable[[Health], object]
HeartbeatListener = Callable[[Heartbeat], object]
OutputListener = Callable[[Output], object]
StateListener = Callable[[SessionState, SessionState], object]
T = TypeVar("T")

_EXIT_S = 5.0
"""How long a killed process may take to leave the process table."""


class SessionLifecycle:
    """Starts, stops, replaces and observes the child of a session.

    `Session` adds what is done with one that lives. Every change of state is made here, by
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
        self._spawner = spawner or ColdSpawner()
        self.session_id = session_id or new_id()
        self._state = SessionState.CREATING
        self._created_at = time.monotonic()
        self._counters = Counters()
        self._interceptors = Interceptors(self.config.routing, self._counters)
        self._listeners: list[tuple[StateListener, frozenset[SessionState]]] = []
        self._health_listeners: list[HealthListener] = []
        self._heartbeat_listeners: list[HeartbeatListener] = []
        self._output_listeners: list[OutputListener] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: LiveChild | None = None
        self._stopper: Stopper | None = None
        self._starting: asyncio.Task[None] | None = None
        """Brings a child up: a start, or a restart."""
        self._restarting: asyncio.Task[None] | None = None
        """The starting, if it is a restart."""
        self._restarts = 0
        self._ready_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._forget_child()

    def _forget_child(self) -> None:
        """What is known of a child, before there is one."""
        self._metadata: dict[str, Any] = {}
        self._ready_at: float | None = None
        self._last_used_at: float | None = None
        self._watch: HealthWatch | None = None
        self._confinement: Confinement | None = None
        self._last_error = ""

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def is_alive(self) -> bool:
        """A running child in a state that lets it be used again."""
        return self._state in ALIVE and self._child is not None and not self._child.is_over

    @property
    def pid(self) -> int | None:
        """The child's process; None while there is none."""
        child = self._child
        return child.process.pid if child is not None and not child.is_over else None

    @property
    def exit_status(self) -> int | None:
        """How the last child ended, negative for a signal; None while it has not."""
        exited = self._child.process.exited if self._child is not None else None
        return int(exited.result()) if exited is not None and exited.done() else None

    @property
    def metrics(self) -> dict[str, Any]:
        """Counters since the last start; empty if `enable_metrics` is off."""
        return self._counters.metrics() if self.config.enable_metrics else {}

    @property
    def info(self) -> SessionInfo:
        child, counters = self._child, self._counters
        streams = list(child.router.streams.values()) if child else []
        return SessionInfo(
            session_id=self.session_id,
            state=self._state,
            pid=self.pid,
            created_at=self._created_at,
            ready_at=self._ready_at,
            last_used_at=self._last_used_at,
            execution_count=counters.execution_count,
            error_count=counters.error_count,
            restarts=self._restarts,
            running=tuple(stream.execution_id for stream in streams),
            condemned_by=self._stopper.condemned_by if self._stopper else None,
            last_heartbeat=self._watch.heartbeat if self._watch else None,
            last_heartbeat_at=self._watch.heartbeat_at if self._watch else None,
            health=self._watch.health if self._watch else Health(),
            inputs=counters.inputs,
            queues=QueueStats(
                executions=len(streams),
                buffered_messages=sum(stream.buffered_messages for stream in streams),
                buffered_bytes=sum(stream.buffered_bytes for stream in streams),
                session_messages=len(child.router.session_messages) if child else 0,
                session_messages_dropped=child.router.session_messages.dropped if child else 0,
                control_handled=child.channel.control_handled if child else 0,
                bulk_handled=child.channel.bulk_handled if child else 0,
                priority_reads=child.channel.priority_reads if child else 0,
            ),
            metadata=dict(self._metadata),
            isolation=self._metadata.get("isolation", ()),
            last_error=self._last_error,
        )

    def add_state_listener(
        self, listener: StateListener, states: frozenset[SessionState] = EVERY
    ) -> None:
        """Have `listener(old, new)` called on every change of state, or on those to `states`."""
        check_callable("listener", listener)
        self._listeners.append((listener, states))

    def remove_state_listener(self, listener: StateListener) -> None:
        """ValueError if it was not there."""
        position = [known for known, _ in self._listeners].index(listener)
        del self._listeners[position]

    def add_health_listener(self, listener: HealthListener) -> None:
        """Have `listener(health)` called when the child falls silent and when it responds again."""
        check_callable("listener", listener)
        self._health_listeners.append(listener)

    def remove_health_listener(self, listener: HealthListener) -> None:
        self._health_listeners.remove(listener)

    def add_heartbeat_listener(self, listener: HeartbeatListener) -> None:
        """Have `listener(heartbeat)` called for each; on the event loop, however long it takes."""
        check_callable("listener", listener)
        self._heartbeat_listeners.append(listener)

    def add_output_listener(self, listener: OutputListener) -> None:
        """Have `listener(output)` called for what no execution wrote, or one that is over.

        As all listeners it is called on the event loop, however long it takes.
        """
        check_callable("listener", listener)
        self._output_listeners.append(listener)

    def add_message_interceptor(self, interceptor: Interceptor) -> None:
        """Have `interceptor(message)` called for every message before it is routed.

        It runs on the event loop and has 10 ms; after three overruns it is called on a thread of
        its own instead, where it delays nobody.
        """
        check_callable("interceptor", interceptor)
        self._interceptors.add(interceptor)

    def remove_message_interceptor(self, interceptor: Interceptor) -> bool:
        """Whether it was there."""
        return self._interceptors.remove(interceptor)

    def _move(self, target: SessionState) -> bool:
        """Change the state if the table allows it. No I/O, no waiting."""
        current = self._state
        if not may_move(current, target):
            return False
        self._state = target
        if self._confinement is not None:
            if target is SessionState.BUSY:
                self._confinement.watch()
            else:
                self._confinement.rest()
        if target is SessionState.READY:
            self._note_ready()
        elif target in OVER and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        for listener, states in tuple(self._listeners):
            if target in states:
                self._notify(listener, current, target)
        return True

    def _note_ready(self) -> None:
        """IDLE follows in a while. One timer sees to any number of short executions."""
        loop = asyncio.get_running_loop()
        self._ready_since = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self.config.timeouts.idle_s, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        self._idle_timer = None
        if self._state is not SessionState.READY:
            return
        loop = asyncio.get_running_loop()
        idle_at = self._ready_since + self.config.timeouts.idle_s
        if loop.time() < idle_at:
            self._idle_timer = loop.call_at(idle_at, self._on_idle_timer)
        else:
            self._move(SessionState.IDLE)

    def _notify(self, listener: Callable[..., object], *news: object) -> None:
        try:
            listener(*news)
        except Exception:
            log.exception("session listener %r failed", listener)

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Start the child and wait until it is ready; SessionStartFailed says why it is not."""
        if self._state is not SessionState.CREATING:
            raise SessionStateError("start()", self._state, "use restart() to begin anew")
        self._loop = asyncio.get_running_loop()
        self._move(SessionState.WARMING)
        self._starting = starting = self._loop.create_task(self._start_child())
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            starting.cancel()
            await _shielded(asyncio.wait({starting}))
            raise
        finally:
            if self._starting is starting:
                self._fail_start()  # it may have been cancelled before its first step
        if starting.cancelled():
            raise SessionStartFailed(f"the session was {self._state} before it was ready")
        starting.result()

    async def _start_child(self) -> None:
        """From WARMING to READY; or to ERROR, and nothing of the attempt stays."""
        try:
            await self._prepare()
            self._open_for_work()
        except BaseException as error:
            self._last_error = reason_of(error)
            try:
                await self._discard(
                    KillReason(f"the start failed: {self._last_error}", ErrorKind.LOST)
                )
            finally:
                self._fail_start()
            if isinstance(
                error,
                asyncio.CancelledError | SessionStartFailed | IncompatibleProtocol | Unconfined,
            ):
                raise
            raise SessionStartFailed(f"the session did not start: {error}") from error
        if self._watch is not None:
            self._watch.start()

    def _open_for_work(self) -> None:
        if not self._move(SessionState.READY):
            raise SessionStartFailed(f"the session was {self._state} before it was ready")

    def _fail_start(self) -> None:
        if self._state is SessionState.WARMING:
            self._move(SessionState.ERROR)

    async def _prepare(self) -> None:
        process = await start_process(self._spawner, self.config)
        self._child = child = LiveChild(
            self.session_id,
            self.config,
            process,
            self._interceptors.observe,
            self._on_heartbeat,
            self._on_stream_end,
            self._on_child_end,
        )
        child.router.counters = self._counters
        child.router.on_session_output = self._on_session_output
        self._watch = HealthWatch(
            self.session_id, child.process, self.config.timeouts, self._on_health
        )
        self._stopper = Stopper(child, self.config.timeouts, self._counters)
        sandbox, limits = self.config.child.sandbox, self.config.child.limits
        if sandbox is not None:
            self._confinement = Confinement(child, sandbox, limits, self._stopper.all_stacks)
        if self._state is not SessionState.WARMING:  # stopped while the process was being made
            raise SessionStartFailed(f"the session was {self._state} before it was ready")
        ready = await await_ready(child, self.config.timeouts)
        self._ready_at = time.monotonic()
        self._metadata = {
            "protocol_version": ready.version,
            "capabilities": ready.capabilities,
            "config": ready.config,
            "python": ready.python,
            "isolation": ready.isolation,
        }
        if self.config.warmup is not None:
            await warm_up(child, self.config.warmup, self.config.timeouts)
        if child.is_over:  # died between its last word and this moment
            raise SessionStartFailed(f"the child was lost: {self._last_error}")

    async def shutdown(self, reason: str = "") -> None:
        """Ask the child to leave, let `finally` blocks run, and kill it after `shutdown_s`.

        Executions end with an error of kind `shutdown`; safe at any time, any number of times.
        """
        check_text("reason", reason)
        self._check_loop("shutdown()")
        starting, child = self._starting, self._child
        is_leaving = self._state is SessionState.SHUTTING_DOWN
        if (
            child is None
            or child.is_over
            or self._is_restarting
            or not (is_leaving or self._move(SessionState.SHUTTING_DOWN))
        ):
            await self.terminate()
            return
        if not is_leaving:
            why = f"the session was shut down{f': {reason}' if reason else ''}"
            child.expect_exit(KillReason(why, ErrorKind.SHUTDOWN))
            self._count_triggers(child, why)
            child.send_shutdown(reason)
        try:
            async with asyncio.timeout(self.config.timeouts.shutdown_s):
                await asyncio.shield(child.ended)
        except TimeoutError:
            log.warning("session %s did not shut down in time; it is killed", self.session_id)
        finally:
            if self._starting is starting:  # else a restart came meanwhile, and the child is its
                await self.terminate()

    async def terminate(self) -> None:
        """Kill the child and all its descendants; safe at any time, any number of times."""
        self._check_loop("terminate()")
        starting = self._starting
        if starting is not None:
            starting.cancel()
        await _shielded(self._end(starting))

    async def _end(self, starting: asyncio.Task[None] | None) -> None:
        """Nothing is left when this returns, unless a restart has started another life."""
        life, child = self._restarts, self._child
        self._move(SessionState.SHUTTING_DOWN)
        why = "the session was terminated"
        if child is not None and not child.is_over:
            self._count_triggers(child, why)
        await self._discard(KillReason(why, ErrorKind.SHUTDOWN))
        if starting is not None and not starting.done():
            await asyncio.wait({starting})
        if self._restarts == life:
            self._move(SessionState.TERMINATED)
            self._interceptors.close()
            await self._see_tasks_end()

    async def _discard(self, doom: KillReason) -> None:
        """Kill the child, if there is one, and see it gone."""
        child = self._child
        if child is not None and not child.is_over:
            child.kill(doom)
            with contextlib.suppress(TimeoutError):
                await _shielded(asyncio.wait_for(asyncio.shield(child.ended), _EXIT_S))

    async def restart(self) -> None:
        """A new child under the same id. Callers that come while it starts share it."""
        self._check_loop("restart()")
        restarting = self._restarting
        if restarting is None or restarting.done() or restarting.cancelling():
            restarting = self._spawn_restart()
        await asyncio.wait({restarting})
        if restarting.cancelled():  # that it was, not that the caller is
            raise SessionStateError("restart()", self._state, "it was stopped on the way up")
        restarting.result()

    def _spawn_restart(self) -> asyncio.Task[None]:
        self._loop = asyncio.get_running_loop()
        restarting = self._loop.create_task(self._restart(self._starting))
        restarting.add_done_callback(_report_failure)
        self._starting = self._restarting = restarting
        return restarting

    async def _restart(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            previous.cancel()
        await self._end(previous)
        self._child = self._stopper = None
        self._counters = Counters()
        self._interceptors.count_into(self._counters)
        self._forget_child()
        self._restarts += 1
        self._move(SessionState.CREATING)
        self._move(SessionState.WARMING)
        await self._start_child()

    @property
    def _is_restarting(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    async def _see_tasks_end(self) -> None:
        """What was at work on the child that is gone has nothing left to wait for."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_EXIT_S)
            for task in late:
                task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Background work with an owner: it ends with the child."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), SessionLost | None):
            log.error("session %s: %r failed", self.session_id, task, exc_info=task.exception())

    async def _until_child_ends(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which is done to its end also if the caller does not wait for that."""
        task = self._spawn(work)
        await asyncio.wait({task})
        return task.result()

    def _count_triggers(self, child: LiveChild, reason: str) -> None:
        """The session-wide cancel: every wait ends, and is counted."""
        waits = sum(stream.is_waited_for for stream in child.router.streams.values())
        waits += child.router.fail_receivers(reason)
        self._counters.cancel_event_triggers += waits
        for stream in child.router.streams.values():
            if self._stopper is not None:
                self._stopper.count_cancelled(stream)

    # --- what the child reports ----------------------------------------------------------------

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._watch is not None:
            self._watch.on_heartbeat(heartbeat)
        for listener in tuple(self._heartbeat_listeners):
            self._notify(listener, heartbeat)

    def _on_session_output(self, output: Output) -> None:
        for listener in tuple(self._output_listeners):
            self._notify(listener, output)

    def _on_health(self, health: Health) -> None:
        for listener in tuple(self._health_listeners):
            self._notify(listener, health)

    def _on_stream_end(self, stream: ExecutionStream, terminal: Terminal) -> None:
        """The one place where an execution ends; its consumer may still be reading."""
        terminal = _as_stopped(stream, terminal)
        if isinstance(terminal, Error) and stream.terminal is None:
            self._counters.error_count += 1
            self._last_error = f"{terminal.type}: {terminal.message}"
        stream.finish(terminal)
        child = self._child
        if self._state is not SessionState.BUSY:
            return  # the end of the warmup: `start` says when the session is ready
        if child is not None and not child.router.streams and not child.is_over:
            self._move(SessionState.READY)

    def _on_child_end(self, doom: KillReason) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._child is not None:
            self._child.router.fail_receivers(doom.reason)
        self._interceptors.finish()
        if not doom.expected:
            self._last_error = doom.reason
            level = logging.INFO if doom.is_asked else logging.WARNING
            log.log(level, "session %s %s", self.session_id, doom)
        if self._state is SessionState.WARMING:
            return  # `start` is waiting and says what became of it
        is_leaving = self._state is SessionState.SHUTTING_DOWN
        unasked = not doom.expected and not is_leaving
        self._move(SessionState.ERROR if unasked else SessionState.TERMINATED)
        if doom.replace and self.config.replace_killed and not is_leaving:
            self._spawn_restart()

    # --- on which loop -------------------------------------------------------------------------

    def _check_loop(self, call: str) -> None:
        """WrongEventLoop where the session's child would be waited for on another loop."""
        is_over = self._state in OVER and (self._child is None or self._child.is_over)
        if not is_over:
            check_loop(call, f"session {self.session_id!r}", self._loop)

    def _check_reachable(self, call: str) -> None:
        """WrongEventLoop if nothing can be done for the session any more, on whatever loop."""
        if self._loop is not None and self._loop.is_closed():
            self._check_loop(call)

    async def _on_own_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the loop that owns the session, wherever the caller runs."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _as_stopped(stream: ExecutionStream, terminal: Terminal) -> Terminal:
    """What the child calls cancelled is a timeout or a limit if that is why it was cancelled."""
    stop = stream.stop
    if (
        stop is not None
        and stop.kind in NAMED_AFTER
        and isinstance(terminal, Error)
        and terminal.kind == ErrorKind.CANCELLED
    ):
        terminal.kind, terminal.type = stop.kind, NAMED_AFTER[stop.kind]
        terminal.message, terminal.stack = stop.message, stop.stack
    return terminal


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a session could not be restarted: %s", reason_of(error))


async def _shielded(work: Awaitable[T]) -> T:
    """Finish `work` also when the caller is cancelled meanwhile; then let the cancel through."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        raise
