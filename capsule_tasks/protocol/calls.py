"""Calls of named sessions, as they wait in a session's log.

They are stored as MessagePack. Unknown fields are ignored and new fields have defaults, so that
producers and workers of neighbouring versions understand each other.
"""

from __future__ import annotations

import msgspec


class SessionCall(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One request to run code in a named session. Its id is the id of its execution."""

    source: str
    timeout_s: float | None = None
    task: str = ""
    """The name of the Celery task that the call came as, if it did."""
    producer: str = ""
    """The user, host and process of the caller, for the worker's log."""
    group: str = ""
    index: int = -1
    """The place in the group."""
    submitted_at: float = 0.0
    """By the producer's clock."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionCall).decode


def encode_call(call: SessionCall) -> bytes:
    return _encode(call)


def decode_call(payload: bytes) -> SessionCall:
    """The call; raises msgspec.MsgspecError for bytes that are none."""
    return _decode(payload)
