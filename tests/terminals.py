"""Programs at a real terminal, for tests that type and read like a person."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pyte

from tests.sessions import HANG_S

CONSOLE = [sys.executable, "-m", "capsule_tasks.sessions"]
ROOT = Path(__file__).parent.parent
CTRL_C, CTRL_D = "\x03", "\x04"

# A session leader that opens a terminal gets it as its own, so that Ctrl-C reaches the program.
_TAKE_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


ROWS, COLUMNS = 300, 120
"""Enough rows that nothing scrolls out of a test's sight."""


class Terminal:
    """A program on a pseudo-terminal of its own, and the screen that it draws."""

    def __init__(self, command: list[str] = CONSOLE, term: str = "xterm") -> None:
        self._ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ | {"TERM": term},
            start_new_session=True,
        )
        os.close(theirs)
        self._screen = _AnsweringScreen(self.type)
        self._stream = pyte.ByteStream(self._screen)
        self._unread = ""
        self.transcript = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, wanted: str) -> str:
        """Read until `wanted` has been written; what was written before it since the last call."""
        self._read_until(lambda: wanted in self._unread, wanted)
        before, _, self._unread = self._unread.partition(wanted)
        return before

    @property
    def rows(self) -> list[str]:
        """The screen, down to the cursor."""
        return [row.rstrip() for row in self._screen.display[: self._screen.cursor.y + 1]]

    def shows(self, pattern: str) -> None:
        """Read until one row of the screen is `pattern`."""
        row = re.compile(pattern)
        self._read_until(lambda: any(map(row.fullmatch, self.rows)), pattern)

    def at_prompt(self) -> int:
        """Read until the console waits for code; the row of its prompt."""
        cursor = self._screen.cursor
        self._read_until(lambda: self.rows[-1] == ">>>" and cursor.x == 4, "an empty prompt")
        return cursor.y

    def run(self, line: str) -> list[str]:
        """Type a line at the prompt; the rows between its echo and the next prompt.

        The echo is looked for, as the prompt may be drawn once more, one row further down.
        """
        before = self.at_prompt()
        self.type(f"{line}\r")
        echo = f">>> {line}".rstrip()
        self._read_until(lambda: echo in self.rows[before:-1], line)
        after = self.at_prompt()
        return self.rows[self.rows.index(echo, before) + 1 : after]

    def colours(self, row: int) -> set[str]:
        """The colours of the text in a row."""
        return {cell.fg for cell in self._screen.buffer[row].values() if cell.data.strip()}

    def leave(self) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + HANG_S
        while self._read(deadline):
            pass
        return self._process.wait(HANG_S)

    def _read_until(self, is_there: Callable[[], bool], wanted: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not is_there():
            if not self._read(deadline):
                shown = "\n".join(self.rows)
                raise AssertionError(f"{wanted!r} was not shown; this was:\n{shown}")

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # how Linux says that the other side is closed
                data = os.read(self._ours, 65536)
        self._stream.feed(data)
        text = data.decode(errors="replace").replace("\r\n", "\n")
        self._unread += text
        self.transcript += text
        return bool(data)


class _AnsweringScreen(pyte.Screen):
    """Tells the program where the cursor is, as terminals do."""

    def __init__(self, answer: Callable[[str], None]) -> None:
        super().__init__(COLUMNS, ROWS)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)
