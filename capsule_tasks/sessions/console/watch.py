"""One execution with a person in front of it."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from capsule_tasks.errors import UnknownInputRequest
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
    Result,
    Terminal,
    new_id,
)
from capsule_tasks.sessions.console.background import Background
from capsule_tasks.sessions.console.terminal import Keyboard, Screen
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.stopping import StopOutcome


class Watch:
    """What the execution says is shown; what is typed answers it; Ctrl-C cancels it.

    One message is fetched at a time, so a screen that is slow to take output holds up the code
    that writes it and fills no memory here.
    """

    def __init__(
        self,
        session: Session,
        background: Background,
        keyboard: Keyboard,
        screen: Screen,
        obey: Callable[[str], bool],
    ) -> None:
        self._session = session
        self._background = background
        self._keyboard = keyboard
        self._screen = screen
        self._obey = obey
        self._id = new_id()
        self._questions: deque[InputRequest] = deque()
        self._left_waiting: str | None = None
        self._was_accepted = False
        self._arriving: Future[Message] = Future()
        self._cancelling: Future[tuple[StopOutcome, float]] | None = None

    def follow(self, source: str) -> bool:
        """Run `source` to its end; whether it ended well."""
        messages = self._session.execute(source, execution_id=self._id, on_busy="wait")
        handler = signal.signal(signal.SIGINT, self._on_ctrl_c)
        try:
            while not isinstance(message := self._next(messages), Terminal):
                self._show(message)
            self._keyboard.show_typing()
            _show_end(self._screen, message)
            self._remark_on(message)
        except CancelledError:
            self._screen.error("cancelled before it began")
            return False
        finally:
            signal.signal(signal.SIGINT, handler)
            self._keyboard.show_typing()
            self._background.call(_close(messages))
        return isinstance(message, Result)

    def _next(self, messages: AsyncGenerator[Message, None]) -> Message:
        bell = self._background.bell
        self._arriving = self._background.start(_next_of(messages))
        self._arriving.add_done_callback(bell.ring)
        while not self._arriving.done():
            self._attend_to_lines()
            listen = self._keyboard.is_terminal or bool(self._questions)
            self._keyboard.wait(bell.descriptor, listen=listen)
            bell.clear()
        message = self._arriving.result()
        self._was_accepted = True
        return message

    def _show(self, message: Message) -> None:
        if isinstance(message, InputRequest):
            self._questions.append(message)
            if len(self._questions) == 1:
                self._ask_first()
        elif isinstance(message, InputClosed):
            self._withdraw(message)
        else:
            show(self._screen, message)

    # --- questions and commands ----------------------------------------------------------------

    def _attend_to_lines(self) -> None:
        """Take the lines that are not for the next prompt."""
        while self._keyboard.has_line:
            if self._questions:
                self._answer(self._keyboard.take())
            elif self._is_obeyed(self._keyboard.first_line):
                self._keyboard.take()
            else:
                return

    def _is_obeyed(self, line: str | None) -> bool:
        """Whether it was a command that works at once; each line is looked at once."""
        if line is None or line is self._left_waiting or not self._keyboard.is_terminal:
            return False
        self._left_waiting = line
        return self._obey(line)

    def _ask_first(self) -> None:
        """Show the oldest question, if there is one."""
        if self._questions:
            if self._questions[0].password:
                self._keyboard.hide_typing()  # first: somebody may type as soon as it is shown
            self._screen.output("stdout", self._questions[0].prompt)

    def _answer(self, line: str | None) -> None:
        question = self._questions.popleft()
        response = self._session.input_response(
            line or "",
            request_id=question.id,
            execution_id=question.execution_id,
            eof=line is None,
        )
        self._end_line_of(question)
        try:
            self._background.call(response)
        except UnknownInputRequest as late:
            self._screen.note(str(late))
        self._ask_first()

    def _withdraw(self, closed: InputClosed) -> None:
        """A question was closed from the other side."""
        open_ids = [question.id for question in self._questions]
        if closed.request_id not in open_ids:
            return
        place = open_ids.index(closed.request_id)
        question = self._questions[place]
        del self._questions[place]
        if closed.reason == "timeout":
            self._screen.note(f"nobody answered within {question.timeout_s} s")
        if place == 0:
            self._end_line_of(question)
            self._ask_first()

    def _end_line_of(self, question: InputRequest) -> None:
        if question.password:
            self._keyboard.show_typing()
            self._screen.fresh_line()

    # --- Ctrl-C --------------------------------------------------------------------------------

    def _on_ctrl_c(self, *_: Any) -> None:
        """Raises nothing: a message on its way must not be lost."""
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = self._background.start(self._cancel())

    async def _cancel(self) -> tuple[StopOutcome, float]:
        begun = time.monotonic()
        outcome = await self._session.cancel(self._id)
        if outcome == "not_running" and not self._was_accepted:
            self._arriving.cancel()  # it waits for a child that is not ready yet
        return outcome, (time.monotonic() - begun) * 1000

    def _remark_on(self, end: Terminal) -> None:
        """What became of the session, where that is not what one expects."""
        if self._cancelling is not None:
            outcome, elapsed_ms = self._cancelling.result()
            self._screen.note(f"{outcome.replace('_', ' ')} after {elapsed_ms:.1f} ms")
        if not isinstance(end, Error):
            return
        if end.kind == ErrorKind.KILLED:
            self._screen.note("the names are gone with the child; a new one takes its place")
        elif end.kind == ErrorKind.LOST:
            self._screen.note("the names are gone with the child; :restart begins anew")
        elif end.type == "SystemExit":
            self._screen.note("the session goes on; :quit leaves it")


def show(screen: Screen, message: Message) -> None:
    """One message that is neither a question nor an end."""
    if isinstance(message, Output):
        screen.output(message.stream, message.data)
    elif isinstance(message, Gap):
        screen.note(f"{message.lost_bytes} bytes of {message.stream} were dropped here")
    elif isinstance(message, Progress):
        of = f" of {message.total:g}" if message.total is not None else ""
        screen.note(f"{message.done:g}{of} {message.note}".rstrip())


def _show_end(screen: Screen, message: Terminal) -> None:
    if isinstance(message, Error):
        screen.error(message.traceback or _in_short(message))
    elif isinstance(message, Result) and message.is_repr:
        screen.result(str(message.value), f"repr only, of type {message.type_name}")
    elif isinstance(message, Result) and message.value is not None:
        screen.result(_repr(message.value))


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError as fault:  # an integer of more digits than Python prints
        return f"<{type(value).__name__}: {fault}>"


def _in_short(error: Error) -> str:
    lines = [f"{error.type}: {error.message}", *error.notes]
    if error.stack:
        lines += ["last known stack:", error.stack]
    return "\n".join(lines)


async def _next_of(messages: AsyncGenerator[Message, None]) -> Message:
    return await anext(messages)


async def _close(messages: AsyncGenerator[Message, None]) -> None:
    await messages.aclose()
