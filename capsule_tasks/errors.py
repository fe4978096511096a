"""Every error the package raises. The branches under the root say who has to act."""

from __future__ import annotations

from typing import Any


class CapsuleError(Exception):
    """Root of every error raised by capsule_tasks; all of them can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with `args`, but most of these are made from other parts.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[CapsuleError], args: tuple[Any, ...]) -> CapsuleError:
    error = kind.__new__(kind)
    error.args = args
    return error


class CallerError(CapsuleError):
    """The caller asked for something that cannot be done as asked."""


class RetryError(CapsuleError):
    """The same call may succeed when it is made again."""


class OperatorError(CapsuleError):
    """The deployment has to change before the call can succeed."""


class InternalError(CapsuleError):
    """A promise of this package was broken: please report it."""


class InvalidSetting(CallerError, ValueError):
    """A setting has a value outside its range."""

    def __init__(self, name: str, value: object, must: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {must}")
        self.name = name
        self.value = value


class SessionStateError(CallerError, RuntimeError):
    """The session's state does not allow the call."""

    def __init__(self, call: str, state: str, hint: str) -> None:
        super().__init__(f"{call} is not possible while the session is {state}; {hint}")
        self.state = state


class WrongEventLoop(CallerError, RuntimeError):
    """A session or a pool was used on another event loop than the one it belongs to."""

    def __init__(self, call: str, owner: str, hint: str) -> None:
        super().__init__(
            f"{call} was called on another event loop than the one that started {owner}; {hint}"
        )


class NotBorrowed(CallerError, ValueError):
    """A session was given back that is not lent: twice, or to a pool it is not from."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} is not lent by this pool")
        self.session_id = session_id


class SessionBusy(CallerError, RuntimeError):
    """A session was given back while code runs in it: wait for it, cancel it, or retire it."""

    def __init__(self, session_id: str, running: tuple[str, ...]) -> None:
        super().__init__(f"session {session_id!r} still runs {', '.join(running)}")
        self.session_id = session_id
        self.running = running


class UnknownInputRequest(CallerError, LookupError):
    """No execution is waiting for this input: it was answered, timed out or cancelled."""

    def __init__(self, request_id: str, execution_id: str) -> None:
        super().__init__(f"execution {execution_id!r} is not waiting for input {request_id!r}")
        self.request_id = request_id
        self.execution_id = execution_id


class FrameTooLarge(CallerError, ValueError):
    """A message is larger than a frame may be; nothing of it was sent."""

    def __init__(self, size: int, ceiling: int) -> None:
        super().__init__(f"a message of {size} bytes is over the ceiling of {ceiling} bytes")
        self.size = size
        self.ceiling = ceiling


class ExecutionTimeout(CallerError, TimeoutError):
    """An execution ran longer than its caller allowed and was stopped."""

    def __init__(self, execution_id: str, timeout_s: float) -> None:
        super().__init__(f"execution {execution_id!r} ran longer than {timeout_s} s")
        self.execution_id = execution_id
        self.timeout_s = timeout_s


class ExecutionFailed(CallerError):
    """Code run through `Session.run` ended with an error; `error` is its terminal message."""

    def __init__(self, error: object, summary: str) -> None:
        super().__init__(summary)
        self.error = error


class SnapshotError(CallerError):
    """A checkpoint could not be taken or restored; the namespace is as it was."""


class SessionLost(RetryError):
    """The child went away while something was waiting for it."""


class SessionStartFailed(OperatorError):
    """A child could not be started or did not become ready."""


class PoolUnavailable(RetryError):
    """A pool has no session to give, now and in the near future."""

    def __init__(self, profile: str, why: str) -> None:
        super().__init__(f"pool {profile!r} has no session to give: {why}")
        self.profile = profile
        self.why = why


class TemplateGone(RetryError):
    """A template cannot make children (any more); cold starts work all the same."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"template {name}: {why}")
        self.name = name
        self.why = why


class IncompatibleProtocol(OperatorError):
    """Parent and child speak no common version of the protocol."""


class Unconfined(OperatorError):
    """A sandbox cannot confine what it promises on this machine, and so does not start."""


class BadFrame(InternalError):
    """Bytes that are no frame of this protocol; the transport they came from is lost."""


class ExecutionCancelled(KeyboardInterrupt):
    """Raised inside an execution that is being cancelled.

    It derives from KeyboardInterrupt because asyncio swallows any other BaseException raised
    inside a callback, and so that libraries treat it as the Ctrl-C they already know.
    """
