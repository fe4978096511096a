"""Calls of named sessions, as they wait in a session's log, and requests to the owner.

They are stored as MessagePack. Unknown fields are ignored and new fields have defaults, so that
producers and workers of neighbouring versions understand each other.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from capsule_tasks.protocol.messages import NamespaceEntry


class SessionCall(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One request to run code in a named session. Its id is the id of its execution."""

    source: str
    timeout_s: float | None = None
    task: str = ""
    """The name of the Celery task that the call came as, if it did."""
    group: str = ""
    index: int = -1
    """The place in the group."""


_NAME = "session "


def task_of_session(session_id: str) -> str:
    """The name under which a call is listed that did not come as a Celery task."""
    return f"{_NAME}{session_id}"


def session_of_task(task: str) -> str | None:
    """The session whose call is listed so; None for anything else."""
    return task.removeprefix(_NAME) if task.startswith(_NAME) else None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionCall).decode


def encode_call(call: SessionCall) -> bytes:
    return _encode(call)


def decode_call(payload: bytes) -> SessionCall:
    """The call; raises msgspec.MsgspecError for bytes that are none."""
    return _decode(payload)


# --- requests to the owner, past the calls that wait ----------------------------------------------


class _Tagged(msgspec.Struct, kw_only=True, frozen=True, tag_field="t", omit_defaults=True):
    """A request to the owner of a session, or a reply to one."""


class RestartRequest(_Tagged, kw_only=True, frozen=True, tag="restart"):
    """Stop the call that runs and go on with an empty namespace; the checkpoint is deleted."""


class CheckpointRequest(_Tagged, kw_only=True, frozen=True, tag="checkpoint"):
    """Make a checkpoint as soon as no call runs."""


class NamesRequest(_Tagged, kw_only=True, frozen=True, tag="names"):
    """List the names in the namespace."""


SessionRequest = RestartRequest | CheckpointRequest | NamesRequest


class RequestDone(_Tagged, kw_only=True, frozen=True, tag="done"):
    """The owner did what was asked."""


class RequestFailed(_Tagged, kw_only=True, frozen=True, tag="failed"):
    """The owner could not do what was asked."""

    message: str


class CheckpointMade(_Tagged, kw_only=True, frozen=True, tag="checkpoint_made"):
    """A checkpoint is stored."""

    at: float
    size: int
    saved: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    """The names that could not be saved, with the reasons."""


class NamesListed(_Tagged, kw_only=True, frozen=True, tag="names_listed"):
    """The names in the namespace; `total` counts also those that are not listed."""

    total: int
    entries: tuple[NamespaceEntry, ...] = ()


SessionReply = RequestDone | RequestFailed | CheckpointMade | NamesListed

_decode_request: Callable[[bytes], SessionRequest] = msgspec.msgpack.Decoder(SessionRequest).decode
_decode_reply: Callable[[bytes], SessionReply] = msgspec.msgpack.Decoder(SessionReply).decode


def encode_request(request: SessionRequest) -> bytes:
    return _encode(request)


def encode_reply(reply: SessionReply) -> bytes:
    return _encode(reply)


def decode_request(payload: bytes) -> SessionRequest | None:
    """The request, or None for one that this version does not know."""
    try:
        return _decode_request(payload)
    except msgspec.MsgspecError:
        return None


def decode_reply(payload: bytes) -> SessionReply:
    """The reply; raises msgspec.MsgspecError for bytes that are none."""
    return _decode_reply(payload)
