"""What the stream of an execution holds: its own words as the child said them, and its milestones.

Each is stored as MessagePack with its tag in `t`; unknown fields are ignored, and an event of an
unknown type is read as `UnknownEvent`, so that workers and watchers of neighbouring versions get
along. Commands to an execution are at the end of this file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from capsule_tasks.protocol.messages import Gap, InputClosed, InputRequest, Output, Progress


class Outcome(StrEnum):
    """How an execution ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its worker died, and its message does not come again."""
    IGNORED = "ignored"
    """The task raised Ignore."""
    REJECTED = "rejected"
    """The task rejected its message."""


How = Literal["retry", "requeued", "replaced", "lost"]


class _Event(msgspec.Struct, kw_only=True, frozen=True, tag_field="t", omit_defaults=True):
    """What is stored, once; Redis says when."""


class Begun(_Event, kw_only=True, frozen=True, tag="begun"):
    """A worker took the execution: an attempt begins."""

    worker: str
    task: str = ""


class Accepted(_Event, kw_only=True, frozen=True, tag="accepted"):
    """Its code runs, in this process."""

    pid: int = 0


class Stacks(_Event, kw_only=True, frozen=True, tag="stacks"):
    """The Python stacks that somebody asked for."""

    in_reply_to: str
    text: str


class AttemptEnded(_Event, kw_only=True, frozen=True, tag="attempt_ended"):
    """This attempt is over, and another follows."""

    how: How
    detail: str = ""


class Ended(_Event, kw_only=True, frozen=True, tag="ended"):
    """The one last event. Values are in the result backend; `text` describes this one."""

    outcome: Outcome
    type: str = ""
    message: str = ""
    traceback: str = ""
    text: str = ""
    runtime_s: float | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class UnknownEvent(msgspec.Struct, kw_only=True, frozen=True):
    """An event that this version does not know."""

    type: str


EventMessage = (
    Begun
    | Accepted
    | Output
    | Progress
    | InputRequest
    | InputClosed
    | Gap
    | Stacks
    | AttemptEnded
    | Ended
)


class _Stored(msgspec.Struct, array_like=True):
    message: EventMessage
    offset: int = 0
    """Bytes of text that the attempt's output had before this."""


class _Envelope(msgspec.Struct):
    t: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode
_decode_raw = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw]).decode
_decode_tag = msgspec.msgpack.Decoder(_Envelope).decode


def encode_event(message: EventMessage, offset: int = 0) -> bytes:
    return _encode(_Stored(message, offset))


def decode_event(data: bytes) -> tuple[EventMessage | UnknownEvent, int]:
    """The message and its offset; never fails, whatever a stranger has written."""
    try:
        stored = _decode(data)
    except msgspec.MsgspecError:
        try:
            tag = _decode_tag(_decode_raw(data)[0]).t
        except msgspec.MsgspecError:
            tag = ""
        return UnknownEvent(type=tag), 0
    return stored.message, stored.offset


# --- what an execution is told -----------------------------------------------------------------


class _Command(msgspec.Struct, kw_only=True, frozen=True, tag_field="t", omit_defaults=True):
    pass


class CancelCommand(_Command, kw_only=True, frozen=True, tag="cancel"):
    """End it: in order within the grace, else by force."""

    grace_s: float | None = None
    asker: str = ""
    """The user, host and process that asked for it, for the worker's log."""


class InterruptCommand(_Command, kw_only=True, frozen=True, tag="interrupt"):
    """Raise KeyboardInterrupt in it."""


class RespondCommand(_Command, kw_only=True, frozen=True, tag="respond"):
    """Answer its question; the one that is open, if none is named."""

    text: str = ""
    request_id: str = ""
    eof: bool = False


class StackCommand(_Command, kw_only=True, frozen=True, tag="stack"):
    """Say where it is, in an event."""

    request_id: str
    all_frames: bool = False
    """Also those of Celery's own code."""


Command = CancelCommand | InterruptCommand | RespondCommand | StackCommand
encode_command = _encode
_decode_command = msgspec.msgpack.Decoder(Command).decode


def decode_command(data: bytes) -> Command | None:
    """The command, or None for one that this version does not know."""
    try:
        command: Command = _decode_command(data)
    except msgspec.MsgspecError:
        return None
    return command
