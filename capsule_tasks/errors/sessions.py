"""Errors of sessions, pools, sandboxes, and the channels to children."""

from __future__ import annotations

from capsule_tasks.errors.base import (
    CallerError,
    InternalError,
    OperatorError,
    RetryError,
    described,
)


@described("{call} is not possible while the session is {state}; {hint}")
class SessionStateError(CallerError, RuntimeError):
    """The session's state does not allow the call."""

    call: str
    state: str
    hint: str


@described("{call} was called on another event loop than the one that started {owner}; {hint}")
class WrongEventLoop(CallerError, RuntimeError):
    """A session or a pool was used on another event loop than the one it belongs to."""

    call: str
    owner: str
    hint: str


@described("session {session_id!r} is not borrowed from this pool")
class NotBorrowed(CallerError, ValueError):
    """A session was released that is not borrowed: twice, or to a pool it is not from."""

    session_id: str


@described("session {session_id!r} still runs {running}")
class SessionBusy(CallerError, RuntimeError):
    """A session was released while code runs in it: wait for it, cancel it, or retire it."""

    session_id: str
    running: tuple[str, ...]


@described("execution {execution_id!r} is not waiting for input {request_id!r}")
class UnknownInputRequest(CallerError, LookupError):
    """No execution is waiting for this input: it was answered, timed out or cancelled."""

    request_id: str
    execution_id: str


@described("a message of {size} bytes is over the ceiling of {ceiling} bytes")
class FrameTooLarge(CallerError, ValueError):
    """A message is larger than a frame may be; nothing of it was sent."""

    size: int
    ceiling: int


@described("execution {execution_id!r} ran longer than {timeout_s} s")
class ExecutionTimeout(CallerError, TimeoutError):
    """An execution ran longer than its caller allowed and was stopped."""

    execution_id: str
    timeout_s: float


@described("{summary}")
class ExecutionFailed(CallerError):
    """Code run through `Session.run` ended with an error; `error` is its terminal message."""

    error: object
    summary: str


class SnapshotError(CallerError):
    """A checkpoint could not be taken or restored; the namespace is as it was."""


class SessionLost(RetryError):
    """The child was lost while a call was waiting for it."""


class SessionStartFailed(OperatorError):
    """A child could not be started or did not become ready."""


@described("pool {profile!r} has no session to give: {reason}")
class PoolUnavailable(RetryError):
    """A pool has no session to give, now and in the near future."""

    profile: str
    reason: str


@described("template {name}: {reason}")
class TemplateLost(RetryError):
    """A template cannot make children (any more); cold starts work all the same."""

    name: str
    reason: str


class IncompatibleProtocol(OperatorError):
    """Parent and child have no common version of the protocol."""


class Unconfined(OperatorError):
    """A sandbox cannot confine what it promises on this machine, and so does not start."""


class PrivateServerError(OperatorError):
    """A server of `capsule_tasks.testing` could not be found or started, or does not run."""


class BadFrame(InternalError):
    """Bytes that are no frame of this protocol; the transport they came from is lost."""


# --- named sessions ------------------------------------------------------------------------------


@described("there is no session {session_id!r}: it was never used, was closed, or has expired")
class SessionUnknown(CallerError, LookupError):
    """Redis holds nothing of a named session."""

    session_id: str


@described("session {session_id!r} has the {what} {stored!r}, not {given!r}")
class SessionMismatch(CallerError, ValueError):
    """A named session was used under another profile or tenant than its own; nothing was stored."""

    session_id: str
    what: str
    stored: str
    given: str


@described("session {session_id!r} is busy: {unfinished} of its calls are unfinished")
class NamedSessionBusy(RetryError):
    """A named session has unfinished calls, and the caller did not want to wait for them."""

    session_id: str
    unfinished: int


@described("{waiting} calls wait for session {session_id!r}, and no more than {limit} may")
class SessionCallsFull(RetryError):
    """The call log of a named session is full; nothing was stored."""

    session_id: str
    waiting: int
    limit: int


@described("{call_id!r} is the id of a call of session {holder!r}, not of {session_id!r}")
class CallIdTaken(CallerError, ValueError):
    """The id of a call is that of a call of another session; nothing runs under it here."""

    call_id: str
    holder: str
    session_id: str


@described("session {session_id!r} is being closed")
class SessionClosing(RetryError):
    """A named session is being closed; once it is, the next call begins a new one."""

    session_id: str


@described("session {session_id!r} was forgotten, and call {call_id!r} with it: the call {fate}")
class SessionForgotten(CallerError, LookupError):
    """A named session was erased before one of its calls had ended."""

    session_id: str
    call_id: str
    may_have_run: bool

    @property
    def fate(self) -> str:
        return "may have run" if self.may_have_run else "did not run"


@described("session {session_id!r} has no owner and is not listed; its token is {token}")
class SessionUnlisted(RetryError):
    """A named session has to be listed as wanted before a call is submitted to it."""

    session_id: str
    token: int


@described("session {session_id!r} is held by {owner!r}")
class SessionHeld(RetryError):
    """A named session has an owner; with its token it can be taken over once its lease lapsed."""

    session_id: str
    owner: str
    token: int


@described("session {session_id!r} has another owner now: {owner:nobody}")
class SessionOwnerLost(RetryError):
    """This worker has lost a named session: it has to stop, and to write nothing more of it."""

    session_id: str
    owner: str


@described("session {session_id!r} is not released: {unfinished} of its calls are unfinished")
class SessionUnfinished(RetryError):
    """A named session with unfinished calls is not released: its owner runs them first."""

    session_id: str
    unfinished: int


@described("session {session_id!r} is not live: no worker has it")
class SessionNotLive(RetryError):
    """A named session has no owner that could answer a request."""

    session_id: str


@described("tenant {tenant!r} has {live} live sessions, as many as it may have")
class TenantFull(RetryError):
    """A tenant has as many live sessions as it may have; nothing was reserved."""

    tenant: str
    live: int


@described("session {session_id!r}: {request} failed: {reason}")
class SessionRequestFailed(CallerError):
    """The worker that has a named session could not do what it was asked for."""

    session_id: str
    request: str
    reason: str
