"""Programs at a real terminal, for tests that type and read like a person."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

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


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, command: list[str] = CONSOLE) -> None:
        self._ours, theirs = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
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

    def type_at_rest(self, text: str) -> None:
        """Type when the program waits: readline misses a Ctrl-C while it handles another key."""
        state = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + HANG_S
        seen_asleep = 0
        while seen_asleep < 5 and time.monotonic() < deadline:
            time.sleep(0.002)
            is_asleep = state.read_text().rpartition(")")[2].split()[0] == "S"
            seen_asleep = seen_asleep + 1 if is_asleep else 0
        self.type(text)

    def until(self, wanted: str) -> str:
        """Read until `wanted` has been shown; what was shown before it since the last call."""
        deadline = time.monotonic() + HANG_S
        while wanted not in self._unread:
            if not self._read(deadline):
                raise AssertionError(f"{wanted!r} was not shown; this was:\n{self.transcript}")
        before, _, self._unread = self._unread.partition(wanted)
        return before

    def run(self, line: str) -> str:
        """Type a line at the prompt; what is shown from its echo to the next prompt."""
        self.type(f"{line}\n")
        self.until(f"{line}\n")
        return self.until(">>> ")

    def leave(self) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + HANG_S
        while self._read(deadline):
            pass
        return self._process.wait(HANG_S)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # how Linux says that the other side is closed
                data = os.read(self._ours, 65536)
        text = data.decode().replace("\r\n", "\n")
        self._unread += text
        self.transcript += text
        return bool(data)


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)
