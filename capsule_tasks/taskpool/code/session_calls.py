"""Calls of named sessions that came as Celery tasks: coroutines without a slot and without a child.

Each is a client of its session, in the main process. The pool neither claims nor publishes a stream
for it: whoever runs the code is the only writer of the execution.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.common import TERM_SIGNAME
from celery.exceptions import TaskRevokedError
from celery.platforms import signals
from kombu.serialization import loads, prepare_accept_content

from capsule_tasks.child.executors.tasks import decode_call
from capsule_tasks.client.sessions.as_task import (
    SessionArguments,
    session_arguments,
    submit_as_task,
)
from capsule_tasks.client.sessions.execution import SessionExecution
from capsule_tasks.errors import (
    CodeFailed,
    CodeNotRun,
    NoResult,
    reason_of,
)
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.taskpool.code.tracing import CodeTracer
from capsule_tasks.taskpool.hub import Bridge
from capsule_tasks.taskpool.reporting.reporter import TaskReporter

if TYPE_CHECKING:
    from capsule_tasks.taskpool.pool import TaskPool

_SIGTERM = signals.signum(TERM_SIGNAME)


class SessionCallReporter(TaskReporter):
    """Reports of such a task to Celery. Its `execution` is never admitted by the supervisor."""

    def __init__(self, pool: TaskPool, bridge: Bridge, request: Any, arguments: Any) -> None:
        super().__init__(pool, bridge, request, arguments)
        assert isinstance(self.execution.call, TaskCall)
        self.message = self.execution.call
        self.signum = _SIGTERM
        self.is_submitted = False
        self.is_ending = False
        """Celery is ending the task here: no other worker may."""
        self.is_over = False

    def terminate(
        self,
        signum: int,
        requested_by: str = "code in the worker",  # noqa: ARG002 - the call's own log says it
        *,
        is_worker_stopping: bool = False,
    ) -> None:
        """Cancel the call. A worker that stops leaves it alone: another one takes its message."""
        self.signum = signum
        self._pool.stop_session_call(self, is_worker_stopping=is_worker_stopping)

    def ready(self) -> bool:
        return self.is_over

    def ended(self, end: End, *, frees_slot: bool) -> None:
        self.is_over = True
        super().ended(end, frees_slot=frees_slot)


class SessionCalls:
    """The calls that tasks of this worker wait for; on the runtime's loop, but for `_end_task`."""

    def __init__(self, app: Any, tracer: CodeTracer) -> None:
        self._app = app
        self._tracer = tracer
        self._background = BackgroundTasks()
        self._waiting: dict[SessionCallReporter, asyncio.Task[None]] = {}

    def start(self, task: SessionCallReporter) -> None:
        """Submit the call, wait for its end, and report it."""
        self._waiting[task] = waiting = asyncio.get_running_loop().create_task(self._run(task))
        waiting.add_done_callback(lambda _: self._waiting.pop(task, None))

    def cancel(self, task: SessionCallReporter) -> None:
        """Cancel the call, submitted or not; its task ends as the call does."""
        if task in self._waiting:
            origin = task.execution.life.origin
            self.discard(origin.execution_id, (origin.group, origin.index))

    def discard(self, call_id: str, member: tuple[str, int]) -> None:
        """Cancel the call of a task, which need not be here."""
        execution = SessionExecution(call_id, app=self._app)
        execution.member = member
        self._background.spawn(self._background.call_until_answered(execution.acancel))

    def requeue(self, task: SessionCallReporter) -> None:
        """Leave a task to the next delivery of its message; the call goes on."""
        waiting = self._waiting.get(task)
        if waiting is not None and not task.is_ending:
            task.is_ending = True
            waiting.cancel()
            task.ended(End(EndKind.REQUEUED), frees_slot=True)

    def requeue_all(self) -> None:
        for task in list(self._waiting):
            self.requeue(task)

    async def stop(self) -> None:
        """Wait for nothing more."""
        waiting = list(self._waiting.values())
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self._background.stop()

    # --- one task --------------------------------------------------------------------------------

    async def _run(self, task: SessionCallReporter) -> None:
        started_at = time.monotonic()
        value, error = None, None
        try:
            value = await self._value(task)
        except TaskRevokedError:
            task.is_ending = True
            task.ended(End(EndKind.STOPPED, signum=task.signum), frees_slot=True)
            return
        except Exception as fault:  # noqa: BLE001 - whatever it is, the task fails with it
            # Whatever kept the call from being submitted: nothing of it ran.
            error = fault if task.is_submitted else CodeNotRun(reason_of(fault))
        task.is_ending = True  # chords must not count it twice
        # Only the end of a call is stored by whoever ran it; Celery stores why there was no call.
        is_stored = task.is_submitted and not isinstance(error, NoResult)
        result = await self._traced(task.message, value, error, is_stored=is_stored)
        result.runtime_s = time.monotonic() - started_at
        if isinstance(error, CodeFailed) and result.failure is not None:
            result.failure.traceback = error.traceback or result.failure.traceback
        task.ended(End(EndKind.TRACED, "", result), frees_slot=True)

    async def _value(self, task: SessionCallReporter) -> Any:
        arguments, origin = self._arguments(task.message), task.execution.life.origin
        until_answered = self._background.call_until_answered
        execution = await until_answered(
            lambda: submit_as_task(
                self._app,
                origin.execution_id,
                arguments,
                group=origin.group,
                index=origin.index,
            )
        )
        task.is_submitted = True
        task.accepted(os.getpid(), time.monotonic(), defers_ack=False)
        return await until_answered(execution.aget)

    def _arguments(self, message: TaskCall) -> SessionArguments:
        accept = prepare_accept_content(self._app.conf.accept_content)
        args, kwargs, _ = decode_call(message, loads, accept)
        return session_arguments(*args, **kwargs)

    async def _traced(
        self, message: TaskCall, value: Any, error: Exception | None, *, is_stored: bool
    ) -> TaskResult:
        """Have Celery end the task, on a thread."""

        def outcome() -> Any:
            if error is not None:
                # Celery clears the frames of the traceback: those of this very coroutine.
                raise error.with_traceback(None)
            return value

        loop = asyncio.get_running_loop()
        end = partial(self._end_task, message, outcome, is_stored=is_stored)
        return await loop.run_in_executor(self._tracer.threads, end)

    def _end_task(
        self, message: TaskCall, outcome: Callable[[], Any], *, is_stored: bool
    ) -> TaskResult:
        is_unwanted = message.request.get("ignore_result")
        if is_stored:
            message.request["ignore_result"] = True
        result = self._tracer.trace(message, outcome)
        if is_stored and is_unwanted:
            self._app.backend.forget(message.task_id)
        return result
