"""Lines in, text out: through pipes here, at a terminal in `terminal`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from capsule_tasks.protocol.messages import Stream

FIRST_PROMPT, NEXT_PROMPT, ANSWER_PROMPT = ">>> ", "... ", ""
_MAX_LINES_READ_AHEAD = 100
_STDIN = 0
_LOCAL_FLAGS = 3
_RED, _DIM, _PLAIN = "\x1b[31m", "\x1b[2m", "\x1b[0m"


class Frontend:
    """Reads from pipes, or from a terminal that cannot be drawn on; writes text as it comes."""

    def __init__(self) -> None:
        self.is_interactive = os.isatty(_STDIN)
        self._lines = asyncio.Queue[str | None]()
        self._read_ahead = threading.Semaphore(_MAX_LINES_READ_AHEAD)
        self._given_back: list[str] = []
        for file in (sys.stdout, sys.stderr):
            if isinstance(file, io.TextIOWrapper):
                file.reconfigure(errors="backslashreplace")

    def start(self) -> None:
        """Begin to read lines."""
        # Not a thread of the event loop's executor: the loop would wait for it at the end.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_stdin, args=[loop], daemon=True).start()

    async def close(self) -> None:
        """Leave standard input and output as they were."""

    async def next_line(self, prompt: str) -> str | None:
        """The next line, None at the end of input."""
        if self.is_interactive:
            self._put(sys.stderr, prompt)
        return await self._take()

    async def ask(self, prompt: str, *, password: bool) -> str | None:
        """The answer to a question of the code, None at the end of input."""
        # Hidden before the question is shown, which the person may answer at once.
        with _hidden_typing() if password and self.is_interactive else contextlib.nullcontext():
            self.output("stdout", prompt)
            return await self.next_line(ANSWER_PROMPT)

    def restore_line(self, line: str) -> None:
        """Have `next_line` return this line again."""
        self._given_back.append(line)

    def output(self, stream: Stream, text: str) -> None:
        """Show what code wrote, as it is."""
        file, style = (sys.stdout, "") if stream == "stdout" else (sys.stderr, _RED)
        self._write(file, text, style)

    def answer(self, text: str, mark: str = "") -> None:
        """Show a value or what a command found out, with a mark behind it."""
        self._start_line()
        self._write(sys.stdout, text)
        self._write(sys.stdout, f"  # {mark}" if mark else "", _DIM)
        self._write(sys.stdout, "\n" if text else "")

    def error(self, text: str) -> None:
        """Show what went wrong."""
        self._start_line()
        self._write(sys.stderr, f"{text.rstrip()}\n", _RED)

    def note(self, text: str) -> None:
        """Show a remark of the console's own."""
        self._start_line()
        self._write(sys.stderr, f"# {text}\n", _DIM)

    async def _take(self) -> str | None:
        if self._given_back:
            return self._given_back.pop()
        line = await self._lines.get()
        self._read_ahead.release()
        if line is None:
            self._after_end()
        return line

    def _after_end(self) -> None:
        self._lines.put_nowait(None)  # nothing follows the end of a pipe

    def _read_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            # Not sys.stdin, for whose lock the interpreter would wait at exit.
            with (
                contextlib.suppress(OSError),  # it is closed, or the terminal has gone away
                open(_STDIN, encoding="utf-8", errors="replace", closefd=False) as stdin,
            ):
                for line in stdin:
                    self._read_ahead.acquire()
                    loop.call_soon_threadsafe(self._lines.put_nowait, line.removesuffix("\n"))
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _start_line(self) -> None:
        """Leave the line that something else began."""

    def _write(self, file: TextIO, text: str, style: str = "") -> None:
        if style and file.isatty():
            text = re.sub("(.+)", rf"{style}\1{_PLAIN}", text)
        self._put(file, text)

    def _put(self, file: TextIO, text: str) -> None:
        file.write(text)
        file.flush()


def make_frontend(on_command: Callable[[str], bool]) -> Frontend:
    """Make the frontend for standard input and output.

    A terminal that can be drawn on gives `on_command` the lines that are typed while code runs; it
    returns whether a line was a command that has been obeyed.
    """
    is_terminal = os.isatty(_STDIN) and sys.stdout.isatty()
    if not is_terminal or os.environ.get("TERM") in ("dumb", "unknown"):
        return Frontend()
    try:
        from capsule_tasks.sessions.console.terminal import Terminal  # noqa: PLC0415 - an extra
    except ImportError:
        sys.exit("the console needs prompt_toolkit: pip install 'capsule-tasks[console]'")
    return Terminal(on_command)


@contextlib.contextmanager
def _hidden_typing() -> Iterator[None]:
    """Keep the terminal from showing what is typed."""
    mode = termios.tcgetattr(_STDIN)
    hidden = [*mode[:_LOCAL_FLAGS], mode[_LOCAL_FLAGS] & ~termios.ECHO, *mode[_LOCAL_FLAGS + 1 :]]
    termios.tcsetattr(_STDIN, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, mode)
