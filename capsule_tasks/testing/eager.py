"""Tasks that run in the caller's process, without Redis and without a worker."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import io
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def eager(
    app: Any, *, propagates: bool = False, answers: Iterable[str] | None = None
) -> Iterator[Any]:
    """Have every `.delay()` of `app` run its task before it returns, until the block ends.

    With `propagates` an exception of a task is raised by its `.delay()`, instead of its `.get()`.
    Steps of the tasks are stored in a dict that is discarded at the end. With `answers` each
    `input()` of a task takes the next answer, and raises AssertionError when none is left; without,
    `input()` stays that of the test.
    """
    from capsule_tasks.testing.steps import StepsInMemory  # noqa: PLC0415  loads Redis's client

    wanted: dict[str, Any] = {
        "task_always_eager": True,
        "task_store_eager_result": False,
        "task_eager_propagates": propagates,
        "capsule_store": StepsInMemory(),
    }
    before = {name: app.conf.get(name) for name in wanted}
    with contextlib.nullcontext() if answers is None else _answering(answers):
        app.conf.update(wanted)
        try:
            yield app
        finally:
            app.conf.update(before)


@contextlib.contextmanager
def _answering(answers: Iterable[str]) -> Iterator[None]:
    """Answer each question with the next answer, until the block ends.

    When no answer is left, a question raises AssertionError, and `sys.stdin` is at its end.
    """
    desk = _Answers(answers)
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(builtins, "input", desk.input))
        patches.enter_context(patch.object(getpass, "getpass", desk.getpass))
        patches.enter_context(patch.object(sys, "stdin", _Stdin(desk)))
        yield


class _Answers:
    def __init__(self, answers: Any) -> None:
        is_many = isinstance(answers, Iterable) and not isinstance(answers, str)
        given: list[Any] = list(answers) if is_many else [None]
        if not all(isinstance(answer, str) for answer in given):
            raise TypeError(
                f"answers = {answers!r}: must be a list of texts, one for each question"
            )
        self._given = len(given)
        self.left: deque[str] = deque(given)

    def input(self, prompt: object = "", /) -> str:
        sys.stdout.write(str(prompt))
        sys.stdout.flush()
        return self._next(str(prompt))

    def getpass(self, prompt: str = "Password: ", stream: object = None) -> str:  # noqa: ARG002  getpass's own parameters
        return self._next(prompt)

    def _next(self, prompt: str) -> str:
        if not self.left:
            raise AssertionError(
                f"a task asks {prompt!r}, and all {self._given} answers of eager(answers=…) have "
                "been used; pass one for each question"
            )
        return self.left.popleft()


class _Stdin(io.TextIOBase):
    """A standard input of which each line is an answer."""

    def __init__(self, desk: _Answers) -> None:
        self._desk = desk
        self._rest = ""
        """The unread rest of a line."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        if not self._rest and self._desk.left:
            self._rest = f"{self._desk.left.popleft()}\n"
        end = len(self._rest) if size is None or size < 0 else size
        line, self._rest = self._rest[:end], self._rest[end:]
        return line

    def read(self, size: int | None = -1, /) -> str:
        if size is not None and size >= 0:
            return self.readline(size)
        return "".join(iter(self.readline, ""))
