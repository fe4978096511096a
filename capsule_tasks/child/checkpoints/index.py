"""The index at the end of a checkpoint's data.

The data is one pickle for each name, then an index in MessagePack, then its length and a mark.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from capsule_tasks.child.checkpoints.pieces import PieceReader
from capsule_tasks.child.executors.outcomes import message_of, type_name
from capsule_tasks.protocol.values import sendable

LIVE_NAMESPACE = "namespace"
CODE_TYPE = "code"
"""Persistent ids; that of a module is a tuple."""
_MARK = b"capsule2"
_LENGTH_BYTES = 4
_MAX_REASON = 500


class NotSaved(Exception):
    """The namespace cannot be saved as asked, or the bytes are no checkpoint."""


class Entry(NamedTuple):
    """A name in the index, and where its pickle ends."""

    name: str
    end: int


class Index(msgspec.Struct):
    """The names in a checkpoint, and what made it."""

    mark: str
    """With the number of a name, the first object in the pickle of that name, and in no other."""
    entries: list[Entry]
    python: str
    packages: dict[str, str]


def packed(index: Index) -> bytes:
    """The end of the data."""
    body = msgspec.msgpack.encode(index)
    return body + len(body).to_bytes(_LENGTH_BYTES, "big") + _MARK


def index_of(reader: PieceReader) -> Index:
    """The index of a checkpoint; the reader is at its beginning then."""
    tail = _LENGTH_BYTES + len(_MARK)
    reader.seek(max(0, reader.size - tail))
    end = reader.read(tail)
    if len(end) < tail or not end.endswith(_MARK):
        raise NotSaved("the data is not a checkpoint of this version")
    size = int.from_bytes(end[:_LENGTH_BYTES], "big")
    reader.seek(max(0, reader.size - tail - size))
    try:
        index = msgspec.msgpack.decode(reader.read(size), type=Index)
    except msgspec.MsgspecError as fault:
        raise NotSaved("the data is not a whole checkpoint") from fault
    reader.seek(0)
    return index


def reason_of(what: str, fault: BaseException) -> str:
    """Why a name is skipped or lost."""
    return sendable(f"{what}{type_name(type(fault))}: {message_of(fault)}")[:_MAX_REASON]
