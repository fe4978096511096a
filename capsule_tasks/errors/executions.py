"""Errors of executions: tasks, attempts, questions and results."""

from __future__ import annotations

from capsule_tasks.errors.base import CallerError, OperatorError, described


@described(
    "task {name}[{task_id}] cannot pass between the worker and its child, and is not delivered "
    "again: {reason}"
)
class TaskNotCarried(CallerError, ValueError):
    """A task's message, or its end, does not fit between the worker and its child."""

    name: str
    task_id: str
    reason: str


@described("{message}")
class TooManyLosses(OperatorError):
    """A task was delivered again and again, and its process was lost each time."""

    message: str
    task_id: str
    losses: int

    @classmethod
    def of(cls, name: str, task_id: str, losses: int, last: str | None) -> TooManyLosses:
        """The error of a task that cost so many processes; `last` says how the last was lost."""
        text = (
            f"task {name}[{task_id}] is not delivered again: {losses} child processes died while "
            f"they ran it, the last with {last or 'its whole worker.'} Give it more memory or mend "
            "it, or raise capsule_loss_limit"
        )
        return cls(text, task_id, losses)


class CodeFailed(CallerError):
    """The code of an execution raised, reached one of its limits, or ran out of time.

    Raised by `.get()`; `type` and `message` are those of the exception in the code, whose traceback
    is a note of this one. A result backend stores its arguments, which are text.
    """

    def __init__(
        self,
        type: str,  # noqa: A002 - as in `Error`
        message: str = "",
        traceback: str = "",
        kind: str = "raised",
    ) -> None:
        super().__init__(type, message, traceback, kind)
        if traceback:
            self.add_note(traceback)

    @property
    def type(self) -> str:
        return str(self.args[0])

    @property
    def message(self) -> str:
        return str(self.args[1])

    @property
    def traceback(self) -> str:
        return str(self.args[2])

    @property
    def kind(self) -> str:
        """`raised`, `limit` or `timeout`."""
        return str(self.args[3])

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.type, self.message))) or "CodeFailed"

    def __repr__(self) -> str:
        return f"CodeFailed({self.type!r}, {self.message!r})"


class CodeNotRun(OperatorError):
    """A worker cannot run the code that it was sent, for the reason given; nothing of it ran."""


@described("execution {execution_id!r} has ended: it {outcome:ended}")
class ExecutionEnded(CallerError, RuntimeError):
    """An execution has ended, and nothing more can be asked of it."""

    execution_id: str
    outcome: str


@described("unknown execution {execution_id!r}")
class ExecutionUnknown(CallerError, LookupError):
    """Redis holds nothing of an execution: it has not started, or has expired."""

    execution_id: str


@described("attempt {attempt} of execution {execution_id!r} is stale; attempt {current} followed")
class AttemptStale(CallerError, RuntimeError):
    """A worker published for an attempt after which another one was claimed; nothing was stored."""

    execution_id: str
    attempt: int
    current: int
    claim: str = ""
    """The id under which the current attempt was claimed."""


@described("attempt {attempt} of execution {execution_id!r} has ended")
class AttemptClosed(CallerError, RuntimeError):
    """A worker published for an attempt that has ended; nothing was stored."""

    execution_id: str
    attempt: int
    outcome: str


@described("execution {execution_id!r} has no open question")
class NoOpenQuestion(CallerError, LookupError):
    """An execution was sent a response while none of its questions was open."""

    execution_id: str


@described("there is no result of execution {execution_id!r}, which ended as {outcome}{details}")
class NoResult(CallerError, LookupError):
    """The result backend has nothing of an execution that ended: ignored, expired, or lost."""

    execution_id: str
    outcome: str
    reason: str

    @property
    def details(self) -> str:
        return f" ({self.reason})" if self.reason else ""
