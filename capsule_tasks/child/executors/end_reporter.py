"""The one place where executions end: remaining output, the terminal message, and replies."""

from __future__ import annotations

import msgspec

from capsule_tasks.child.boot.limits import limit_reached
from capsule_tasks.child.executors.outcomes import enter_error, plain_error, type_name
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.sink import OutputLimitReached
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.errors import ExecutionCancelled, FrameTooLarge
from capsule_tasks.protocol import messages
from capsule_tasks.protocol.messages import Cancel, Error, ErrorKind, Message
from capsule_tasks.settings import LimitSettings

_STOPPED = "ExecutionCancelled"


class EndReporter(msgspec.Struct, eq=False):
    """Describes how executions ended, and reports each end exactly once."""

    registry: Registry
    outbox: Outbox
    interrupter: Interrupter
    inputs: InputRequests
    limits: LimitSettings
    """Those that hold now."""

    def describe_error(self, execution: Execution, error: BaseException) -> Message:
        """The message that ends an execution, also if the exception cannot be formatted."""
        try:
            return self._describe(execution, error)
        except BaseException as fault:  # the execution was stopped while `__str__` ran
            kind = self._kind(execution, fault)
            type_, reason = type_name(type(fault)), "raised while an error was described"
            if _is_stop(fault):
                type_, reason = _STOPPED, kind.value
            return self._failed(execution, kind, type_, reason)

    def _describe(self, execution: Execution, error: BaseException) -> Message:
        kind = self._kind(execution, error)
        message = enter_error(execution.id, kind, error)
        if kind is not ErrorKind.RAISED and _is_stop(error):
            message.type = _STOPPED
            message.message = str(error) or execution.stop_reason or kind.value
        limit = limit_reached(self.limits, error)
        if kind is ErrorKind.LIMIT and limit is not None:
            message.message = message.message or limit
            message.notes += (limit,)
        return _reply_for(execution, message)

    def finish(self, execution: Execution, message: Message) -> None:
        """Send remaining output, then the end. Waits for the consumer in mode `block`."""
        if execution.sink.execution_id is not None:  # else the session's, which stays open
            execution.sink.finish()
        self.deliver(execution, message, Stage.RUNNING)

    def deliver(
        self, execution: Execution, message: Message, expected: Stage, *, interrupted: bool = False
    ) -> bool:
        """Send the terminal message; False if the execution is not in the expected stage.

        The main thread may be ending an execution that the control thread refuses or cancels at
        the same time: the registry lets only one of them send the message.
        """
        if not self.registry.end(execution, expected):
            return False
        if isinstance(message, messages.Result) and execution.sink.over_limit:
            # A thread reached the limit, so that the code itself never saw the exception.
            reason = execution.sink.over_limit
            message = plain_error(execution.id, ErrorKind.LIMIT, _STOPPED, reason)
        self.interrupter.forget(execution)
        self.inputs.close_execution(execution.id)
        _count_output(execution, message)
        try:
            self.outbox.bulk(message)
        except FrameTooLarge as fault:
            kind = ErrorKind.TOO_LARGE
            self.outbox.bulk(self._failed(execution, kind, type_name(type(fault)), str(fault)))
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
        self.outbox.control(
            messages.CancelReply(
                in_reply_to=cancel.id,
                execution_id=cancel.execution_id,
                done="interrupted" if interrupted else "not_running",
            )
        )

    def _failed(self, execution: Execution, kind: ErrorKind, type_: str, reason: str) -> Message:
        message = plain_error(execution.id, kind, type_, reason)
        _count_output(execution, message)
        return _reply_for(execution, message)

    def _kind(self, execution: Execution, error: BaseException) -> ErrorKind:
        if isinstance(error, OutputLimitReached):
            return ErrorKind.LIMIT
        if execution.stop_kind is not None and (
            execution.interrupted or isinstance(error, RecursionError)
        ):
            execution.interrupted = True
            return execution.stop_kind
        if limit_reached(self.limits, error) is not None:
            return ErrorKind.LIMIT
        return ErrorKind.RAISED


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, ExecutionCancelled) or type(error).__name__ == "CancelledError"


def _count_output(execution: Execution, message: Message) -> None:
    if isinstance(message, messages.Terminal):
        message.stdout_bytes = execution.sink.sent["stdout"]
        message.stderr_bytes = execution.sink.sent["stderr"]


def _reply_for(execution: Execution, error: Error) -> Message:
    """The message that answers this kind of work with an error."""
    reason = f"{error.type}: {error.message}"
    if isinstance(execution.work, messages.Checkpoint):
        return messages.Checkpointed(in_reply_to=execution.id, error=reason)
    if isinstance(execution.work, messages.Restore):
        return messages.Restored(in_reply_to=execution.id, error=reason)
    return error
