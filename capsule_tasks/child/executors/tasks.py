"""The main thread of a child that runs Celery tasks: one at a time, or many coroutines at once.

What a task is, and how it is traced, the tracer knows (`celery_app`). Here is where it runs. A
blocking task is traced on the main thread, where signals are delivered, as under prefork. Celery's
tracer is a plain function, so the one of an `async def` task has a thread of its own that waits,
while the coroutine runs on the loop of the main thread; both share a copy of one context.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import fcntl
import functools
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn, Protocol

from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Hit, Registry
from capsule_tasks.child.stopping.interrupts import Interrupter
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.cancelled import as_failure
from capsule_tasks.protocol.messages import Ack, Execute, Message, TaskCall, TaskResult

_ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""A task that one of these reaches sees SystemExit and may tidy up, as under prefork."""

_AGAIN_S = 0.005
"""Until a signal is sent again that came at a bad moment."""

_current: contextvars.ContextVar[Execution | None] = contextvars.ContextVar(
    "capsule_execution", default=None
)


class Tracer(Protocol):
    """Runs one task with Celery's own tracer."""

    def enter_call(self, execution_id: str, call: TaskCall) -> TaskResult:
        """Everything that Celery does around a task, and the task itself."""

    def soft_limit(self) -> BaseException:
        """What a soft time limit raises."""

    def farewell(self) -> None:
        """Tell the app that the process ends."""


class _TaskLane:
    """What both lanes have.

    A task is acknowledged when it begins, and on the channel of its output: to Celery this is the
    moment from which it runs, and one channel is one wake-up less for the worker.
    """

    acknowledges = True
    ack_delay_s = 0.0

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        endings: EndReporter,
        capture: Capture,
        interrupter: Interrupter,
        tracer: Tracer,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._endings = endings
        self._capture = capture
        self._interrupter = interrupter
        self._tracer = tracer
        self._context = contextvars.copy_context()
        self._stopping = False
        self._pid = os.getpid()

    def soft_limit(self) -> BaseException:
        return self._tracer.soft_limit()

    def _start(self, execution: Execution) -> bool:
        """Make it a running one; False if it was stopped before."""
        if not self._registry.start(execution):
            return False
        now = time.monotonic()
        ack = Ack(ack_of=execution.work.id, execution_id=execution.id, accepted_at=now)
        if execution.ack_by > now:
            self._outbox.bulk_by(ack, execution.ack_by)
        else:
            self._outbox.bulk(ack)
        return True

    def _conduct(self, execution: Execution) -> Message:
        self._capture.enter(execution.sink)
        _current.set(execution)
        return self._endings.conduct(execution, lambda: self._perform(execution))

    def _perform(self, execution: Execution) -> Message:
        work = execution.work
        if not isinstance(work, Execute) or not isinstance(work.payload, TaskCall):
            raise TypeError("this session runs Celery tasks, and has no namespace to save")
        traced = self._tracer.enter_call(execution.id, work.payload)
        traced.has_unread_raw = _has_raw_output()
        return traced

    def _end_if_copied(self) -> None:
        """The task forked and did not exit: the copy must not speak for us."""
        if os.getpid() != self._pid:
            os._exit(0)


def _has_raw_output() -> bool:
    """Whether the parent has not read all that was written past `sys.stdout` and `sys.stderr`."""
    try:
        return any(
            struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0\0\0\0"))[0]
            for number in (1, 2)
        )
    except OSError:  # the task closed or replaced one: the parent looks for itself
        return True


class BlockingTaskExecutor(_TaskLane):
    """One task at a time, on the main thread."""

    ack_delay_s = 0.002

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._running: Execution | None = None
        self._asked_by = 0
        """The signal that ends this process when its task has tidied up."""
        for signum in _ASKED_TO_LEAVE:
            signal.signal(signum, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_soft_limit)

    def current(self) -> Execution | None:
        return self._running

    def ring(self) -> None:
        self._bell.put(None)

    def stop(self) -> None:
        self._stopping = True
        self.ring()

    def cancel_task(self, _execution: Execution, _hit: Hit) -> bool:
        return False

    def run(self) -> None:
        while not self._stopping:
            self._bell.get()
            while (execution := self._registry.first_waiting()) and not self._stopping:
                self._run_alone(execution)
        self._tracer.farewell()

    def _run_alone(self, execution: Execution) -> None:
        if not self._start(execution):
            return
        self._registry.claim_main_thread(execution)
        self._running = execution
        try:
            message = self._context.copy().run(self._conduct, execution)
        finally:
            self._running = None
        self._end_if_copied()
        if self._asked_by:
            # Its `finally` blocks have run. No result of it must be taken for the task's.
            with contextlib.suppress(Exception):
                self._tracer.farewell()
            _die_by(self._asked_by)
        self._endings.finish(execution, message)

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        """As a prefork worker does it: the task sees SystemExit, then the process ends."""
        if self._running is None:
            self.stop()
            return
        self._asked_by = signum
        if self._interrupter.is_inside(frame):
            raise SystemExit(128 + signum)
        # Our own code has the main thread, and may hold a lock: once more, in a moment.
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signum))
        again.daemon = True
        again.start()

    def _on_soft_limit(self, _signum: int, frame: FrameType | None) -> None:
        """What the signal means to a prefork child, for those who send it themselves."""
        if self._running is not None and self._interrupter.is_inside(frame):
            raise self.soft_limit()


def _die_by(signum: int) -> NoReturn:
    """End in the way that tells the parent of the signal."""
    if signum != signal.SIGQUIT:  # which would write all of this process's memory to a file
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signum,))
        os.kill(os.getpid(), signum)
    os._exit(128 + signum)


class AsyncTaskExecutor(_TaskLane):
    """Many `async def` tasks beside each other on the loop of the main thread."""

    def __init__(self, *parts: Any, limit: int) -> None:
        super().__init__(*parts)
        self._loop = asyncio.new_event_loop()
        self._by_task: dict[Any, Execution] = {}
        self._tracers = concurrent.futures.ThreadPoolExecutor(limit, "capsule-tracer")
        os.register_at_fork(after_in_child=self._stop_listening)

    def current(self) -> Execution | None:
        task = asyncio.current_task(self._loop)
        return self._by_task.get(task)

    def ring(self) -> None:
        self._loop.call_soon_threadsafe(self._serve)

    def stop(self) -> None:
        self._stopping = True
        self.ring()

    def cancel_task(self, execution: Execution, hit: Hit) -> bool:
        execution.hits.append(hit)
        self._loop.call_soon_threadsafe(self._take_hits, execution)
        return True

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopping or self._registry.running():
            # Raised in a coroutine these stop the loop; asyncio keeps them in its task.
            try:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()
            finally:
                self._end_if_copied()
        self._tracer.farewell()

    def bridge(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """`function` as Celery's tracer can call it: it returns when the coroutine has ended.

        Called where awaiting is possible, from another coroutine, it is as it was.
        """

        @functools.wraps(function)
        def enter_bridge(*args: Any, **kwargs: Any) -> Any:
            coroutine = function(*args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                return coroutine
            return self._wait_for(coroutine)

        return enter_bridge

    def _serve(self) -> None:
        while not self._stopping and (execution := self._registry.first_waiting()):
            if self._start(execution):
                self._tracers.submit(self._context.copy().run, self._trace, execution)
        if self._stopping:
            self._loop.stop()

    def _trace(self, execution: Execution) -> None:
        """On a thread of its own."""
        message = self._conduct(execution)
        self._endings.finish(execution, message)
        if self._stopping:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        execution = _current.get()
        ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(self._begin, execution, coroutine, ended, context)
        try:
            return ended.result()
        except asyncio.CancelledError as error:
            if execution is not None and execution.stop_kind is not None:
                raise
            # Nobody stopped the task: it raised this, or something that it awaited was cancelled.
            failure = as_failure(error)
        raise failure

    def _begin(
        self,
        execution: Execution | None,
        coroutine: Coroutine[Any, Any, Any],
        ended: concurrent.futures.Future[Any],
        context: contextvars.Context,
    ) -> None:
        driven = _Driven(coroutine, execution)
        name = f"execution {execution.id}" if execution is not None else None
        task = self._loop.create_task(driven.enter(), name=name, context=context)
        if execution is not None:
            execution.task, execution.coroutine = task, coroutine
            self._by_task[task] = execution
        task.add_done_callback(lambda task: self._on_end(task, ended))
        if execution is not None:
            self._take_hits(execution)  # those that came before there was a task

    def _on_end(self, task: asyncio.Task[Any], ended: concurrent.futures.Future[Any]) -> None:
        execution = self._by_task.pop(task, None)
        if execution is not None:
            execution.task = execution.coroutine = None
        try:
            ended.set_result(task.result())
        except asyncio.CancelledError as error:
            meant = execution.cancelled_for if execution is not None else None
            ended.set_exception(meant or error)
        except BaseException as error:
            ended.set_exception(error)

    def _take_hits(self, execution: Execution) -> None:
        task = execution.task
        while task is not None and execution.hits:
            error = execution.hits.pop(0)()
            if error is not None:
                execution.cancelled_for = error
                task.cancel()

    def _stop_listening(self) -> None:
        """A forked copy shares our selector and would take our wake-ups: its loop ends instead."""
        self._loop._selector.close()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way


class _Driven:
    """A coroutine in which a cancel arrives as the exception that was meant by it.

    A stop stays asyncio's CancelledError, which `asyncio.timeout` and task groups understand; a
    soft time limit is an exception that the task may catch, after which it goes on.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], execution: Execution | None) -> None:
        self._coroutine = coroutine
        self._execution = execution

    async def enter(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.enter_await()

    def enter_await(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        resume: Callable[[Any], Any] = steps.send
        value: Any = None
        while True:
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            try:
                resume, value = steps.send, (yield awaited)
            except BaseException as error:
                resume, value = steps.throw, self._as_meant(error)

    def _as_meant(self, error: BaseException) -> BaseException:
        execution = self._execution
        meant = execution.cancelled_for if execution is not None else None
        if execution is None or meant is None or not isinstance(error, asyncio.CancelledError):
            return error
        if isinstance(meant, ExecutionCancelled):
            return error
        execution.cancelled_for = None
        if execution.task is not None:
            execution.task.uncancel()
        return meant
