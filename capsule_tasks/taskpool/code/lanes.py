"""Lanes of code: each execution has a session that was never used before, and is used once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from capsule_tasks.errors import CodeNotRun, reason_of
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lanes import Child, PoolLane
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.messages import (
    Ack,
    Error,
    ErrorKind,
    Message,
    Result,
    TaskResult,
    Terminal,
)
from capsule_tasks.sessions.pool.plan import Slot
from capsule_tasks.sessions.pool.session_pool import ProfilePool
from capsule_tasks.taskpool.code.tracing import CodeTracer

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

_ENDING = 8
"""Sessions that are being ended, beyond those that are in use and ready."""
_OF_THE_CODE = (ErrorKind.RAISED, ErrorKind.TIMEOUT, ErrorKind.LIMIT)
"""How code ends by itself, or by its own limits; other ends are those of any task."""


class CodeEnds:
    """Has Celery's tracer end executions of code, and hands the supervisor its outcome."""

    def __init__(self, tracer: CodeTracer, supervisor: Supervisor) -> None:
        self._tracer = tracer
        self._supervisor = supervisor

    def end(self, execution: Execution, end: Result | Error) -> None:
        """The code has come to its end."""
        self._trace(execution, self._tracer.outcome(end), end)

    def refuse(self, execution: Execution, reason: str) -> None:
        """End an execution that waits, without running it."""
        execution.pid = os.getpid()
        self._supervisor.feed(execution, Lifecycle.on_sent)
        self._supervisor.feed(execution, Lifecycle.on_child_started, time.monotonic())

        def fail() -> None:
            raise CodeNotRun(reason)

        self._trace(execution, fail, None)

    def _trace(
        self, execution: Execution, outcome: Callable[[], Any], end: Result | Error | None
    ) -> None:
        """Trace the outcome on a thread; the execution is over when that is done."""
        message = _code_of(execution).message
        assert message is not None, "this lane is for code that came as a task"
        loop = asyncio.get_running_loop()
        tracing = loop.run_in_executor(self._tracer.threads, self._tracer.trace, message, outcome)
        tracing.add_done_callback(partial(self._on_traced, execution, end))

    def _on_traced(
        self,
        execution: Execution,
        end: Result | Error | None,
        tracing: asyncio.Future[TaskResult],
    ) -> None:
        if tracing.cancelled():  # the worker ends
            return
        result = tracing.result()
        started_at = _code_of(execution).started_at
        if end is not None:
            result.stdout_bytes, result.stderr_bytes = end.stdout_bytes, end.stderr_bytes
        if end is not None and started_at:
            result.runtime_s = end.timestamp - started_at
        if isinstance(end, Error) and result.failure is not None:
            result.failure.traceback = end.traceback or result.failure.traceback
        self._supervisor.finished(execution, result, None)


def _code_of(execution: Execution) -> CodeCall:
    call = execution.call
    assert isinstance(call, CodeCall), "this lane is for code"
    return call


class CodeLane(PoolLane):
    """Has as many sessions as executions, and some that are ready; none before the first code."""

    def __init__(
        self,
        profile: str,
        pool: ProfilePool,
        warm: int,
        ends: CodeEnds,
        supervisor: Supervisor,
        sent: dict[Execution, None],
    ) -> None:
        super().__init__(f"code:{profile}", pool, 1, supervisor, sent, max_extra_children=_ENDING)
        self._profile = profile
        self._warm = warm
        self._ends = ends
        self._background = BackgroundTasks()
        self._is_started = False

    async def stop(self) -> None:
        await self._background.stop()
        await self.pool.stop()

    def start_soon(self) -> None:
        """Load the template and make the first sessions, once."""
        if not self._is_started:
            self._is_started = True
            self._background.spawn(self._start())

    async def _start(self) -> None:
        try:
            await self.pool.start()
        except Exception as error:  # noqa: BLE001 - whatever it was, the code that waits fails by it
            self.starts_fail(reason_of(error))
        else:
            self._fit()

    # --- sessions ------------------------------------------------------------------------------

    def starts_fail(self, error: str) -> None:
        """Nothing is gained by waiting: code that needs a sandbox runs in no other session."""
        refused, self.waiting = list(self.waiting), type(self.waiting)()
        reason = f"no session of profile {self._profile!r} starts: {error}"
        for execution in refused:
            self._ends.refuse(execution, reason)
        self._fit()

    def enqueue(self, execution: Execution) -> None:
        self.start_soon()
        super().enqueue(execution)
        self._fit()

    def remove(self, execution: Execution) -> bool:
        is_removed = super().remove(execution)
        self._fit()
        return is_removed

    def _fit(self) -> None:
        """Have a session for each execution, and some to spare."""
        busy = sum(bool(child.sent) for child in self.children.values())
        size = self._warm + busy + len(self.waiting)
        if size != self.size:
            self.resize(size)

    def _release(self, child: Child) -> None:
        super()._release(child)
        self._fit()

    def child_retired(self, slot: Slot) -> None:
        super().child_retired(slot)
        self._fit()

    # --- the end -------------------------------------------------------------------------------

    def _on_message(self, child: Child, execution: Execution, message: Message) -> bool | None:
        if isinstance(message, Ack):
            _code_of(execution).started_at = message.accepted_at
        return super()._on_message(child, execution, message)

    def _finish(self, child: Child, execution: Execution, end: Terminal) -> None:
        if isinstance(end, Result) or (isinstance(end, Error) and end.kind in _OF_THE_CODE):
            self._forget(child, execution)
            try:
                self._ends.end(execution, end)
            finally:
                self._release(child)
                self.dispatch()
        else:
            super()._finish(child, execution, end)
