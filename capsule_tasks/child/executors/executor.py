"""The base of executors: run code on the main thread, alone or on an event loop, and stop it."""

from __future__ import annotations

import contextlib
import contextvars
import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, PendingStop, Registry, Stage
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.protocol.messages import Message

if TYPE_CHECKING:
    import asyncio


class Executor(msgspec.Struct, eq=False):
    """Runs executions on the main thread. The control thread wakes it, and cancels coroutines."""

    acknowledges: ClassVar = False
    """Whether the executor acknowledges an execution itself, in order with output."""
    ack_delay_s: ClassVar = 0.0
    """How long an acknowledgement may wait for the end, so that the parent wakes up once."""

    registry: Registry
    outbox: Outbox
    end_reporter: EndReporter
    capture: Capture
    interrupter: Interrupter
    context: contextvars.Context = msgspec.field(default_factory=contextvars.copy_context)
    wakeups: SimpleQueue[None] = msgspec.field(default_factory=SimpleQueue)
    """For the main thread while there is no event loop."""
    loop: asyncio.AbstractEventLoop | None = None
    by_task: dict[Any, Execution] = {}
    alone: Execution | None = None
    """The execution that has the main thread to itself."""
    is_stopping: bool = False
    pid: int = msgspec.field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._close_selector)

    def current(self) -> Execution | None:
        """The execution whose code the main thread is in. Called by the signal handler."""
        if self.alone is not None or self.loop is None:
            return self.alone
        import asyncio  # imported already, as there is a loop

        return self.by_task.get(asyncio.current_task(self.loop))

    def wake(self) -> None:
        """Have waiting executions started. From the control thread.

        A loop that is made between the read of `loop` and the `put` serves the new execution
        without this: it was registered before, and its maker checks the registry again.
        """
        loop = self.loop
        if loop is None:
            self.wakeups.put(None)
        else:
            loop.call_soon_threadsafe(self._serve)

    def stop(self) -> None:
        """Leave `run` as soon as the running code has ended."""
        self.is_stopping = True
        self.wake()

    def cancel_task(self, execution: Execution, stop: PendingStop) -> bool:
        """Cancel a coroutine on its loop, if `stop` then makes an error; False if it is not one."""
        if not self._is_coroutine(execution):
            return False
        execution.pending_stops.append(stop)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._apply_stops, execution)
        return True

    def soft_limit(self) -> BaseException:
        """The exception that a soft time limit raises."""
        return TimeoutError("the soft time limit has passed")

    def run(self) -> None:
        """Serve on the main thread until stopped."""
        raise NotImplementedError

    def _serve(self) -> None:
        """Start what may start now, in the order of arrival."""
        raise NotImplementedError

    def _run(self, execution: Execution) -> Message:
        """Run user code; the message that ends the execution."""
        raise NotImplementedError

    def _is_coroutine(self, _execution: Execution) -> bool:
        return False

    def _run_described(self, execution: Execution) -> Message:
        """The message that ends the execution: its result, or the exception that it raised."""
        self.capture.enter(execution.sink)
        try:
            return self._run(execution)
        except BaseException as error:
            return self.end_reporter.describe_error(execution, error)

    def _run_alone(self, execution: Execution, context: contextvars.Context) -> Message:
        self.alone = execution
        try:
            return context.run(self._run_described, execution)
        finally:
            self.alone = None
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
        self.by_task[task] = execution
        self._apply_stops(execution)  # those that came before there was a task

    def _apply_stops(self, execution: Execution) -> None:
        task = execution.task
        while task is not None and execution.pending_stops:
            error = execution.pending_stops.pop(0)()
            if error is not None and execution.stage is Stage.RUNNING:
                execution.cancelled_for = error
                task.cancel()

    def _exit_if_forked(self) -> None:
        """End a copy of this process that user code forked: it must not answer the parent."""
        if os.getpid() != self.pid:
            os._exit(0)

    def _close_selector(self) -> None:
        """End the loop of a forked copy, which shares our selector and would take our wake-ups."""
        if self.loop is not None:
            self.loop._selector.close()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
