"""Every error the package raises. The branches under the root say who has to act."""

from __future__ import annotations

from typing import Any


class CapsuleError(Exception):
    """Root of every error raised by capsule_tasks; all of them can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with `args`, but most of these are made from other parts.
        return _remade, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        # Log lines and other errors end in this text: without a message the type is the reason.
        return super().__str__() or type(self).__name__


def _remade(kind: type[CapsuleError], args: tuple[Any, ...]) -> CapsuleError:
    error = kind.__new__(kind)
    error.args = args
    return error


def reason_of(error: BaseException) -> str:
    """What an error says, for a log line or another error; one that says nothing has its type."""
    return str(error) or type(error).__name__


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
        super().__init__(f"{name} = {_shortened(value, 300)}: must be {must}")
        self.name = name
        self.value = value
        self.must = must


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


class TaskNotCarried(CallerError, ValueError):
    """A task's message, or its end, does not fit between the worker and its child."""

    def __init__(self, name: str, task_id: str = "", reason: str | None = None) -> None:
        """Or of the message alone, as Celery makes it anew from a stored result."""
        super().__init__(
            name
            if reason is None
            else f"task {name}[{task_id}] cannot pass between the worker and its child, and is not "
            f"delivered again: {reason}"
        )
        self.task_id = task_id


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

    def __init__(self, profile: str, reason: str) -> None:
        super().__init__(f"pool {profile!r} has no session to give: {reason}")
        self.profile = profile
        self.reason = reason


class TemplateLost(RetryError):
    """A template cannot make children (any more); cold starts work all the same."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"template {name}: {reason}")
        self.name = name
        self.reason = reason


class IncompatibleProtocol(OperatorError):
    """Parent and child speak no common version of the protocol."""


class Unconfined(OperatorError):
    """A sandbox cannot confine what it promises on this machine, and so does not start."""


class PrivateServerError(OperatorError):
    """A server of `capsule_tasks.testing` could not be found or started, or does not run."""


class TooManyLosses(OperatorError):
    """A task was delivered again and again, and its process was lost each time."""

    def __init__(
        self, name: str, task_id: str = "", losses: int = 0, last: str | None = None
    ) -> None:
        """Or of the message alone, as Celery makes it anew from a stored result."""
        super().__init__(
            name
            if not losses
            else f"task {name}[{task_id}] is not delivered again: it has cost {losses} processes, "
            f"the last with {last or 'its whole worker.'} Give it more memory or mend it, or raise "
            "capsule_loss_limit"
        )
        self.task_id = task_id
        self.losses = losses


class BadFrame(InternalError):
    """Bytes that are no frame of this protocol; the transport they came from is lost."""


class ExecutionCancelled(KeyboardInterrupt):
    """Raised inside an execution that is being cancelled.

    It derives from KeyboardInterrupt because asyncio swallows any other BaseException raised
    inside a callback, and so that libraries treat it as the Ctrl-C they already know.
    """


class InvalidRunState(CallerError, ValueError):
    """A snapshot of a run is not what its schema version says; its values are not repeated here."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"the snapshot of a run is unusable at {where}: {reason}")
        self.where = where
        self.reason = reason


class UnreadableSchema(OperatorError):
    """A snapshot of a run was written by a release whose schema this one does not read."""

    def __init__(self, version: str, readable: tuple[str, ...]) -> None:
        super().__init__(
            f"schema version {_shortened(version)} is not readable here; readable are "
            f"{', '.join(readable)}. Leave the run to a newer release"
        )
        self.version = version
        self.readable = readable


class UnknownAgent(CallerError, LookupError):
    """A snapshot names an agent that the graph does not have."""

    def __init__(self, name: str, tag: str | None, known: tuple[str, ...]) -> None:
        which = f"{_shortened(name)} with tag {tag}" if tag else _shortened(name)
        super().__init__(f"no agent of the graph is {which}; it has {', '.join(known)}")
        self.name = name
        self.tag = tag
        self.known = known


class AmbiguousAgent(CallerError, LookupError):
    """Several agents of one name cannot be told apart; give each a key of its own."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(
            f"{count} agents are named {_shortened(name)} and cannot be told apart; "
            "give each a key of its own"
        )
        self.name = name
        self.count = count


class UnknownCall(CallerError, LookupError):
    """No tool call under this id waits for a decision, or was started."""

    def __init__(self, call_id: str, reason: str, what: str = "waits for no decision") -> None:
        super().__init__(f"call {_shortened(call_id)} {what}: {reason}")
        self.call_id = call_id
        self.reason = reason


class CallChanged(CallerError, ValueError):
    """An id that was used before came back with another tool or other arguments; nothing ran."""

    def __init__(self, call_id: str, reason: str) -> None:
        super().__init__(f"call {_shortened(call_id)} was used before: {reason}")
        self.call_id = call_id
        self.reason = reason


class ContextNotStorable(CallerError, TypeError):
    """The context of a run cannot be stored so that it comes back as it was."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"the context of type {kind} cannot be stored: {reason}")
        self.kind = kind
        self.reason = reason


class ContextNotRestorable(CallerError, TypeError):
    """The context of a run was stored in a form that only its owner can read."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"the context of type {kind} cannot be restored: {reason}")
        self.kind = kind
        self.reason = reason


class RunNotFound(CallerError, LookupError):
    """There is no run of this id: it never was, or it was over long ago."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"there is no run {_shortened(run_id)}, or it was over long ago")
        self.run_id = run_id


class RunExists(CallerError, ValueError):
    """A run of this id was started before; the one that is there stays as it is."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(f"run {_shortened(run_id)} is there already, and is {status}")
        self.run_id = run_id
        self.status = status


class RunClaimed(RetryError):
    """Another owner holds the run, and its lease has not lapsed."""

    def __init__(self, run_id: str, owner: str) -> None:
        super().__init__(f"run {_shortened(run_id)} is held by {_shortened(owner)}")
        self.run_id = run_id
        self.owner = owner


class RunEnded(CallerError, RuntimeError):
    """The run is over; nothing about it can be changed any more."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(f"run {_shortened(run_id)} is over: {status}")
        self.run_id = run_id
        self.status = status


class RunParked(CallerError, RuntimeError):
    """The run waits for decisions and cannot go on before one is taken."""

    def __init__(self, run_id: str, calls: int) -> None:
        super().__init__(f"run {_shortened(run_id)} waits for decisions on {calls} calls")
        self.run_id = run_id
        self.calls = calls


class RunClaimLost(RetryError):
    """This owner's claim on the run is over: stop, and write nothing more. Claim it anew."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(f"the claim on run {_shortened(run_id)} is over; it is {status} now")
        self.run_id = run_id
        self.status = status


class RunConflict(RetryError):
    """The run is at another revision than its owner believes; nothing was written."""

    def __init__(self, run_id: str, revision: int) -> None:
        super().__init__(f"run {_shortened(run_id)} is at revision {revision}; claim it anew")
        self.run_id = run_id
        self.revision = revision


class RunTooLarge(CallerError, ValueError):
    """A snapshot or an output is over its limit; nothing was written."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} has {size} bytes, over the limit of {limit}")
        self.what = what
        self.size = size
        self.limit = limit


class LeaseLost(RetryError):
    """This worker's lease has lapsed: what it held belongs to others. Begin a new incarnation."""

    def __init__(self, incarnation: str) -> None:
        super().__init__(self._text(_shortened(incarnation)))
        self.incarnation = incarnation

    def _text(self, name: str) -> str:
        return f"the lease of {name} has lapsed, and stays so"


class LeaseTaken(LeaseLost):
    """Another worker has the lease of this incarnation: begin a new one."""

    def _text(self, name: str) -> str:
        return f"the lease of {name} is held by another worker; begin a new incarnation"


class LeaseMissing(CallerError, RuntimeError):
    """A worker without a lease cannot claim a run: any other worker could take it at once."""

    def __init__(self, incarnation: str) -> None:
        super().__init__(
            f"{_shortened(incarnation)} has no lease on the Redis of this run; acquire "
            "one there before claiming, by store.lease(incarnation).acquire(), and renew it"
        )
        self.incarnation = incarnation


class AlreadyDecided(CallerError, RuntimeError):
    """Somebody else was first; the decision that counts is in `decision`."""

    def __init__(self, call_id: str, decision: object) -> None:
        super().__init__(f"call {_shortened(call_id)} was decided about before: {decision}")
        self.call_id = call_id
        self.decision = decision


class DecisionExpired(CallerError, TimeoutError):
    """The time for a decision had passed; what was to happen then has happened.

    With `resume` it falls to whoever is told this to send the run on, as after a decision.
    """

    def __init__(self, call_id: str, decision: object, resume: bool, updated_us: int) -> None:
        super().__init__(f"the time to decide about call {_shortened(call_id)} passed: {decision}")
        self.call_id = call_id
        self.decision = decision
        self.resume = resume
        self.updated_us = updated_us


class MayNotDecide(CallerError, PermissionError):
    """The decision is for others to take."""

    def __init__(self, call_id: str, who: tuple[str, ...], may: tuple[str, ...]) -> None:
        super().__init__(
            f"{', '.join(who) or 'an unnamed person'} may not decide about call "
            f"{_shortened(call_id)}; who may: {', '.join(may) or 'nobody'}"
        )
        self.call_id = call_id
        self.who = who
        self.may = may


class CallNotApproved(CallerError, RuntimeError):
    """A tool call was to be made though its approval is missing, or was refused; nothing ran."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"call {_shortened(call_id)} is not approved")
        self.call_id = call_id


class EffectUncertain(OperatorError):
    """A step was begun and nobody knows whether it was made; it is not made again by itself."""

    def __init__(self, name: str, began_at: str, reason: str) -> None:
        super().__init__(
            f"{_shortened(name)} was begun at {began_at} and did not end ({reason}). Find out "
            "whether it happened; with retry=True it is made again"
        )
        self.name = name
        self.began_at = began_at
        self.reason = reason


class OutputNotStorable(CallerError, TypeError):
    """A step was made, but what it gave cannot be stored; it will not be made again."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{_shortened(name)} was made, but its output cannot be stored: {reason}")
        self.name = name
        self.reason = reason


class StepMisused(CallerError, TypeError):
    """A step was asked for in a way in which it cannot be kept."""

    def __init__(self, name: object, reason: str) -> None:
        super().__init__(f"step {_shortened(name)}: {reason}")
        self.name = name
        self.reason = reason


class ExecutionEnded(CallerError, RuntimeError):
    """An execution is over, and nothing more can be asked of it."""

    def __init__(self, execution_id: str, outcome: str) -> None:
        super().__init__(f"execution {_shortened(execution_id)} is over: it {outcome or 'ended'}")
        self.execution_id = execution_id
        self.outcome = outcome


class ExecutionUnknown(CallerError, LookupError):
    """Redis holds nothing of an execution: it has not begun, or has expired."""

    def __init__(self, execution_id: str) -> None:
        super().__init__(f"nothing is known of execution {_shortened(execution_id)}")
        self.execution_id = execution_id


class AttemptStale(CallerError, RuntimeError):
    """A worker spoke for an attempt that another one had followed; nothing was stored."""

    def __init__(self, execution_id: str, attempt: int, current: int, claim: str = "") -> None:
        """`claim` is the id under which the current attempt was claimed."""
        super().__init__(
            f"attempt {attempt} of execution {_shortened(execution_id)} is stale; attempt "
            f"{current} has followed"
        )
        self.execution_id = execution_id
        self.attempt = attempt
        self.claim = claim


class AttemptClosed(CallerError, RuntimeError):
    """A worker spoke for an attempt that is over; nothing was stored."""

    def __init__(self, execution_id: str, attempt: int, outcome: str) -> None:
        super().__init__(f"attempt {attempt} of execution {_shortened(execution_id)} is over")
        self.execution_id = execution_id
        self.attempt = attempt
        self.outcome = outcome


class NoOpenQuestion(CallerError, LookupError):
    """An execution was answered that asks for nothing."""

    def __init__(self, execution_id: str) -> None:
        super().__init__(f"execution {_shortened(execution_id)} does not ask for input")
        self.execution_id = execution_id


class NoResult(CallerError, LookupError):
    """The result backend has nothing of an execution that is over: ignored, expired, or lost."""

    def __init__(self, execution_id: str, outcome: str, reason: str) -> None:
        super().__init__(
            f"there is no result of execution {_shortened(execution_id)}, which ended as "
            f"{outcome!s}{reason and f' ({reason})'}"
        )
        self.execution_id = execution_id
        self.outcome = outcome
        self.reason = reason


class InvalidId(CallerError, ValueError):
    """An id cannot be part of a key."""

    def __init__(self, what: str, value: object, reason: str) -> None:
        super().__init__(f"the {what} {_shortened(value)} {reason}")
        self.value = value


class StorageError(CapsuleError):
    """Redis did not do what was asked, or did not say so.

    `may_have_written` tells whether the write may have happened, or may still happen.
    `operation_id` is the id of the write: repeated under it, the same call is done at most once.
    """

    def __init__(
        self, message: str, *, may_have_written: bool = False, operation_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.may_have_written = may_have_written
        self.operation_id = operation_id

    def __str__(self) -> str:
        known = "the write may have happened" if self.may_have_written else "nothing was written"
        return f"{super().__str__()} ({known})"


class StorageUnavailable(StorageError, RetryError):
    """Redis cannot be reached, or the connection was lost or timed out."""


class StorageNotReady(StorageError, RetryError):
    """Redis answers, but does not serve now: it loads, fails over, or is read-only."""


class StorageForgotten(StorageError, RetryError):
    """A write was repeated so late that Redis no longer knows whether it had been done."""


class StorageFull(StorageError, OperatorError):
    """Redis is out of memory, or cannot save what it is told."""


class StorageDenied(StorageError, OperatorError):
    """Redis refuses this user: the password is wrong, or a permission is missing."""


class StorageUnusable(StorageError, OperatorError):
    """What is at the other end is no server for this package, or a key holds something else."""


class StorageClosed(CallerError, RuntimeError):
    """Connections were used after they had been closed."""


class ItemNotStorable(CallerError, TypeError):
    """An item of a batch cannot be stored as JSON; nothing of the batch was."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"item {index} cannot be stored: {reason}")
        self.index = index


class ItemTooLarge(CallerError, ValueError):
    """An item of a batch is over the limit of one item; nothing of the batch was stored."""

    def __init__(self, index: int, size: int, limit: int) -> None:
        super().__init__(f"item {index} has {size} bytes, over the limit of {limit}")
        self.index = index
        self.size = size
        self.limit = limit


class HistoryFull(CallerError):
    """A history would grow over its limit; nothing was written. Replace or clear it first."""

    def __init__(
        self, session_id: str, length: int, size: int, max_items: int, max_bytes: int
    ) -> None:
        super().__init__(
            f"history {_shortened(session_id)} holds {length} items of {size} bytes together; what "
            f"was to be added would take it over its limits of {max_items} items and {max_bytes} "
            "bytes"
        )
        self.session_id = session_id
        self.length = length
        self.size = size


class HistoryConflict(RetryError):
    """A history changed between reading and writing it; nothing was written. Read it again."""

    def __init__(self, session_id: str, reason: str) -> None:
        super().__init__(f"history {_shortened(session_id)}: {reason}; read it again")
        self.session_id = session_id


class UnknownKey(OperatorError):
    """A record was encrypted with a key that was not given."""

    def __init__(self, key_id: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no key has the id {key_id}; given were {known!r}")
        self.key_id = key_id


def _shortened(value: object, most: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
