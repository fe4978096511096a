"""A person's end of a session: what they see and what they type, on a terminal or through pipes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import termios
import threading
from collections import deque
from typing import Any

from capsule_tasks.protocol.messages import Stream

_STDIN = 0
_READ_BYTES = 64 * 1024
_LOCAL_FLAGS = 3
_RED, _DIM, _PLAIN = "\x1b[31m", "\x1b[2m", "\x1b[0m"


class Screen:
    """Standard output and standard error; coloured where they are a terminal, and only there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._is_terminal = {name: file.isatty() for name, file in self._streams.items()}
        self.has_open_line = False
        for file in self._streams.values():
            if isinstance(file, io.TextIOWrapper):
                file.reconfigure(errors="backslashreplace")

    def output(self, stream: Stream, text: str) -> None:
        """Show what code wrote, as it is."""
        self._write(stream, text, _RED if stream == "stderr" else "")

    def result(self, text: str, mark: str = "") -> None:
        """Show a value on a line of its own, perhaps with a mark behind it."""
        self.fresh_line()
        self._write("stdout", text)
        self._write("stdout", f"  # {mark}" if mark else "", _DIM)
        self._write("stdout", "\n")

    def answer(self, text: str) -> None:
        """Show what a command found out."""
        self.fresh_line()
        self._write("stdout", f"{text}\n" if text else "")

    def error(self, text: str) -> None:
        """Show what went wrong."""
        self.fresh_line()
        self._write("stderr", f"{text.rstrip()}\n", _RED)

    def note(self, text: str) -> None:
        """Show a remark of the console's own."""
        self.fresh_line()
        self._write("stderr", f"# {text}\n", _DIM)

    def fresh_line(self) -> None:
        """On a terminal, leave the line that something else began."""
        if self.has_open_line:
            self._write("stdout" if self._is_terminal["stdout"] else "stderr", "\n")

    def line_was_ended(self) -> None:
        """The terminal itself has shown a line break: Enter was pressed."""
        self.has_open_line = False

    def _write(self, stream: Stream, text: str, style: str = "") -> None:
        """Write at once, from any thread."""
        if not text:
            return
        with self._lock:
            if self._is_terminal[stream]:
                self.has_open_line = not text.endswith("\n")
                text = f"{style}{text}{_PLAIN}" if style else text
            self._streams[stream].write(text)
            self._streams[stream].flush()


class Keyboard:
    """Lines from standard input.

    At a prompt they come through readline. While code runs the terminal is in its own line mode,
    and `wait` looks at it beside whatever else is waited for: a line may be an answer, a command,
    or typed ahead for the next prompt.
    """

    def __init__(self, screen: Screen) -> None:
        self.is_terminal = os.isatty(_STDIN)
        self._screen = screen
        self._has_editor = self.is_terminal and sys.stdout.isatty()
        self._readline = _load_readline() if self._has_editor else None
        # Text pasted into a prompt reaches us with the line ends of a raw terminal.
        self._separator = re.compile(rb"[\r\n]" if self.is_terminal else rb"\r?\n")
        self._lines: deque[str | None] = deque()
        self._begun = b""
        self._asking_with: str | None = None
        self._mode_before: Any = None

    @property
    def is_asking(self) -> bool:
        """Whether the main thread waits in `prompt`."""
        return self._asking_with is not None

    @property
    def has_line(self) -> bool:
        return bool(self._lines)

    @property
    def first_line(self) -> str | None:
        """The oldest line not taken yet; None stands for the end of input."""
        return self._lines[0]

    def take(self) -> str | None:
        return self._lines.popleft()

    def give_back(self, line: str) -> None:
        """Have the next prompt return this line."""
        self._lines.appendleft(line)

    def prompt(self, text: str) -> str:
        """The next line; EOFError at the end of input, KeyboardInterrupt on Ctrl-C."""
        self._screen.fresh_line()
        self._asking_with = text
        try:
            if self._has_editor and not self._lines:
                return self._edit(text)
            return self._read_line(text)
        except (EOFError, KeyboardInterrupt):
            self._show("\n")
            raise
        finally:
            self._asking_with = None
            self._screen.line_was_ended()

    def show_prompt_again(self) -> None:
        """After lines that were shown below it. From any thread; outside of `prompt`: nothing."""
        if self._asking_with is not None and not self._screen.has_open_line:
            self._show(self._asking_with)

    def wait(self, bell: int, *, listen: bool) -> None:
        """Sleep until `bell` can be read or, if listening, something has been typed."""
        is_at_end = bool(self._lines) and self._lines[-1] is None
        descriptors = [bell, _STDIN] if listen and not is_at_end else [bell]
        if _STDIN in select.select(descriptors, [], [])[0]:
            self._read()

    def hide_typing(self) -> None:
        """Keep the terminal from showing what is typed, until `show_typing`."""
        if self.is_terminal and self._mode_before is None:
            self._mode_before = termios.tcgetattr(_STDIN)
            mode = termios.tcgetattr(_STDIN)
            mode[_LOCAL_FLAGS] &= ~termios.ECHO
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, mode)

    def show_typing(self) -> None:
        mode, self._mode_before = self._mode_before, None
        if mode is not None:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, mode)

    def _edit(self, text: str) -> str:
        begun, self._begun = self._begun.decode(errors="replace"), b""
        if self._readline is None:
            return begun + input(text)
        self._readline.set_startup_hook(lambda: self._readline.insert_text(begun))
        try:
            return input(text)
        finally:
            self._readline.set_startup_hook(None)

    def _read_line(self, text: str) -> str:
        self._show(text)
        was_typed_ahead = self.has_line
        while not self._lines:
            self._read()
        line = self._lines.popleft()
        if line is None:
            raise EOFError
        if was_typed_ahead:
            self._show(f"{line}\n")
        return line

    def _read(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except OSError:
            data = b""  # closed, or the terminal has gone away
        if data:
            *lines, self._begun = self._separator.split(self._begun + data)
            self._lines.extend(line.decode(errors="replace") for line in lines)
            if lines and self.is_terminal and self._mode_before is None:
                self._screen.line_was_ended()
        elif self._begun:
            self._lines.append(self._begun.decode(errors="replace"))
            self._begun = b""
        else:
            self._lines.append(None)

    def _show(self, text: str) -> None:
        if self.is_terminal:
            sys.stderr.write(text)
            sys.stderr.flush()


def _load_readline() -> Any:
    """The line editor and its history, where Python was built with one."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: PLC0415 - it takes over the terminal

        readline.parse_and_bind("tab: tab-insert")
        return readline
    return None
