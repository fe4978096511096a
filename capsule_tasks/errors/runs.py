"""Errors of durable runs (their snapshots, claims, approvals, tool calls) and of steps of tasks."""

from __future__ import annotations

from capsule_tasks.errors.agents import RunStopped
from capsule_tasks.errors.base import (
    CallerError,
    OperatorError,
    RetryError,
    described,
)


@described("the snapshot of a run is unusable at {where}: {reason}")
class InvalidRunState(CallerError, ValueError):
    """A snapshot of a run is not what its schema version says; its values are not repeated here."""

    where: str
    reason: str


@described(
    "schema version {version!r} is not readable here; readable are {readable}. Leave the run to a "
    "newer release"
)
class UnreadableSchema(OperatorError):
    """A snapshot of a run was written by a release whose schema this one does not read."""

    version: str
    readable: tuple[str, ...]


@described("no agent of the graph is {name!r}{with_tag}; it has {known}")
class UnknownAgent(CallerError, LookupError):
    """A snapshot names an agent that the graph does not have."""

    name: str
    tag: str | None
    known: tuple[str, ...]

    @property
    def with_tag(self) -> str:
        return f" with tag {self.tag}" if self.tag else ""


@described("no agent is registered as {name!r}; registered are {known:no agents}")
class AgentNotRegistered(UnknownAgent):
    """A run is of an agent that this process has not registered under `capsule.runs`."""


@described("{count} agents are named {name!r} and cannot be told apart; give each a key of its own")
class AmbiguousAgent(CallerError, LookupError):
    """Several agents of one name cannot be told apart; give each a key of its own."""

    name: str
    count: int


@described("call {call_id!r} {what}: {reason}")
class UnknownCall(CallerError, LookupError):
    """No tool call with this id waits for a decision, or was started."""

    call_id: str
    reason: str
    what: str = "waits for no decision"


@described("the context of type {kind} cannot be stored: {reason}")
class ContextNotStorable(CallerError, TypeError):
    """The context of a run cannot be stored so that it comes back as it was."""

    kind: str
    reason: str


@described("the context of type {kind} cannot be restored: {reason}")
class ContextNotRestorable(CallerError, TypeError):
    """The context of a run was stored in a form that only its owner can read."""

    kind: str
    reason: str


@described("there is no run {run_id!r}, or it ended long ago")
class RunNotFound(CallerError, LookupError):
    """There is no run with this id: it was never created, or it ended long ago."""

    run_id: str


@described("run {run_id!r} exists already, and is {status}")
class RunExists(CallerError, ValueError):
    """A run with this id was created before; it stays as it is."""

    run_id: str
    status: str


@described("run {run_id!r} is claimed by {owner!r}")
class RunClaimed(RetryError):
    """Another worker has claimed the run, and its lease has not lapsed."""

    run_id: str
    owner: str


@described("run {run_id!r} has ended: {status}")
class RunEnded(CallerError, RuntimeError):
    """The run has ended; nothing about it can be changed any more.

    A claim that is refused has the result and the error with which the owner ended the run.
    """

    run_id: str
    status: str
    result: bytes = b""
    error: bytes = b""


@described("run {run_id!r} failed ({kind}): {type}: {message}")
class RunFailed(CallerError, RuntimeError):
    """The run has failed; its history is kept. Raised by `.get()` and `.result()`.

    `kind` is `max_turns`, `model`, `tool`, `guardrail`, `timeout`, `uncertain`, `lost` or `error`.
    """

    run_id: str
    kind: str
    type: str
    message: str


@described("run {run_id!r} was cancelled by {by}")
class RunCancelled(CallerError, RuntimeError):
    """The run was cancelled; its history is that of its completed turns."""

    run_id: str
    by: str


@described("session {session_id!r} was forgotten, and run {run_id!r} with it")
class RunForgotten(CallerError, LookupError):
    """The session of a run was erased before the run had ended."""

    session_id: str
    run_id: str


@described("run {run_id!r} is parked: it waits for decisions on {calls} calls")
class RunParked(CallerError, RuntimeError):
    """The run waits for decisions and cannot continue before one is taken."""

    run_id: str
    calls: int


@described("the claim on run {run_id!r} is lost; its status is {status} now")
class RunClaimLost(RetryError):
    """This worker has lost its claim on the run: stop, and write nothing more. Claim it again."""

    run_id: str
    status: str


@described("run {run_id!r} is at revision {revision}; claim it again")
class RunConflict(RetryError):
    """The run is at another revision than its owner believes; nothing was written."""

    run_id: str
    revision: int


@described("run {run_id!r} is {status} after a wait of {timeout_s} s")
class RunTimeout(CallerError, TimeoutError):
    """A run did not end, or did not park, within the time in which its caller waited for it."""

    run_id: str
    status: str
    timeout_s: float


@described("{what} has {size} bytes, over the limit of {limit}")
class RunTooLarge(CallerError, ValueError):
    """A snapshot or an output is over its limit; nothing was written."""

    what: str
    size: int
    limit: int


@described("call {call_id!r} already has a decision: {decision}")
class AlreadyDecided(CallerError, RuntimeError):
    """The call was decided on before; the decision that counts is in `decision`."""

    call_id: str
    decision: object


@described("the time to decide on call {call_id!r} has passed: {decision}")
class DecisionExpired(CallerError, TimeoutError):
    """The time for a decision had passed; what was to happen then has happened.

    With `resume` the caller that gets this error has to send the run on, as after a decision.
    """

    call_id: str
    decision: object
    resume: bool
    updated_us: int


@described("{who:an unnamed person} may not decide on call {call_id!r}; allowed: {may:nobody}")
class MayNotDecide(CallerError, PermissionError):
    """The decision is for others to take."""

    call_id: str
    who: tuple[str, ...]
    may: tuple[str, ...]


@described("call {call_id!r} is not approved")
class CallNotApproved(CallerError, RuntimeError):
    """A tool call was to be made though its approval is missing, or was refused; nothing ran."""

    call_id: str


# --- models, tools and guardrails of our own engine ----------------------------------------------


@described("model {model!r} gave no complete reply: {why}")
class ModelFailed(RunStopped, RetryError, RuntimeError):
    """A call to a model ended without a complete reply; nothing in the run depends on it.

    With `is_retryable` another attempt may succeed: the model was busy, out of reach or too slow.
    `retry_after_s` is the pause that its server asks for, and `status` the HTTP status.
    """

    model: str
    why: str
    is_retryable: bool = False
    retry_after_s: float | None = None
    status: int | None = None


@described("the model misbehaved: {reason}")
class ModelMisbehaved(RunStopped, RetryError):
    """A complete reply that cannot be used: it is not of the output type, or names no tool."""

    reason: str


@described("the compaction failed: {reason}. The history is as it was")
class CompactionFailed(RetryError):
    """A compactor made nothing that can stand for the old items; the history is as it was."""

    reason: str


@described("the arguments of {tool} are wrong: {reason}. Call it again with other arguments")
class WrongArguments(CallerError, ValueError):
    """The arguments that a model gave to a tool do not fit the tool's schema; nothing ran.

    The text of this error is for the model.
    """

    tool: str
    reason: str


@described("{tool} ran longer than {timeout_s} s; it may have been made, or still be running")
class ToolTimeout(RunStopped, CallerError, TimeoutError):
    """A tool call took longer than its tool allows. A function in a thread goes on in there."""

    tool: str
    timeout_s: float


# --- steps, and calls that must not happen twice -----------------------------------------------


@described("call {call_id!r} was used before: {reason}")
class CallChanged(RunStopped, CallerError, ValueError):
    """An id that was used before came back with another tool or other arguments; nothing ran."""

    call_id: str
    reason: str


@described(
    "{name!r} started at {began_at} and did not finish ({reason}). Find out whether it happened; "
    "with retry=True it is made again"
)
class EffectUncertain(OperatorError):
    """A step started, and whether it was made is unknown; it is not made again by itself."""

    name: str
    began_at: str
    reason: str


@described("{name!r} was made, but its output cannot be stored: {reason}")
class OutputNotStorable(CallerError, TypeError):
    """A step was made, but what it returned cannot be stored; it is not made again."""

    name: str
    reason: str


@described("step {name!r}: {reason}")
class StepMisused(CallerError, TypeError):
    """A step was asked for in a way in which it cannot be kept."""

    name: object
    reason: str
