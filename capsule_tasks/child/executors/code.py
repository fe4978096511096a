"""The main thread of a child that runs source code: one blocking cell, or many coroutines.

A cell is compiled as in a REPL: statements, and the value of the last expression.
"""

from __future__ import annotations
import __future__

import _ast
import builtins
import contextvars
import functools
import io
import linecache
from collections import OrderedDict
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.executors.outcomes import enter_result
from capsule_tasks.child.registry import Execution, Stage
from capsule_tasks.protocol import messages
from capsule_tasks.protocol.messages import Checkpoint, ErrorKind, Execute, Restore
from capsule_tasks.protocol.namespaces import piece_bytes

if TYPE_CHECKING:
    import asyncio


CO_COROUTINE = 0x80
_MAX_SOURCES = 1000
_MAX_SOURCE_CHARS = 16 * 1024 * 1024
_FUTURES = [getattr(__future__, name) for name in __future__.all_feature_names]


class Cell(NamedTuple):
    """Compiled source: statements, then perhaps one expression that is its value."""

    body: CodeType | None
    tail: CodeType | None

    @property
    def awaits(self) -> bool:
        """Whether it has `await` at its top level, and so needs an event loop."""
        return any(code.co_flags & CO_COROUTINE for code in self if code)


class Compiler(msgspec.Struct, eq=False):
    """Compiles cells; remembers `from __future__` imports, and sources for tracebacks."""

    flags: int = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    sources: OrderedDict[str, int] = msgspec.field(default_factory=OrderedDict)
    chars: int = 0

    def compile(self, source: str, filename: str) -> Cell:
        self._remember(source, filename)
        tree: Any = self._run(source, filename, "exec", _ast.PyCF_ONLY_AST)
        value = tree.body[-1].value if tree.body and type(tree.body[-1]) is _ast.Expr else None
        if value is not None:
            tree.body.pop()
        body = self._run(tree, filename, "exec") if tree.body else None
        if body is not None:
            for feature in _FUTURES:
                self.flags |= body.co_flags & feature.compiler_flag
        tail = None
        if value is not None:
            tail = self._run(_ast.Expression(body=value), filename, "eval")
        return Cell(body, tail)

    def _run(self, source: Any, filename: str, mode: str, extra: int = 0) -> Any:
        return compile(source, filename, mode, flags=self.flags | extra, dont_inherit=True)

    def _remember(self, source: str, filename: str) -> None:
        lines = io.StringIO(source, newline=None).readlines()  # ends as the compiler sees them
        linecache.cache[filename] = (len(source), None, lines, filename)
        self.chars += len(source) - self.sources.pop(filename, 0)
        self.sources[filename] = len(source)
        while len(self.sources) > _MAX_SOURCES or self.chars > _MAX_SOURCE_CHARS:
            if len(self.sources) == 1:
                break
            oldest, size = self.sources.popitem(last=False)
            self.chars -= size
            linecache.cache.pop(oldest, None)


def fresh_main() -> ModuleType:
    """A new `__main__`: the namespace of a session."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    return module


def enter_blocking(cell: Cell, namespace: dict[str, Any]) -> object:
    """Run a blocking cell. The interrupter stops code only below this frame."""
    if cell.body is not None:
        exec(cell.body, namespace)
    if cell.tail is None:
        return None
    return eval(cell.tail, namespace)


async def enter_coroutine(cell: Cell, namespace: dict[str, Any]) -> object:
    """Run a cell that awaits. The interrupter stops code only below this frame."""
    for code in cell:
        if code is None:
            continue
        value = eval(code, namespace)
        if code.co_flags & CO_COROUTINE:
            value = await value
    return value if cell.tail is not None else None


class CodeExecutor(Executor, kw_only=True):
    """Takes waiting executions in order, and runs them.

    The event loop is made for the first execution that needs one. From then on the thread idles
    inside the loop, so that tasks that user code left running go on. Blocking code always runs
    outside of the loop.
    """

    module: ModuleType
    async_limit: int
    compiler: Compiler = msgspec.field(default_factory=Compiler)
    next_alone: Execution | None = None

    def run(self) -> None:
        while not self.is_stopping or self.by_task:  # their `finally` blocks need the loop
            if self.loop is None:
                self.wakeups.get()
                self._serve()
            else:
                self._run_loop(self.loop)
            while self.next_alone is not None:
                execution, self.next_alone = self.next_alone, None
                self._run_blocking(execution)
                self._serve()

    def _is_coroutine(self, execution: Execution) -> bool:
        return execution.cell is not None and execution.cell.awaits

    def _serve(self) -> None:
        if self.is_stopping and self.loop is not None:
            self.loop.stop()
        while not self.is_stopping and self.next_alone is None:
            execution = self.registry.first_waiting()
            if execution is None:
                return
            try:
                awaits = self._awaits(execution)
            except BaseException as error:
                if self.registry.start(execution):
                    self._end_with_error(execution, error)
                continue
            obstacle = self._obstacle(awaits=awaits)
            if obstacle and execution.may_wait:
                self._refuse(self.registry.refusing_to_wait(), obstacle)  # they are behind it
                return  # the end of a coroutine calls this again
            if obstacle:
                self._refuse([execution], obstacle)
            elif awaits:
                self._start_coroutine(execution)
            else:
                self.next_alone = execution
                if self.loop is not None:
                    self.loop.stop()

    def _refuse(self, executions: list[Execution], obstacle: str) -> None:
        for execution in executions:
            self.end_reporter.refuse(execution, ErrorKind.BUSY, obstacle)

    def _obstacle(self, *, awaits: bool) -> str:
        """Why the next execution cannot start now; empty if it can."""
        if not awaits:
            return "coroutines are running" if self.by_task else ""
        is_full = len(self.by_task) >= self.async_limit
        return f"{self.async_limit} coroutines are running already" if is_full else ""

    def _awaits(self, execution: Execution) -> bool:
        work = execution.work
        if not isinstance(work, Execute):
            return False
        if not isinstance(work.payload, messages.Code):
            raise TypeError("this session runs source code, not Celery tasks")
        if execution.cell is None:
            filename = work.payload.filename or f"<cell {work.seq}>"
            execution.cell = contextvars.copy_context().run(
                self._compile, execution, work.payload.source, filename
            )
        return execution.cell.awaits

    def _compile(self, execution: Execution, source: str, filename: str) -> Cell:
        self.capture.enter(execution.sink)  # warnings of the compiler are output of the execution
        return self.compiler.compile(source, filename)

    def _start(self, execution: Execution) -> bool:
        """Make the execution a running one; False if it was stopped before."""
        started = self.registry.start(execution)
        if started and execution.queued:
            self.outbox.control(messages.Started(execution_id=execution.id, seq=execution.seq))
        return started

    def _run_blocking(self, execution: Execution) -> None:
        if not self._start(execution):
            return
        if isinstance(execution.work, Execute):
            refused = self.registry.claim_main_thread(execution)
            self._refuse(refused, f"{execution.id} is running")
        self.end_reporter.finish(execution, self._run_alone(execution, self.context))

    def _run(self, execution: Execution) -> messages.Message:
        work, namespace = execution.work, self.module.__dict__
        if isinstance(work, Checkpoint):
            from capsule_tasks.child.checkpoints.saving import enter_save

            size, names, skipped, python, packages = enter_save(
                namespace,
                functools.partial(self._send_piece, work.id),
                piece_bytes(self.outbox.ceiling),
                work.max_bytes,
            )
            return messages.Checkpointed(
                in_reply_to=work.id,
                size=size,
                saved=names,
                skipped=skipped,
                python=python,
                packages=packages,
            )
        if isinstance(work, Restore):
            from capsule_tasks.child.checkpoints.index import NotSaved
            from capsule_tasks.child.checkpoints.restoring import enter_restore

            pieces, execution.pieces = execution.pieces, []
            if (arrived := sum(map(len, pieces))) != work.size:
                raise NotSaved(f"{arrived} of {work.size} bytes arrived")
            names, lost, differences = enter_restore(pieces, work.mode, self.module)
            return messages.Restored(
                in_reply_to=work.id, names=names, lost=lost, differences=differences
            )
        assert execution.cell is not None
        return self._result(execution, enter_blocking(execution.cell, namespace))

    def _send_piece(self, checkpoint_id: str, offset: int, data: memoryview) -> None:
        self.outbox.bulk(
            messages.CheckpointPiece(checkpoint_id=checkpoint_id, offset=offset, data=bytes(data))
        )

    def _result(self, execution: Execution, value: object) -> messages.Message:
        if value is not None:
            self.module.__dict__["_"] = value
        return enter_result(execution.id, value)

    def _start_coroutine(self, execution: Execution) -> None:
        import asyncio

        if not self._start(execution):
            return
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        context = self.context.copy()
        context.run(self.capture.enter, execution.sink)
        task = self.loop.create_task(
            self._run_coroutine(execution), name=f"execution {execution.id}", context=context
        )
        task.add_done_callback(self._coroutine_ended)
        self._add_task(execution, task)

    async def _run_coroutine(self, execution: Execution) -> None:
        assert execution.cell is not None
        try:
            value = await enter_coroutine(execution.cell, self.module.__dict__)
            message = self._result(execution, value)
        except BaseException as error:
            message = self.end_reporter.describe_error(execution, _cause(execution, error))
        self._exit_if_forked()
        await self._drain(execution)
        # Before the parent receives the end, as new work may then count the running coroutines.
        self.by_task.pop(execution.task, None)
        self.end_reporter.deliver(execution, message, Stage.RUNNING)

    async def _drain(self, execution: Execution) -> None:
        """Wait for the consumer without blocking the other coroutines."""
        import asyncio

        loop, credit = asyncio.get_running_loop(), asyncio.Event()

        def on_credit() -> None:
            loop.call_soon_threadsafe(credit.set)

        execution.sink.on_credit = on_credit
        while not execution.sink.try_finish():
            try:
                await credit.wait()
            except asyncio.CancelledError:
                continue  # the code has ended already, so there is nothing to stop
            credit.clear()
        execution.sink.on_credit = None

    def _coroutine_ended(self, task: asyncio.Task[None]) -> None:
        execution = self.by_task.pop(task, None)
        if execution is not None and execution.stage is Stage.RUNNING:
            # Else `_run_coroutine` came to its end. It may have raised, or have been cancelled
            # before its first step.
            error = None if task.cancelled() else task.exception()
            error = error or execution.cancelled_for or KeyboardInterrupt()
            self._end_with_error(execution, error)
        self._serve()

    def _end_with_error(self, execution: Execution, error: BaseException) -> None:
        message = self.end_reporter.describe_error(execution, error)
        self.end_reporter.finish(execution, message)


def _cause(execution: Execution, error: BaseException) -> BaseException:
    """The exception for which a task was cancelled, with the traceback of the cancellation."""
    meant = execution.cancelled_for
    if meant is None or type(error).__name__ != "CancelledError":
        return error
    return meant.with_traceback(error.__traceback__)
