"""Items as the bytes of records, and back.

What is stored reads back as the JSON that it is. Most items take the fast way, which is checked by
reading the record again: where that gives something else (a tuple, a date, NaN), the standard
library decides whether the item is JSON at all.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import msgspec

Item = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode_lines = msgspec.json.Encoder().encode_lines
_decode_lines = msgspec.json.Decoder(dict[str, Any]).decode_lines
_texts = msgspec.msgpack.Decoder(list[str]).decode
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_HEAD_BYTES = {0xD9: 2, 0xDA: 3, 0xDB: 5}
"""The header sizes of MessagePack texts, by their first byte. Short texts have one byte."""
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Unreadable(Exception):
    """A record is no item: it is skipped, counted, and never handed out."""


class Codec(Protocol):
    """Turns the items of one session into records; `session_id` binds a record to it.

    `guard` keeps records from being taken that this codec may be unable to open: how every sealed
    record begins, then how those begin that it has a key for. Empty guards nothing.
    """

    @property
    def guard(self) -> tuple[bytes, ...]: ...

    def encode(self, item: Item, session_id: str) -> bytes:
        """The record of an item; raises TypeError or ValueError with the reason why not."""

    def decode(self, record: bytes, session_id: str) -> Item:
        """The item of a record; raises Unreadable."""


class JsonCodec:
    """Records are JSON in UTF-8."""

    guard: tuple[bytes, ...] = ()

    def encode(self, item: Item, session_id: str) -> bytes:  # noqa: ARG002  part of the contract
        return encoded(item)

    def decode(self, record: bytes, session_id: str) -> Item:  # noqa: ARG002  as above
        return decoded(record)


def encoded(item: Item) -> bytes:
    if not isinstance(item, dict):
        raise TypeError(f"an item is a dict, and this is {type(item).__name__}: {item!r:.100}")
    try:
        # The standard library knows why this fails, or does better.
        with suppress(TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            record = _encode(item)
            if _decode(record) == item:
                return record
        record = json.dumps(item, allow_nan=False, separators=(",", ":")).encode()
        decoded(record)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Unreadable as unreadable:
        raise ValueError(f"it would not be readable: {unreadable}") from None
    return record


def all_encoded(items: list[Item]) -> list[bytes] | None:
    """The records of plain items, without a step of Python for each; None if one needs a look."""
    try:
        lines = _encode_lines(items)
        if _decode_lines(lines) != items:
            return None
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None
    return lines.splitlines()


def decoded(record: bytes) -> Item:
    try:
        return _decode(record)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return _decoded_slowly(record)


def all_decoded(packed: list[bytes]) -> list[Item] | None:
    """The items of plain records, without a step of Python for each; None if one needs a look."""
    try:
        return [item for some in packed for item in map(_decode, _texts(some))]
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def unpacked(packed: list[bytes]) -> list[bytes]:
    """The records that Redis packed as MessagePack, whatever their bytes are."""
    raws = (bytes(raw) for some in packed for raw in _raws(some))
    return [raw[_HEAD_BYTES.get(raw[0], 1) :] for raw in raws]


def _decoded_slowly(record: bytes) -> Item:
    """Encode JSON that the fast encoder refuses: lone surrogates, numbers beyond a double."""
    try:
        item = json.loads(record.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from None
    if not isinstance(item, dict):
        raise Unreadable(f"it is of type {type(item).__name__}, not an object")
    return item


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def canonical(item: Item) -> str:
    """Equal for items that are the same JSON in any order of keys; 1, 1.0 and true differ."""
    return _canonical(item)
