"""The main thread's side: prompt, run, show, until the person leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

import capsule_tasks
from capsule_tasks.errors import CapsuleError, SessionLost, SessionStateError
from capsule_tasks.sessions.console.background import Background
from capsule_tasks.sessions.console.blocks import BlockReader
from capsule_tasks.sessions.console.commands import Leave, parse
from capsule_tasks.sessions.console.terminal import Keyboard, Screen
from capsule_tasks.sessions.console.watch import Watch, show
from capsule_tasks.sessions.health import Health
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import SessionConfig

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class Console:
    """A prompt on a terminal, a filter in a pipe.

    The main thread belongs to the terminal, because only it hears Ctrl-C; the session lives on an
    event loop beside it, so that its child is heard also while a line is being typed.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._screen = Screen()
        self._keyboard = Keyboard(self._screen)
        self._blocks = BlockReader(self._keyboard.prompt, self._keyboard.give_back)
        self._session = Session(config)
        self._session.add_state_listener(self._on_state)
        self._session.add_health_listener(self._on_health)
        self._background = Background()
        self._listener: asyncio.Task[None] | None = None

    def main(self) -> int:
        """Serve the person to the end; the exit status."""
        # Python leaves SIGINT ignored if whoever started it did, as a script does with `&`.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._background.bell.ring_on_signals()
        # What the package would log is said here, where it belongs.
        logging.getLogger("capsule_tasks").addHandler(logging.NullHandler())
        try:
            self._start()
            return self._serve()
        except CapsuleError as error:
            self._screen.error(_in_full(error))
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            self._stop()

    def _start(self) -> None:
        begun = time.monotonic()
        self._background.call(self._session.start())
        if self._keyboard.is_terminal:
            elapsed_ms = (time.monotonic() - begun) * 1000
            python = self._session.info.metadata["python"]
            self._screen.answer(
                f"capsule_tasks {capsule_tasks.__version__}: Python {python} in a session of its "
                f"own, ready after {elapsed_ms:.0f} ms.\n"
                "Ctrl-C stops what runs, Ctrl-D leaves, :help tells the rest."
            )

    def _serve(self) -> int:
        went_well = True
        while True:
            try:
                block = self._blocks.read()
                if block.strip():
                    went_well = self._do(block)
            except (EOFError, Leave):
                break
            except KeyboardInterrupt:
                if not self._keyboard.is_terminal:
                    raise
        return 0 if went_well or self._keyboard.is_terminal else EXIT_FAILED

    def _stop(self) -> None:
        try:
            self._screen.fresh_line()
            self._background.call(self._session.shutdown())
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._background.call(self._session.terminate())
        self._background.call(self._listen())  # what `atexit` and `finally` wrote
        self._background.close()

    # --- code and commands ---------------------------------------------------------------------

    def _do(self, block: str) -> bool:
        """Run a block or obey a command; whether it went well."""
        try:
            if block.startswith(":"):
                self._obey(block)
                return True
            return Watch(
                self._session, self._background, self._keyboard, self._screen, self._obey_now
            ).follow(block)
        except BrokenPipeError:
            raise  # nobody looks any more
        except (CapsuleError, OSError, ValueError) as error:
            self._screen.error(_in_full(error))
            if isinstance(error, SessionStateError):
                self._screen.note(":restart begins anew")
            return False

    def _obey(self, line: str) -> None:
        command, words = parse(line)
        self._screen.answer(self._background.call(command.prepare(self._session, words)))

    def _obey_now(self, line: str) -> bool:
        """Obey a command that was typed while code runs; False if it has to wait."""
        if not line.startswith(":"):
            return False
        try:
            if not parse(line)[0].works_while_running:
                self._screen.note(f"{line} waits for the end of what runs; Ctrl-C stops that")
                return False
            self._obey(line)
        except (CapsuleError, OSError) as error:
            self._screen.error(_in_full(error))
        return True

    # --- what the session says unasked, on the event loop --------------------------------------

    def _on_state(self, old: SessionState, new: SessionState) -> None:
        if old is SessionState.WARMING and new is SessionState.READY:
            self._listener = asyncio.create_task(self._listen())
        if new is SessionState.ERROR and self._keyboard.is_asking:
            self._screen.note(f"{self._session.info.last_error}; :restart begins anew")
            self._keyboard.show_prompt_again()

    def _on_health(self, health: Health) -> None:
        how = "does not respond; :restart replaces it" if health.unresponsive else "responds again"
        self._screen.note(f"the child {how}")
        self._keyboard.show_prompt_again()

    async def _listen(self) -> None:
        """Show what no execution is meant by: late output, and the child's own log."""
        with contextlib.suppress(SessionLost, SessionStateError, BrokenPipeError):
            while True:
                show(self._screen, await self._session.receive_message())
                self._keyboard.show_prompt_again()


def _in_full(error: Exception) -> str:
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return "\n".join(lines)
