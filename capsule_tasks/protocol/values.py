"""Values of user code, carried by MessagePack with their types where that can be done.

MessagePack has no tuples, sets, complex or big numbers, and its timestamps know one type of
datetime. Those travel as extensions. Anything else, a subclass included, is not carried: its repr
is, marked as such, so that nobody mistakes a look-alike for the value.
"""

from __future__ import annotations

import datetime as dt
import decimal
import sys
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

_MAX_DEPTH = 200

_encode = msgspec.msgpack.Encoder().encode


class NotCarried(Exception):
    """The value holds something MessagePack cannot carry."""


def to_wire(value: object) -> Any:
    """`value` in a form that MessagePack carries and `revive` turns back; or NotCarried."""
    return _pack(value, 0)


def _pack(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _ext(_BIG_INT, str(hex(value)))
    if kind is str:
        return value if _is_utf8(value) else _ext(_TEXT, value.encode("utf-8", "surrogatepass"))
    if depth > _MAX_DEPTH:
        raise NotCarried("nested too deeply")
    if kind is list:
        return [_pack(item, depth + 1) for item in value]
    if kind is dict:
        return _pack_dict(value, depth + 1)
    if kind in _SEQUENCES:
        return _ext(_SEQUENCES[kind], [_pack(item, depth + 1) for item in value])
    if kind in _SCALARS:
        code, write = _SCALARS[kind]
        return _ext(code, write(value))
    return _pack(_numpy_item(value), depth + 1)


def _pack_dict(value: dict[Any, Any], depth: int) -> Any:
    pairs = [(_pack(key, depth), _pack(item, depth)) for key, item in value.items()]
    if any(type(key) is msgspec.msgpack.Ext for key, _ in pairs):
        return _ext(_DICT, pairs)
    return dict(pairs)


def _numpy_item(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        if type(item) is not type(value):
            return item
    raise NotCarried(type(value).__name__)


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ext(code: int, payload: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, payload if type(payload) is bytes else _encode(payload))


_PLAIN = frozenset({type(None), bool, float, bytes})
_BIG_INT, _TUPLE, _SET, _FROZENSET, _COMPLEX, _TEXT = 1, 2, 3, 4, 5, 6
_DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _UUID, _BYTEARRAY, _RANGE, _DICT = range(7, 16)

_SEQUENCES: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}

_SCALARS: dict[type, tuple[int, Callable[[Any], object]]] = {
    complex: (_COMPLEX, lambda v: [v.real, v.imag]),
    dt.datetime: (_DATETIME, lambda v: [v.replace(tzinfo=None).isoformat(), _offset(v), v.fold]),
    dt.date: (_DATE, dt.date.isoformat),
    dt.time: (_TIME, dt.time.isoformat),
    dt.timedelta: (_TIMEDELTA, lambda v: [v.days, v.seconds, v.microseconds]),
    decimal.Decimal: (_DECIMAL, str),
    uuid.UUID: (_UUID, lambda v: v.bytes),
    bytearray: (_BYTEARRAY, bytes),
    range: (_RANGE, lambda v: [_checked(v.start), _checked(v.stop), _checked(v.step)]),
}


def _offset(value: dt.datetime) -> float | None:
    offset = value.utcoffset()
    return None if offset is None else offset.total_seconds()


def _checked(number: int) -> int:
    if -(2**63) <= number < 2**63:
        return number
    raise NotCarried("range")


def _datetime(fields: list[Any]) -> dt.datetime:
    text, offset, fold = fields
    zone = None if offset is None else dt.timezone(dt.timedelta(seconds=offset))
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


_REVIVERS: dict[int, Callable[[Any], object]] = {
    _BIG_INT: lambda v: int(v, 16),
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _COMPLEX: lambda v: complex(*v),
    _DATETIME: _datetime,
    _DATE: dt.date.fromisoformat,
    _TIME: dt.time.fromisoformat,
    _TIMEDELTA: lambda v: dt.timedelta(*v),
    _DECIMAL: decimal.Decimal,
    _RANGE: lambda v: range(*v),
    _DICT: dict,
}
_RAW_REVIVERS: dict[int, Callable[[bytes], object]] = {
    _TEXT: lambda v: v.decode("utf-8", "surrogatepass"),
    _UUID: lambda v: uuid.UUID(bytes=v),
    _BYTEARRAY: bytearray,
}


def revive(code: int, payload: memoryview) -> object:
    """The value of an extension; ValueError for a code or payload that `to_wire` never makes."""
    raw = _RAW_REVIVERS.get(code)
    if raw is not None:
        return raw(bytes(payload))
    reviver = _REVIVERS.get(code)
    if reviver is None:
        raise ValueError(f"extension {code} is not one of this protocol")
    return reviver(_decode(payload))


_decode = msgspec.msgpack.Decoder(ext_hook=revive).decode
