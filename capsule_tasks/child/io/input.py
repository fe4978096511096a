"""`input()`, `getpass` and `sys.stdin`: questions that travel to whoever watches the execution."""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

from capsule_tasks.child.io.output import Sink
from capsule_tasks.child.io.streams import SessionStream
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.stopping.condition import Gate
from capsule_tasks.child.stopping.deferred_stop import interruptible, landing
from capsule_tasks.protocol.messages import InputClosed, InputRequest, InputResponse
from capsule_tasks.protocol.values import sendable

_MAX_PROMPT = 4096

Reason = Literal["answered", "timeout", "cancelled", "eof"]


class _Question:
    __slots__ = ("answer", "gate", "request")

    def __init__(self, request: InputRequest) -> None:
        self.request = request
        self.gate = Gate()
        self.answer: InputResponse | None = None

    def settle(self, answer: InputResponse) -> None:
        """The first answer stands."""
        if self.answer is None:
            self.answer = answer
        self.gate.open()


class InputRequests:
    """Every question that is open; answers are routed by execution and request."""

    def __init__(self, outbox: Outbox, owner: Callable[[], Sink], timeout_s: float | None) -> None:
        self._outbox = outbox
        self._owner = owner
        self._timeout_s = timeout_s
        self._open: dict[str, _Question] = {}
        self._lock = threading.Lock()
        self._closed = False

    def install(self) -> None:
        """Replace the ways Python reads from a person."""
        original = builtins.input, sys.stdin
        builtins.input = self.input
        sys.stdin = sys.__stdin__ = _Stdin(self)  # type: ignore[assignment,misc]

        def leave() -> None:
            builtins.input, sys.stdin = original

        os.register_at_fork(after_in_child=leave)

    @interruptible
    def input(self, prompt: object = "", /) -> str:
        """Read a line from whoever watches this execution."""
        return self.ask(str(prompt), password=False)

    @interruptible
    def getpass(self, prompt: str = "Password: ", _stream: Any = None) -> str:
        """Read a line that should not be shown."""
        return self.ask(prompt, password=True)

    @interruptible
    def ask(self, prompt: str, *, password: bool) -> str:
        """The answer; EOFError or TimeoutError if there is none."""
        try:
            return self._exchange(prompt, password=password)
        finally:
            if landing.pending:
                landing.raise_pending()

    def _exchange(self, prompt: str, *, password: bool) -> str:
        sink = self._owner()
        if sink.execution_id is None:
            raise EOFError("no execution is running that could be asked for input")
        request = InputRequest(
            execution_id=sink.execution_id,
            prompt=_shortened(prompt),
            password=password,
            timeout_s=self._timeout_s,
        )
        question = _Question(request)
        reason: Reason = "cancelled"
        is_admitted = False
        try:
            is_admitted = self._admit(question, sink)
            if is_admitted:
                sink.ask(request)
            question.gate.wait(lambda: question.answer is not None, self._timeout_s)
            answer = question.answer
            reason = _outcome(answer)
        finally:
            self._open.pop(request.id, None)
            if is_admitted:
                self._tell_closed(request, reason)
        return self._text(request, answer)

    def _tell_closed(self, request: InputRequest, reason: Reason) -> None:
        self._outbox.bulk(
            InputClosed(execution_id=request.execution_id, request_id=request.id, reason=reason)
        )

    def respond(self, answer: InputResponse) -> bool:
        """Hand an answer to its question; False if nobody waits for it."""
        question = self._open.get(answer.request_id)
        if question is None or question.request.execution_id != answer.execution_id:
            return False
        question.settle(answer)
        return True

    def close_execution(self, execution_id: str) -> None:
        """The execution is over: what its threads still ask ends in EOF."""
        for question in list(self._open.values()):
            if question.request.execution_id == execution_id:
                question.settle(_eof(question.request))

    def close(self) -> set[str]:
        """No more input for anyone; the executions that were asking."""
        with self._lock:
            self._closed = True
        questions = list(self._open.values())
        for question in questions:
            question.settle(_eof(question.request))
        return {question.request.execution_id for question in questions}

    def _admit(self, question: _Question, sink: Sink) -> bool:
        with self._lock:
            self._open[question.request.id] = question
            # Looked at after it joined the list: `close_execution` comes after the sink is closed.
            if self._closed or sink.is_closed:
                question.answer = _eof(question.request)
                return False
            return True

    def _text(self, request: InputRequest, answer: InputResponse | None) -> str:
        if answer is not None and not answer.eof:
            return answer.text
        error: Exception
        if answer is None:
            error = _InputTimeout(f"no input within {self._timeout_s} s")
        else:
            error = EOFError("input ended")
        error.add_note(
            f"execution {request.execution_id}, input request {request.id}, "
            f"timeout {'none' if self._timeout_s is None else f'{self._timeout_s} s'}"
        )
        raise error


class _InputTimeout(TimeoutError):
    """A TimeoutError to everyone but asyncio, which brings a plain one from a thread as a copy.

    The copy would be without its notes.
    """


_InputTimeout.__name__ = _InputTimeout.__qualname__ = "TimeoutError"
_InputTimeout.__module__ = "builtins"


def _shortened(prompt: str) -> str:
    """A prompt in one line's length, with its end, where the question is."""
    prompt = sendable(prompt)
    return prompt if len(prompt) <= _MAX_PROMPT else f"… {prompt[-_MAX_PROMPT:]}"


def _outcome(answer: InputResponse | None) -> Reason:
    if answer is None:
        return "timeout"
    return "eof" if answer.eof else "answered"


def _eof(request: InputRequest) -> InputResponse:
    return InputResponse(execution_id=request.execution_id, request_id=request.id, eof=True)


class _Stdin(SessionStream):
    """`sys.stdin`: each line is asked for; there is no terminal behind it."""

    encoding = "utf-8"
    errors = "strict"
    name = "<stdin>"
    mode = "r"

    def __init__(self, desk: InputRequests) -> None:
        self._desk = desk
        self.buffer = io.BufferedReader(_StdinBytes(self))

    @interruptible
    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        try:
            line = self._desk.ask("", password=False) + "\n"
        except EOFError:
            return ""
        return line if size is None or size < 0 else line[:size]

    @interruptible
    def read(self, size: int | None = -1, /) -> str:
        if size is not None and size >= 0:
            return self.readline(size)
        return "".join(iter(self.readline, ""))

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation("the input of a session has no file descriptor")


class _StdinBytes(io.RawIOBase):
    """What is below `sys.stdin.buffer`: the lines that are asked for, in UTF-8."""

    def __init__(self, text: _Stdin) -> None:
        self._text = text
        self._left = b""

    def readinto(self, into: Any) -> int:
        self._left = self._left or self._text.readline().encode()
        some, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(some)] = some
        return len(some)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """A session's input outlives whoever closes it."""
