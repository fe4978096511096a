"""The base of executors: run code on the main thread, alone or on an event loop, and stop it."""

from __future__ import annotations

import contextlib
import contextvars
import os
from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, PendingStop, Registry, Stage
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.protocol.messages import Message

if TYPE_CHECKING:
    import asyncio


class Executor(ABC):
    """Runs executions on the main thread. The control thread wakes it, and cancels coroutines."""

    acknowledges = False
    """Whether the executor acknowledges an execution itself, in order with output."""
    ack_delay_s = 0.0
    """How long an acknowledgement may wait for the end, so that the parent wakes up once."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        end_reporter: EndReporter,
        capture: Capture,
        interrupter: Interrupter,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._end_reporter = end_reporter
        self._capture = capture
        self._interrupter = interrupter
        self._context = contextvars.copy_context()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        """For the main thread while there is no event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._by_task: dict[Any, Execution] = {}
        self._alone: Execution | None = None
        """The execution that has the main thread to itself."""
        self._stopping = False
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._close_selector)

    def current(self) -> Execution | None:
        """The execution whose code the main thread is in. Called by the signal handler."""
        if self._alone is not None or self._loop is None:
            return self._alone
        import asyncio  # imported already, as there is a loop

        return self._by_task.get(asyncio.current_task(self._loop))

    def wake(self) -> None:
        """Have waiting executions started. From the control thread.

        A loop that is made between the read of `_loop` and the `put` serves the new execution
        without this: it was registered before, and its maker checks the registry again.
        """
        loop = self._loop
        if loop is None:
            self._wakeups.put(None)
        else:
            loop.call_soon_threadsafe(self._serve)

    def stop(self) -> None:
        """Leave `run` as soon as the running code has ended."""
        self._stopping = True
        self.wake()

    def cancel_task(self, execution: Execution, stop: PendingStop) -> bool:
        """Cancel a coroutine on its loop, if `stop` then makes an error; False if it is not one."""
        if not self._is_coroutine(execution):
            return False
        execution.pending_stops.append(stop)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._apply_stops, execution)
        return True

    @abstractmethod
    def soft_limit(self) -> BaseException:
        """The exception that a soft time limit raises."""

    @abstractmethod
    def run(self) -> None:
        """Serve on the main thread until stopped."""

    @abstractmethod
    def _serve(self) -> None:
        """Start what may start now, in the order of arrival."""

    @abstractmethod
    def _run(self, execution: Execution) -> Message:
        """Run user code; the message that ends the execution."""

    def _is_coroutine(self, _execution: Execution) -> bool:
        return False

    def _run_described(self, execution: Execution) -> Message:
        """The message that ends the execution: its result, or the exception that it raised."""
        self._capture.enter(execution.sink)
        try:
            return self._run(execution)
        except BaseException as error:
            return self._end_reporter.describe_error(execution, error)

    def _run_alone(self, execution: Execution, context: contextvars.Context) -> Message:
        self._alone = execution
        try:
            return context.run(self._run_described, execution)
        finally:
            self._alone = None
            self._exit_if_forked()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            # Raised in a task of the user's own these stop the loop; asyncio stores them in the
            # task, too.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()
        finally:
            self._exit_if_forked()

    def _add_task(self, execution: Execution, task: asyncio.Task[Any]) -> None:
        execution.task = task
        self._by_task[task] = execution

    def _apply_stops(self, execution: Execution) -> None:
        task = execution.task
        while task is not None and execution.pending_stops:
            error = execution.pending_stops.pop(0)()
            if error is not None and execution.stage is Stage.RUNNING:
                execution.cancelled_for = error
                task.cancel()

    def _exit_if_forked(self) -> None:
        """End a copy of this process that user code forked: it must not answer the parent."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _close_selector(self) -> None:
        """End the loop of a forked copy, which shares our selector and would take our wake-ups."""
        if self._loop is not None:
            self._loop._selector.close()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
