"""`input()`, `getpass` and `sys.stdin`: questions to the watchers of the execution."""

from __future__ import annotations

import builtins
import getpass
import io
import os
import sys
from _thread import LockType, allocate_lock
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from capsule_tasks.child.io.capture import SessionStream
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.stopping.deferred_stop import (
    InterruptibleCondition,
    deferred_stop,
    interruptible,
)
from capsule_tasks.protocol.messages import InputClosed, InputRequest, InputResponse
from capsule_tasks.protocol.values import sendable

_MAX_PROMPT = 4096
_EOF = InputResponse(execution_id="", request_id="", eof=True)

Reason = Literal["answered", "timeout", "cancelled", "eof"]


class _Question(msgspec.Struct, eq=False):
    request: InputRequest
    answer: InputResponse | None = None
    condition: InterruptibleCondition = msgspec.field(default_factory=InterruptibleCondition)

    def resolve(self, answer: InputResponse) -> None:
        """Wake the code that asks; the first answer counts."""
        if self.answer is None:
            self.answer = answer
        self.condition.notify_all()


class InputRequests(msgspec.Struct, eq=False):
    """All questions that are open; answers are routed by execution and request."""

    outbox: Outbox
    owner: Callable[[], OutputSink]
    timeout_s: float | None
    open: dict[str, _Question] = {}
    is_closed: bool = False
    lock: LockType = msgspec.field(default_factory=allocate_lock)

    def install(self) -> None:
        """Replace the ways in which Python code reads from a person."""
        original = builtins.input, sys.stdin
        builtins.input = self.input
        getpass.getpass = getpass.unix_getpass = self.getpass  # type: ignore[assignment, attr-defined]
        sys.stdin = sys.__stdin__ = _Stdin(self)  # type: ignore[assignment,misc]

        def restore() -> None:
            builtins.input, sys.stdin = original

        os.register_at_fork(after_in_child=restore)

    @interruptible
    def input(self, prompt: object = "", /) -> str:
        """Ask for a line; this is `builtins.input`."""
        return self.ask(str(prompt), password=False)

    @interruptible
    def getpass(self, prompt: str = "Password: ", _stream: Any = None) -> str:
        """Ask for a line that should not be shown; this is `getpass.getpass`."""
        return self.ask(prompt, password=True)

    @interruptible
    def ask(self, prompt: str, *, password: bool) -> str:
        """The answer; EOFError or TimeoutError if there is none."""
        try:
            return self._exchange(prompt, password=password)
        finally:
            deferred_stop.raise_pending()

    def _exchange(self, prompt: str, *, password: bool) -> str:
        sink = self.owner()
        if sink.execution_id is None:
            raise EOFError("no execution is running that could be asked for input")
        prompt = sendable(prompt)
        if len(prompt) > _MAX_PROMPT:  # its end is kept: there is the question
            prompt = f"… {prompt[-_MAX_PROMPT:]}"
        request = InputRequest(
            execution_id=sink.execution_id,
            prompt=prompt,
            password=password,
            timeout_s=self.timeout_s,
        )
        question = _Question(request)
        reason: Reason = "cancelled"
        is_open = False
        try:
            is_open = self._admit(question, sink)
            if is_open:
                sink.send_question(request)
            question.condition.wait(lambda: question.answer is not None, self.timeout_s)
            answer = question.answer
            reason = "timeout" if answer is None else "eof" if answer.eof else "answered"
        finally:
            self.open.pop(request.id, None)
            if is_open:
                self.outbox.bulk(
                    InputClosed(
                        execution_id=request.execution_id, request_id=request.id, reason=reason
                    )
                )
        if answer is not None and not answer.eof:
            return answer.text
        error: Exception = EOFError("input ended")
        if answer is None:
            error = _InputTimeout(f"no input within {self.timeout_s} s")
        error.add_note(
            f"execution {request.execution_id}, input request {request.id}, "
            f"timeout {'none' if self.timeout_s is None else f'{self.timeout_s} s'}"
        )
        raise error

    def respond(self, answer: InputResponse) -> bool:
        """Give an answer to its question; False if that question is not open."""
        question = self.open.get(answer.request_id)
        if question is None or question.request.execution_id != answer.execution_id:
            return False
        question.resolve(answer)
        return True

    def close_execution(self, execution_id: str) -> None:
        """End the input of an execution that has ended, whose threads may still ask."""
        for question in list(self.open.values()):
            if question.request.execution_id == execution_id:
                question.resolve(_EOF)

    def close(self) -> set[str]:
        """End all input; the executions that were asking."""
        with self.lock:
            self.is_closed = True
        questions = list(self.open.values())
        for question in questions:
            question.resolve(_EOF)
        return {question.request.execution_id for question in questions}

    def _admit(self, question: _Question, sink: OutputSink) -> bool:
        with self.lock:
            self.open[question.request.id] = question
            # Checked after the question is in the dict. An execution closes its sink first and
            # calls `close_execution` then: either this check sees the closed sink, or that call
            # finds the question. The other way round, a thread could ask and never be answered.
            if self.is_closed or sink.is_closed:
                question.resolve(_EOF)
                return False
            return True


class _InputTimeout(TimeoutError):
    """A TimeoutError by name, but with its notes.

    asyncio replaces a plain TimeoutError from a thread by a copy, which has no notes.
    """


_InputTimeout.__name__ = _InputTimeout.__qualname__ = "TimeoutError"
_InputTimeout.__module__ = "builtins"


class _Stdin(SessionStream):
    """`sys.stdin`: each line is a question."""

    encoding = "utf-8"
    errors = "strict"
    name = "<stdin>"
    mode = "r"

    def __init__(self, inputs: InputRequests) -> None:
        self._inputs = inputs
        self.buffer = io.BufferedReader(_StdinBytes(self))

    @interruptible
    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        try:
            line = self._inputs.ask("", password=False) + "\n"
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
    """The source of `sys.stdin.buffer`: lines of `sys.stdin` in UTF-8."""

    def __init__(self, text: _Stdin) -> None:
        self._text = text
        self._left = b""

    def readinto(self, into: Any) -> int:
        self._left = self._left or self._text.readline().encode()
        data, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Stay open, like the text stream."""
