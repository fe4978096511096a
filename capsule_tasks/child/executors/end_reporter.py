"""The one place where executions end: their last output, their terminal message, the replies."""

from __future__ import annotations

from collections.abc import Callable

from capsule_tasks.child.boot import limits
from capsule_tasks.child.executors.outcomes import enter_error, plain_error, type_name
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.output import OutputLimitReached
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping.interrupts import Interrupter
from capsule_tasks.errors import ExecutionCancelled, FrameTooLarge
from capsule_tasks.protocol.messages import (
    Cancel,
    CancelReply,
    Checkpoint,
    Checkpointed,
    Error,
    ErrorKind,
    Message,
    Restore,
    Restored,
    Result,
    Terminal,
)
from capsule_tasks.settings import LimitSettings

_STOPPED = "ExecutionCancelled"


class EndReporter:
    """Puts ends into words and says each of them exactly once."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        interrupter: Interrupter,
        inputs: InputRequests,
        *,
        effective_limits: LimitSettings,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._interrupter = interrupter
        self._inputs = inputs
        self._limits = effective_limits

    def conduct(self, execution: Execution, run: Callable[[], Message]) -> Message:
        """The message that `run` returns, or the one that says what it raised."""
        try:
            return run()
        except BaseException as error:
            return self.describe_error(execution, error)

    def describe_error(self, execution: Execution, error: BaseException) -> Message:
        """The message that says what was raised, also if it resists being described."""
        try:
            return self._describe(execution, error)
        except BaseException as fault:  # stopped while `__str__` ran
            kind = self._kind(execution, fault)
            if _is_stop(fault):
                return self._failed(execution, kind, _STOPPED, kind.value)
            why = "raised while an error was described"
            return self._failed(execution, kind, type_name(type(fault)), why)

    def _describe(self, execution: Execution, error: BaseException) -> Message:
        """An exception as the message that ends its execution."""
        kind = self._kind(execution, error)
        message = enter_error(execution.id, kind, error)
        if kind is not ErrorKind.RAISED and _is_stop(error):
            message.type = _STOPPED
            message.message = str(error) or execution.stop_reason or kind.value
        limit = limits.reached(self._limits, error)
        if kind is ErrorKind.LIMIT and limit is not None:
            message.message = message.message or limit
            message.notes += (limit,)
        return _reply_for(execution, message)

    def finish(self, execution: Execution, message: Message) -> None:
        """Output first, then the end. Waits for the consumer if the mode says so."""
        if execution.sink.execution_id is not None:  # else the session's, which goes on
            execution.sink.finish()
        self.deliver(execution, message, Stage.RUNNING)

    def deliver(
        self, execution: Execution, message: Message, expected: Stage, *, interrupted: bool = False
    ) -> bool:
        """Say how it ended; False, and nothing said, if somebody else already did."""
        if not self._registry.end(execution, expected):
            return False
        if isinstance(message, Result) and execution.sink.over_limit:  # reached in a thread
            why = execution.sink.over_limit
            message = plain_error(execution.id, ErrorKind.LIMIT, _STOPPED, why)
        self._interrupter.forget(execution)
        self._inputs.close_execution(execution.id)
        if isinstance(message, Terminal):
            message.stdout_bytes = execution.sink.sent["stdout"]
            message.stderr_bytes = execution.sink.sent["stderr"]
        try:
            self._outbox.bulk(message)
        except FrameTooLarge as fault:
            kind = ErrorKind.TOO_LARGE
            self._outbox.bulk(self._failed(execution, kind, type_name(type(fault)), str(fault)))
        for cancel in execution.cancels:
            self.reply(cancel, interrupted=interrupted or execution.interrupted)
        return True

    def refuse(self, execution: Execution, kind: ErrorKind, reason: str) -> bool:
        """End an execution that has not started."""
        type_ = "SessionBusy" if kind is ErrorKind.BUSY else _STOPPED
        message = _reply_for(execution, plain_error(execution.id, kind, type_, reason))
        is_cancelled = kind is ErrorKind.CANCELLED
        return self.deliver(execution, message, Stage.WAITING, interrupted=is_cancelled)

    def reply(self, cancel: Cancel, *, interrupted: bool) -> None:
        self._outbox.control(
            CancelReply(
                in_reply_to=cancel.id,
                execution_id=cancel.execution_id,
                done="interrupted" if interrupted else "not_running",
            )
        )

    def _failed(self, execution: Execution, kind: ErrorKind, type_: str, reason: str) -> Message:
        message = plain_error(execution.id, kind, type_, reason)
        message.stdout_bytes = execution.sink.sent["stdout"]
        message.stderr_bytes = execution.sink.sent["stderr"]
        return _reply_for(execution, message)

    def _kind(self, execution: Execution, error: BaseException) -> ErrorKind:
        if isinstance(error, OutputLimitReached):
            return ErrorKind.LIMIT
        if execution.stop_kind is not None and (
            execution.interrupted or isinstance(error, RecursionError)
        ):
            execution.interrupted = True
            return execution.stop_kind
        if limits.reached(self._limits, error) is not None:
            return ErrorKind.LIMIT
        return ErrorKind.RAISED


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, ExecutionCancelled) or type(error).__name__ == "CancelledError"


def _reply_for(execution: Execution, error: Error) -> Message:
    """The same end in the form that the kind of work is answered with."""
    why = f"{error.type}: {error.message}"
    if isinstance(execution.work, Checkpoint):
        return Checkpointed(in_reply_to=execution.id, error=why)
    if isinstance(execution.work, Restore):
        return Restored(in_reply_to=execution.id, error=why)
    return error
