"""The events of an execution's event stream, and the commands of its control stream.

Both are stored as MessagePack with a tag in the field `t`. Unknown fields are ignored, and an event
of an unknown type is read as `UnknownEvent`, so that workers and watchers of neighbouring versions
understand each other.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import msgspec

from capsule_tasks.protocol.messages import InputClosed, InputRequest, Streamed


class Outcome(StrEnum):
    """How an execution ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its worker died, and its task message is not redelivered."""
    IGNORED = "ignored"
    """The task raised Ignore."""
    REJECTED = "rejected"
    """The task rejected its message."""


AttemptOutcome = Literal["retry", "requeued", "replaced", "parked", "lost"]
"""How an attempt ended that another one follows."""

RUN_PARKED = "the run waits for a decision"
RUN_ELSEWHERE = "another worker has the run"
RUN_CANCELLED = "the run was cancelled"
"""The texts of the exceptions of Celery, a Retry and two Ignore, with which the task of a durable
run ends an attempt."""


class _Tagged(msgspec.Struct, kw_only=True, frozen=True, tag_field="t", omit_defaults=True):
    """A command, or an event. Events have no time: Redis sets that of an entry as it is added."""


class AttemptClaimed(_Tagged, kw_only=True, frozen=True, tag="attempt_claimed"):
    """A worker claimed the execution's next attempt."""

    worker: str
    task: str = ""


class Accepted(_Tagged, kw_only=True, frozen=True, tag="accepted"):
    """The code of the attempt runs, in this process."""

    pid: int = 0


class Stacks(_Tagged, kw_only=True, frozen=True, tag="stacks"):
    """The Python stacks that a `StackCommand` asked for."""

    in_reply_to: str
    text: str


class SessionRestored(_Tagged, kw_only=True, frozen=True, tag="session_restored"):
    """The named session has a new child: what its namespace has now, before the call runs."""

    saved_at: float | None = None
    """When the checkpoint was made, by Redis's clock; None if there is none, and so no name."""
    lost_calls: int = 0
    """Calls that ran after the checkpoint was made: what they changed is lost."""
    lost: tuple[str, ...] = ()
    """Names that could not be saved, or not be restored."""
    differences: tuple[str, ...] = ()
    """Versions of Python and of packages that differ from those that made the checkpoint."""


class AttemptEnded(_Tagged, kw_only=True, frozen=True, tag="attempt_ended"):
    """This attempt ended, and another one follows."""

    outcome: AttemptOutcome
    detail: str = ""


class Ended(_Tagged, kw_only=True, frozen=True, tag="ended"):
    """The last event of every execution. The value itself is in the result backend."""

    outcome: Outcome
    type: str = ""
    message: str = ""
    traceback: str = ""
    result_text: str = ""
    """A shortened `repr` of the value."""
    runtime_s: float | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class UnknownEvent(msgspec.Struct, kw_only=True, frozen=True):
    """An event of a type that this version does not know."""

    type: str


EventMessage = (
    AttemptClaimed
    | Accepted
    | Streamed
    | InputRequest
    | InputClosed
    | Stacks
    | SessionRestored
    | AttemptEnded
    | Ended
)


class _Stored(msgspec.Struct, array_like=True):
    message: EventMessage
    offset: int = 0
    """Bytes of output that the attempt had written before this event."""


class _Envelope(msgspec.Struct):
    t: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode
_decode_envelope = msgspec.msgpack.Decoder(tuple[_Envelope, msgspec.Raw]).decode


def encode_event(message: EventMessage, offset: int = 0) -> bytes:
    return _encode(_Stored(message, offset))


def decode_event(data: bytes) -> tuple[EventMessage | UnknownEvent, int]:
    """The event and its offset. Bytes that are no event give an `UnknownEvent`, never an error."""
    try:
        stored = _decode(data)
    except msgspec.MsgspecError:
        try:
            tag = _decode_envelope(data)[0].t
        except msgspec.MsgspecError:
            tag = ""
        return UnknownEvent(type=tag), 0
    return stored.message, stored.offset


# --- commands ----------------------------------------------------------------------------------


class CancelCommand(_Tagged, kw_only=True, frozen=True, tag="cancel"):
    """Stop the execution: in order within the grace, else by force."""

    grace_s: float | None = None
    requested_by: str = ""
    """The user, host and process of the caller, for the worker's log."""


class InterruptCommand(_Tagged, kw_only=True, frozen=True, tag="interrupt"):
    """Raise KeyboardInterrupt in the execution."""


class RespondCommand(_Tagged, kw_only=True, frozen=True, tag="respond"):
    """Answer a question of the execution: the one named, or the one that is open."""

    text: str = ""
    request_id: str = ""
    eof: bool = False


class StackCommand(_Tagged, kw_only=True, frozen=True, tag="stack"):
    """Publish the Python stacks of the execution as an event."""

    request_id: str
    all_frames: bool = False
    """Include the frames of Celery's own code."""


Command = CancelCommand | InterruptCommand | RespondCommand | StackCommand
encode_command = _encode
_decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode


def decode_command(data: bytes) -> Command | None:
    """The command, or None for one that this version does not know."""
    try:
        return _decode_command(data)
    except msgspec.MsgspecError:
        return None
