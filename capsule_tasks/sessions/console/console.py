"""Prompt, run, show, until the person leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import TypeVar

from capsule_tasks.errors import CapsuleError, SessionStateError
from capsule_tasks.sessions.console.blocks import Block
from capsule_tasks.sessions.console.commands import Leave, parse
from capsule_tasks.sessions.console.foreground import Foreground
from capsule_tasks.sessions.console.frontend import FIRST_PROMPT, NEXT_PROMPT, make_frontend
from capsule_tasks.sessions.console.target import Target

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
T = TypeVar("T")


class Console:
    """A prompt on a terminal, a filter in a pipe; one event loop for input and target."""

    def __init__(self, target: Target) -> None:
        self._frontend = make_frontend(self._on_command)
        self._target = target
        self._interrupt: Callable[[], object] = lambda: None  # what Ctrl-C does now
        self._is_idle = True
        self._tasks: set[asyncio.Task[object]] = set()

    def main(self) -> int:
        """Serve the person to the end; the exit status."""
        # The console shows what the package would log.
        logging.getLogger("capsule_tasks").addHandler(logging.NullHandler())
        return asyncio.run(self._main())

    async def _main(self) -> int:
        # Also where SIGINT was ignored at the start, as in a script's `console &`.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        try:
            await self._interruptible(self._start())
            return await self._serve()
        except CapsuleError as error:
            self._frontend.error(_in_full(error))
            return EXIT_FAILED
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED
        finally:
            await self._stop()

    def _on_interrupt(self) -> None:
        self._interrupt()

    async def _start(self) -> None:
        greeting = await self._target.start(self._frontend, lambda: self._is_idle)
        if self._frontend.is_interactive:
            ways_out = "Ctrl-C stops what runs, Ctrl-D leaves, :help tells the rest."
            self._frontend.answer(f"{greeting}\n{ways_out}")
        self._frontend.start()

    async def _serve(self) -> int:
        is_well = True
        with contextlib.suppress(Leave):
            while True:
                try:
                    block = await self._interruptible(self._read_block())
                    if block.strip():
                        self._is_idle = False
                        work = self._obey(block) if block.startswith(":") else self._execute(block)
                        is_well = await self._interruptible(self._attempt(work))
                except asyncio.CancelledError:
                    if not self._frontend.is_interactive:
                        raise
                finally:
                    self._is_idle = True
        return 0 if is_well or self._frontend.is_interactive else EXIT_FAILED

    async def _stop(self) -> None:
        try:
            await self._interruptible(self._target.stop())
        except asyncio.CancelledError:
            self._interrupt = lambda: None
            await self._target.kill()
        await self._frontend.close()

    async def _interruptible(self, work: Coroutine[object, object, T]) -> T:
        """Do the work as a task, which Ctrl-C cancels."""
        task = asyncio.create_task(work)
        self._interrupt = task.cancel
        return await task

    async def _read_block(self) -> str:
        """The next block or `:command`; Leave at the end of input."""
        block = Block()
        while True:
            line = await self._frontend.next_line(NEXT_PROMPT if block.lines else FIRST_PROMPT)
            if line is None:
                if not block.lines:
                    raise Leave
                return block.source
            state = block.add(line)
            if state == "overrun":
                self._frontend.restore_line(line)
            if state != "incomplete":
                return block.source

    # --- code and commands ---------------------------------------------------------------------

    async def _attempt(self, work: Coroutine[object, object, bool]) -> bool:
        """Whether `work` went well; an error is shown."""
        try:
            return await work
        except BrokenPipeError:
            raise  # no reader is left
        except (CapsuleError, OSError, ValueError) as error:
            self._frontend.error(_in_full(error))
            if isinstance(error, SessionStateError):
                self._frontend.note(":restart starts a new child")
            return False

    async def _execute(self, source: str) -> bool:
        execution = Foreground(self._target, self._frontend)
        running = execution.start(source)
        self._interrupt = execution.cancel
        try:
            return await running
        except asyncio.CancelledError:
            self._frontend.error("cancelled before it started")
            return False

    async def _obey(self, line: str) -> bool:
        _, call = parse(self._target.commands, self._target, line)
        self._frontend.answer(await call())
        return True

    def _on_command(self, line: str) -> bool:
        """Obey a command that was typed while code runs; False for a line that has to wait."""
        if line.startswith(":"):
            try:
                works_now = parse(self._target.commands, self._target, line)[0].works_while_running
            except CapsuleError:
                works_now = True  # its error is shown now
            if works_now:
                self._spawn(self._attempt(self._obey(line)))
                return True
        self._frontend.note(f"waits for the running code, which Ctrl-C stops: {line}")
        return False

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _in_full(error: Exception) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
