"""A person at a terminal, by prompt_toolkit: one prompt that stays below what is shown."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from capsule_tasks.sessions.console.blocks import is_complete
from capsule_tasks.sessions.console.frontend import (
    ANSWER_PROMPT,
    FIRST_PROMPT,
    NEXT_PROMPT,
    Frontend,
)

_MAX_OPEN_LINE = 4096
"""Longer output without a line break is shown in several lines."""


class Terminal(Frontend):
    """The prompt stays on the screen while code runs, behind the line that code has not ended.

    So what is typed meanwhile is edited in peace: it is a command, an answer, or waits for its
    turn. A line gets its place in the transcript when it is taken.
    """

    def __init__(self, on_command: Callable[[str], bool]) -> None:
        super().__init__()
        self.is_interactive = True
        self._on_command = on_command
        self._asking_with: str | None = None  # the prompt of `next_line` while it waits
        self._open_line = ""
        self._is_password = False
        self._prompt = PromptSession[str](
            self._message,
            multiline=True,
            prompt_continuation=NEXT_PROMPT,
            is_password=Condition(lambda: self._is_password),
            key_bindings=self._key_bindings(),
            enable_suspend=True,
            erase_when_done=True,
            reserve_space_for_menu=0,
        )
        self._editing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._editing = asyncio.create_task(self._edit())

    async def close(self) -> None:
        if self._editing is not None:
            if not self._editing.done():
                self._prompt.app.exit(result="")
            await self._editing
        self._start_line()

    async def next_line(self, prompt: str, *, password: bool = False) -> str | None:
        if self._lines.empty() and not self._given_back:
            self._asking_with, self._is_password = prompt, password
            self._prompt.app.invalidate()
        try:
            line = await self._take()
        except asyncio.CancelledError:
            if prompt:
                self._echo(prompt, self._prompt.default_buffer.text)
                self._prompt.default_buffer.reset()
            raise
        finally:
            self._asking_with, self._is_password = None, False
        self._echo(prompt, "" if password else line or "")
        return line

    async def ask(self, prompt: str, *, password: bool) -> str | None:
        self.output("stdout", prompt)
        return await self.next_line(ANSWER_PROMPT, password=password)

    def _echo(self, prompt: str, line: str) -> None:
        """Give a line its place in the transcript."""
        if prompt:
            self._start_line()
        self._put(sys.stdout, f"{prompt}{line}\n")

    def _after_end(self) -> None:
        """Ctrl-D ends one question, and no other."""

    def _start_line(self) -> None:
        if self._open_line:
            self._put(sys.stdout, "\n")

    def _put(self, file: TextIO, text: str) -> None:
        """Write whole lines above the prompt; the rest becomes the beginning of the prompt."""
        if not file.isatty():
            super()._put(file, text)
            return
        whole, end, rest = (self._open_line + text).rpartition("\n")
        is_shown = self._editing is not None and not self._editing.done()
        if not is_shown or len(rest) > _MAX_OPEN_LINE:
            whole, end, rest = f"{whole}{end}{rest}", "\n" if is_shown else "", ""
        # A progress bar writes over its line after each carriage return.
        self._open_line = rest[rest.rfind("\r", 0, len(rest.rstrip("\r"))) + 1 :]
        if self._prompt.app.is_running and whole + end:
            self._prompt.app.renderer.erase()
        super()._put(file, whole + end)
        self._prompt.app.invalidate()

    # --- the prompt ----------------------------------------------------------------------------

    async def _edit(self) -> None:
        try:
            await self._prompt.prompt_async(set_exception_handler=False, handle_sigint=False)
        except EOFError:  # the terminal has gone away
            pass
        finally:
            self._lines.put_nowait(None)

    def _message(self) -> ANSI:
        line_break = "\n" if self._open_line and self._asking_with else ""
        return ANSI(f"{self._open_line}{line_break}{self._asking_with or ''}")

    def _key_bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            text = buffer.text
            if self._asking_with == FIRST_PROMPT and not is_complete(text):
                buffer.newline(copy_margin=False)
                return
            buffer.reset(append_to_history=bool(self._asking_with))  # code; answers are private
            if self._asking_with is None and self._on_command(text):
                return
            self._asking_with = None
            for line in text.split("\n"):
                self._lines.put_nowait(line)

        @bindings.add("tab")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("    ")

        @bindings.add("c-c")
        def _(_event: KeyPressEvent) -> None:
            signal.raise_signal(signal.SIGINT)  # one way for a key and for a signal

        @bindings.add("c-d", filter=Condition(lambda: not self._prompt.default_buffer.text))
        def _(_event: KeyPressEvent) -> None:
            self._lines.put_nowait(None)

        return bindings
