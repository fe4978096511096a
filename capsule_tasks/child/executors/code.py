"""The life of the main thread: one blocking execution at a time, or many coroutines at once."""

from __future__ import annotations

import contextlib
import contextvars
import os
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from capsule_tasks.child.executors.cells import Cell, Compiler, enter_blocking, enter_coroutine
from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.outcomes import enter_result
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Hit, Registry, Stage
from capsule_tasks.protocol.messages import (
    Checkpoint,
    Checkpointed,
    Code,
    ErrorKind,
    Execute,
    Message,
    Restore,
    Restored,
    Started,
)

if TYPE_CHECKING:
    import asyncio


class Lane(Protocol):
    """What runs executions on the main thread; the control thread tells it what to do."""

    acknowledges: bool
    """Whether it says itself, in order with output, when an execution begins."""
    ack_delay_s: float
    """How long it may wait with that, so that a short execution is one message for the parent."""

    def current(self) -> Execution | None:
        """The execution whose code the main thread is in. For the signal handler."""

    def ring(self) -> None:
        """Something is waiting. From the control thread."""

    def stop(self) -> None:
        """Leave `run` as soon as the running code lets go."""

    def cancel_task(self, execution: Execution, hit: Hit) -> bool:
        """Cancel a coroutine on its loop, if `hit` then still wants it; False if it is not one."""

    def soft_limit(self) -> BaseException:
        """What a soft time limit raises in this lane."""

    def run(self) -> None:
        """Serve on the main thread until stopped."""


class CodeExecutor:
    """Takes what is waiting, in order, and runs it.

    The event loop exists from the first execution that needs one; from then on the thread idles
    inside it, so that tasks a user left running go on. Blocking code always runs outside of it.
    """

    acknowledges = False
    ack_delay_s = 0.0

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        endings: EndReporter,
        capture: Capture,
        module: ModuleType,
        async_limit: int,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._endings = endings
        self._capture = capture
        self._module = module
        self._async_limit = async_limit
        self._compiler = Compiler()
        self._context = contextvars.copy_context()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._by_task: dict[Any, Execution] = {}
        self._alone: Execution | None = None
        self._current: Execution | None = None
        self._stopping = False
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._stop_listening)

    def current(self) -> Execution | None:
        """The execution whose code the main thread is in. For the signal handler."""
        if self._current is not None or self._loop is None:
            return self._current
        import asyncio

        task = asyncio.current_task(self._loop)
        return self._by_task.get(task)

    def ring(self) -> None:
        """Something is waiting. From the control thread."""
        self._bell.put(None)
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._on_bell)

    def stop(self) -> None:
        """Leave `run` as soon as the running code lets go."""
        self._stopping = True
        self.ring()

    def cancel_task(self, execution: Execution, hit: Hit) -> bool:
        """Cancel a coroutine on its loop, if `hit` then still wants it; False if it is not one."""
        if execution.cell is None or not execution.cell.awaits:
            return False
        execution.hits.append(hit)
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._take_hits, execution)
        return True

    def _take_hits(self, execution: Execution) -> None:
        task = execution.task
        while task is not None and execution.hits:
            error = execution.hits.pop(0)()
            if error is not None and execution.stage is Stage.RUNNING:
                execution.cancelled_for = error
                task.cancel()

    def soft_limit(self) -> BaseException:
        return TimeoutError("the soft time limit has passed")

    def run(self) -> None:
        while not self._stopping or self._by_task:  # whose `finally` blocks need the loop
            if self._loop is None:
                self._bell.get()
                self._serve()
            else:
                self._run_loop(self._loop)
            while self._alone is not None:
                execution, self._alone = self._alone, None
                self._run_alone(execution)
                self._serve()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        # Raised in a task of the user's own, these stop the loop; asyncio keeps them in the task.
        try:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()
        finally:
            self._end_if_copied()

    def _end_if_copied(self) -> None:
        """User code forked and did not exit: the copy must not speak for us."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _stop_listening(self) -> None:
        """A forked copy shares our selector and would take our wake-ups: its loop ends instead."""
        if self._loop is not None:
            self._loop._selector.close()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way

    def _on_bell(self) -> None:
        if self._stopping and self._loop is not None:
            self._loop.stop()
        elif self._alone is None:
            self._serve()

    def _serve(self) -> None:
        """Start whatever may start now, in the order of arrival."""
        while not self._stopping and self._alone is None:
            execution = self._registry.first_waiting()
            if execution is None:
                return
            try:
                awaits = self._awaits(execution)
            except BaseException as error:
                if self._registry.start(execution):
                    message = self._endings.describe_error(execution, error)
                    self._endings.finish(execution, message)
                continue
            obstacle = self._obstacle(awaits=awaits)
            if obstacle and execution.may_wait:
                for refused in self._registry.unwilling():  # they would wait behind it
                    self._endings.refuse(refused, ErrorKind.BUSY, obstacle)
                return  # the end of a coroutine serves it
            if obstacle:
                self._endings.refuse(execution, ErrorKind.BUSY, obstacle)
            elif awaits:
                self._start_coroutine(execution)
            else:
                self._alone = execution
                if self._loop is not None:
                    self._loop.stop()

    def _obstacle(self, *, awaits: bool) -> str:
        """Why the next execution cannot begin beside those that run; empty if it can."""
        if not awaits:
            return "coroutines are running" if self._by_task else ""
        is_full = len(self._by_task) >= self._async_limit
        return f"{self._async_limit} coroutines are running already" if is_full else ""

    def _awaits(self, execution: Execution) -> bool:
        work = execution.work
        if not isinstance(work, Execute):
            return False
        if not isinstance(work.payload, Code):
            raise TypeError("this session runs source code, not Celery tasks")
        if execution.cell is None:
            filename = work.payload.filename or f"<cell {work.seq}>"
            execution.cell = contextvars.copy_context().run(
                self._compile, execution, work.payload.source, filename
            )
        return execution.cell.awaits

    def _compile(self, execution: Execution, source: str, filename: str) -> Cell:
        self._capture.enter(execution.sink)  # the compiler may have something to warn of
        return self._compiler.compile(source, filename)

    def _start(self, execution: Execution) -> bool:
        """Make it a running one; False if it was stopped before."""
        started = self._registry.start(execution)
        if started and execution.queued:
            self._outbox.control(Started(execution_id=execution.id, seq=execution.seq))
        return started

    def _run_alone(self, execution: Execution) -> None:
        if not self._start(execution):
            return
        if isinstance(execution.work, Execute):
            for refused in self._registry.claim_main_thread(execution):
                self._endings.refuse(refused, ErrorKind.BUSY, f"{execution.id} is running")
        self._current = execution
        try:
            message = self._context.run(self._conduct, execution)
        finally:
            self._current = None
        self._end_if_copied()
        self._endings.finish(execution, message)

    def _conduct(self, execution: Execution) -> Message:
        self._capture.enter(execution.sink)
        return self._endings.conduct(execution, lambda: self._perform(execution))

    def _perform(self, execution: Execution) -> Message:
        work, namespace = execution.work, self._module.__dict__
        if isinstance(work, Checkpoint):
            from capsule_tasks.child.executors.checkpoints import enter_save

            data, saved, skipped = enter_save(namespace)
            return Checkpointed(in_reply_to=work.id, data=data, saved=tuple(saved), skipped=skipped)
        if isinstance(work, Restore):
            from capsule_tasks.child.executors.checkpoints import enter_restore

            names = enter_restore(work.data, work.mode, self._module)
            return Restored(in_reply_to=work.id, names=tuple(names))
        assert execution.cell is not None
        value = enter_blocking(execution.cell, namespace)
        return self._keep(execution, value)

    def _keep(self, execution: Execution, value: object) -> Message:
        if value is not None:
            self._module.__dict__["_"] = value
        return enter_result(execution.id, value)

    def _start_coroutine(self, execution: Execution) -> None:
        import asyncio

        if not self._start(execution):
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        context = self._context.copy()
        context.run(self._capture.enter, execution.sink)
        task = self._loop.create_task(
            self._live(execution), name=f"execution {execution.id}", context=context
        )
        execution.task = task
        self._by_task[task] = execution
        task.add_done_callback(self._coroutine_ended)
        self._take_hits(execution)  # those that came before there was a task

    async def _live(self, execution: Execution) -> None:
        assert execution.cell is not None
        try:
            value = await enter_coroutine(execution.cell, self._module.__dict__)
            message = self._keep(execution, value)
        except BaseException as error:
            message = self._endings.describe_error(execution, _as_meant(execution, error))
        self._end_if_copied()
        await self._drain(execution)
        self._by_task.pop(execution.task, None)  # before the end is heard and more work arrives
        self._endings.deliver(execution, message, Stage.RUNNING)

    async def _drain(self, execution: Execution) -> None:
        """Wait for the consumer without holding up the neighbours."""
        import asyncio

        loop, credit = asyncio.get_running_loop(), asyncio.Event()

        def on_credit() -> None:
            loop.call_soon_threadsafe(credit.set)

        execution.sink.on_credit = on_credit
        while not execution.sink.try_finish():
            try:
                await credit.wait()
            except asyncio.CancelledError:
                continue  # it is over already; the cancel finds nothing to stop
            credit.clear()
        execution.sink.on_credit = None

    def _coroutine_ended(self, task: asyncio.Task[None]) -> None:
        execution = self._by_task.pop(task, None)
        if execution is None:
            pass  # it came to its end in order
        elif not task.cancelled() and task.exception() is not None:
            self._recover(execution, task.exception())
        elif execution.stage is Stage.RUNNING:  # cancelled before its first step
            self._recover(execution, execution.cancelled_for)
        self._on_bell()

    def _recover(self, execution: Execution, error: BaseException | None) -> None:
        if execution.stage is Stage.RUNNING:
            error = error or KeyboardInterrupt()
            self._endings.finish(execution, self._endings.describe_error(execution, error))


def _as_meant(execution: Execution, error: BaseException) -> BaseException:
    """What a cancelled task was cancelled for, with the place where that found it."""
    meant = execution.cancelled_for
    if meant is None or type(error).__name__ != "CancelledError":
        return error
    return meant.with_traceback(error.__traceback__)
