"""The main thread of a child that runs Celery tasks: one at a time, or many coroutines.

A blocking task is traced on the main thread, where signals are delivered, as under prefork.
Celery's tracer is a plain function. So the tracer of an `async def` task has a thread of its own,
which waits while the coroutine runs on the loop of the main thread; both share a copy of one
context.
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
import termios
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import FrameType
from typing import Any, ClassVar, NoReturn

import msgspec

from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.executors.failures import describe, describe_info
from capsule_tasks.child.executors.threads import BlockingThreads
from capsule_tasks.child.registry import Execution
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.cancelled import as_failure
from capsule_tasks.protocol.messages import Ack, Execute, Message, TaskCall, TaskResult
from capsule_tasks.protocol.values import sendable

_TERMINATING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""A task that one of these reaches sees SystemExit and may clean up, as under prefork."""

_SIGNAL_RETRY_S = 0.005
"""Until a signal is sent again that arrived while our own code ran."""

current_execution: contextvars.ContextVar[Execution | None] = contextvars.ContextVar(
    "capsule_execution", default=None
)


class Tracer(msgspec.Struct, eq=False):
    """Celery's own tracer, for one message after another."""

    tasks: Mapping[str, Any]
    loads: Callable[..., Any]
    accept: Any
    """The content types that the app accepts."""
    hostname: str
    is_async: bool
    soft_limit: Callable[[], BaseException]
    """The exception that a soft time limit raises."""
    send_shutdown: Callable[[], object]
    """Tells the app that the process ends."""

    def enter_call(self, execution_id: str, call: TaskCall) -> TaskResult:
        """Everything that Celery does around a task, and the task itself."""
        try:
            value, info, runtime_s, text = self.enter_trace(call)
        except ExecutionCancelled:
            raise
        except BaseException as error:
            if self.is_async and isinstance(error, asyncio.CancelledError):
                raise  # a coroutine is stopped; of a blocking task it is what the task raised
            failure = describe(error)
            return TaskResult(execution_id=execution_id, failure=failure, escaped_tracer=True)
        if info:
            failure = describe_info(value)
            return TaskResult(execution_id=execution_id, runtime_s=runtime_s, failure=failure)
        text = None if text is None else sendable(str(text))
        return TaskResult(execution_id=execution_id, text=text, runtime_s=runtime_s)

    def enter_trace(self, call: TaskCall) -> Any:
        task = self.tasks[call.name]
        args, kwargs, embed = decode_call(call, self.loads, self.accept)
        request = call.request
        request.update(
            {"args": args, "kwargs": kwargs, "hostname": self.hostname, "is_eager": False},
            **embed or {},
        )
        return task.__trace__(call.task_id, args, kwargs, request)


def decode_call(call: TaskCall, loads: Callable[..., Any], accept: Any) -> Any:
    """The arguments of the task, and what Celery embeds with them."""
    body = call.body.decode("utf-8", "surrogatepass") if call.is_text else call.body
    content = loads(body, call.content_type, call.content_encoding, accept=accept)
    return _parse_protocol_1(content) if call.protocol == 1 else content


def _parse_protocol_1(content: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    embed = {name: content.get(name) for name in ("callbacks", "errbacks", "chord")}
    return content.get("args", ()), content.get("kwargs", {}), {**embed, "chain": None}


class _TaskExecutor(Executor, kw_only=True):
    """The base of both executors of tasks.

    A task is acknowledged when it starts, on the channel of its output: to Celery this is the
    moment from which it runs, and one channel is one wake-up less for the worker.
    """

    acknowledges: ClassVar = True

    tracer: Tracer

    def soft_limit(self) -> BaseException:
        return self.tracer.soft_limit()

    def _start(self, execution: Execution) -> bool:
        """Make the execution a running one; False if it was stopped before."""
        if not self.registry.start(execution):
            return False
        now = time.monotonic()
        ack = Ack(ack_of=execution.work.id, execution_id=execution.id, accepted_at=now)
        deferred_until = execution.ack_by if execution.ack_by > now else None
        self.outbox.bulk(ack, deferred_until=deferred_until)
        return True

    def _run(self, execution: Execution) -> Message:
        current_execution.set(execution)
        work = execution.work
        if not isinstance(work, Execute) or not isinstance(work.payload, TaskCall):
            raise TypeError("this session runs Celery tasks, and has no namespace to save")
        result = self.tracer.enter_call(execution.id, work.payload)
        result.has_unread_raw = _has_unread_raw_output()
        return result


def _has_unread_raw_output() -> bool:
    """Whether the parent has not read all that was written past `sys.stdout` and `sys.stderr`."""
    try:
        # FIONREAD answers with the bytes of an int: the number of unread bytes.
        return any(any(fcntl.ioctl(number, termios.FIONREAD, bytes(4))) for number in (1, 2))
    except OSError:  # the task closed or replaced one: let the parent check
        return True


class BlockingTaskExecutor(_TaskExecutor, kw_only=True):
    """One task at a time, on the main thread."""

    ack_delay_s: ClassVar = 0.002

    terminated_by: int = 0
    """The signal that ends this process when its task has cleaned up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for signum in _TERMINATING_SIGNALS:
            signal.signal(signum, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_soft_limit)

    def run(self) -> None:
        while not self.is_stopping:
            self.wakeups.get()
            self._serve()
        self.tracer.send_shutdown()

    def _serve(self) -> None:
        while (execution := self.registry.first_waiting()) and not self.is_stopping:
            if not self._start(execution):
                continue
            self.registry.claim_main_thread(execution)
            message = self._run_alone(execution, self.context.copy())
            if self.terminated_by:
                # Its `finally` blocks have run. No result of it must be taken for the task's.
                with contextlib.suppress(Exception):
                    self.tracer.send_shutdown()
                _die_by(self.terminated_by)
            self.end_reporter.finish(execution, message)

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        """Do as a prefork worker does: the task sees SystemExit, then the process ends."""
        if self.alone is None:
            self.stop()
            return
        self.terminated_by = signum
        if self.interrupter.is_inside(frame):
            raise SystemExit(128 + signum)
        # Our own code has the main thread, and may hold a lock: send the signal again soon.
        again = threading.Timer(_SIGNAL_RETRY_S, os.kill, (os.getpid(), signum))
        again.daemon = True
        again.start()

    def _on_soft_limit(self, _signum: int, frame: FrameType | None) -> None:
        """Do what SIGUSR1 does in a prefork child, for users who send it themselves."""
        if self.alone is not None and self.interrupter.is_inside(frame):
            raise self.soft_limit()


def _die_by(signum: int) -> NoReturn:
    """End so that the parent sees the signal in the exit status."""
    if signum != signal.SIGQUIT:  # which would write all of this process's memory to a file
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signum,))
        os.kill(os.getpid(), signum)
    os._exit(128 + signum)


class AsyncTaskExecutor(_TaskExecutor, kw_only=True):
    """Many `async def` tasks on the loop of the main thread."""

    tracers: concurrent.futures.Executor
    """Threads, one for each task that may run at once."""
    threads: BlockingThreads
    loop: asyncio.AbstractEventLoop = msgspec.field(default_factory=asyncio.new_event_loop)

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(self.threads)
        while not self.is_stopping or self.registry.running():
            self._run_loop(self.loop)
        self.tracer.send_shutdown()

    def bridge(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """`function` as Celery's tracer can call it: it returns when the coroutine has ended.

        Called on the main thread, by another coroutine, it returns the coroutine to await.
        """

        @functools.wraps(function)
        def enter_bridge(*args: Any, **kwargs: Any) -> Any:
            coroutine = function(*args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                return coroutine
            return self._wait_for(coroutine)

        return enter_bridge

    def _is_coroutine(self, _execution: Execution) -> bool:
        return True

    def _serve(self) -> None:
        while not self.is_stopping and (execution := self.registry.first_waiting()):
            if self._start(execution):
                self.tracers.submit(self.context.copy().run, self._trace, execution)
        if self.is_stopping:
            self.loop.stop()

    def _trace(self, execution: Execution) -> None:
        """Run a task on a thread of its own."""
        self.end_reporter.finish(execution, self._run_described(execution))
        if self.is_stopping:
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        execution = current_execution.get()
        ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = contextvars.copy_context()
        self.loop.call_soon_threadsafe(self._start_coroutine, execution, coroutine, ended, context)
        try:
            return ended.result()
        except asyncio.CancelledError as error:
            if execution is not None and execution.stop_kind is not None:
                raise
            # The task was not stopped: it raised this, or something that it awaited was cancelled.
            failure = as_failure(error)
        raise failure

    def _start_coroutine(
        self,
        execution: Execution | None,
        coroutine: Coroutine[Any, Any, Any],
        ended: concurrent.futures.Future[Any],
        context: contextvars.Context,
    ) -> None:
        name = f"execution {execution.id}" if execution is not None else None
        task = self.loop.create_task(_drive(coroutine, execution), name=name, context=context)
        task.add_done_callback(lambda task: self._on_end(task, ended))
        if execution is not None:
            execution.coroutine = coroutine
            self._add_task(execution, task)

    def _on_end(self, task: asyncio.Task[Any], ended: concurrent.futures.Future[Any]) -> None:
        execution = self.by_task.pop(task, None)
        if execution is not None:
            execution.task = execution.coroutine = None
        try:
            ended.set_result(task.result())
        except asyncio.CancelledError as error:
            meant = execution.cancelled_for if execution is not None else None
            ended.set_exception(meant or error)
        except BaseException as error:
            ended.set_exception(error)


async def _drive(coroutine: Coroutine[Any, Any, Any], execution: Execution | None) -> Any:
    return await enter_driven(coroutine, execution)


@types.coroutine
def enter_driven(
    coroutine: Coroutine[Any, Any, Any], execution: Execution | None
) -> Generator[Any, Any, Any]:
    """Run a coroutine, in which a cancel arrives as the exception for which it was cancelled.

    A stop stays asyncio's CancelledError, which `asyncio.timeout` and task groups understand. A
    soft time limit is an exception that the task may catch, after which it goes on.
    """
    steps = coroutine.__await__()
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
            resume, value = steps.throw, _cause(execution, error)


def _cause(execution: Execution | None, error: BaseException) -> BaseException:
    meant = execution.cancelled_for if execution is not None else None
    if execution is None or meant is None or not isinstance(error, asyncio.CancelledError):
        return error
    if isinstance(meant, ExecutionCancelled):
        return error
    execution.cancelled_for = None
    if execution.task is not None:
        execution.task.uncancel()
    return meant
