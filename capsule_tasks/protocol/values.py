"""Values of user code, carried by MessagePack with their types where that is possible.

MessagePack has no tuples, sets, complex or big numbers, and its timestamps know one type of
datetime. Those travel as extensions. Of any other value, a subclass included, only the repr is
carried, and marked, so that it is not mistaken for the value.
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
    """The value contains something that MessagePack cannot carry."""


def sendable(text: str) -> str:
    """`text` as a plain str, with escapes for what UTF-8 cannot encode. Runs no user code."""
    text = str.__str__(text)
    return text if _is_utf8(text) else text.encode("utf-8", "backslashreplace").decode()


def to_wire(value: object) -> Any:
    """`value` in a form that MessagePack carries and `revive` reverses; or NotCarried."""
    try:
        return _pack(value, 0)
    except RecursionError:
        raise NotCarried("nested too deeply for this stack") from None


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
        return _ext(_SEQUENCES[kind], [_pack(item, depth + 1) for item in list(value)])
    if kind in _SCALARS:
        code, write, *_ = _SCALARS[kind]
        return _ext(code, write(value))
    return _pack(_numpy_item(value), depth + 1)


def _pack_dict(value: dict[Any, Any], depth: int) -> Any:
    # Copied first, like the sequences above: another thread may change it meanwhile.
    pairs = [(_pack(key, depth), _pack(item, depth)) for key, item in list(value.items())]
    if any(type(key) is msgspec.msgpack.Ext for key, _ in pairs):
        return _ext(_DICT, pairs)
    return dict(pairs)


def _numpy_item(value: Any) -> Any:
    """A NumPy scalar as the equal Python object; NotCarried if there is none."""
    kind = type(value)
    if issubclass(kind, getattr(sys.modules.get("numpy"), "generic", ())):
        item = value.item()
        if type(item) in _NUMPY_ITEMS.get(value.dtype.kind, ()):
            return item
    raise NotCarried(kind.__name__)


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
_NUMPY_ITEMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys("biufcUS", (bool, int, float, complex, str, bytes)),
    # not the bare number that a finer unit than ours gives
    **dict.fromkeys("Mm", (dt.date, dt.datetime, dt.timedelta)),
}


def _fields(moment: dt.datetime | dt.time) -> list[Any]:
    return [moment.replace(tzinfo=None).isoformat(), _offset(moment), moment.fold]


def _offset(value: dt.datetime | dt.time) -> float | None:
    """Seconds from UTC at this moment; the rules of the zone are not carried."""
    if value.tzinfo is None:
        return None
    offset = value.utcoffset()
    if offset is None:
        raise NotCarried("a zone without an offset")
    return offset.total_seconds()


def _bounds(value: range) -> list[int]:
    bounds = [value.start, value.stop, value.step]
    if all(-(2**63) <= number < 2**63 for number in bounds):
        return bounds
    raise NotCarried("range")


def _moment(kind: Any, fields: tuple[str, float | None, int]) -> Any:
    text, offset, fold = fields
    zone = None if offset is None else dt.timezone(dt.timedelta(seconds=offset))
    return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def revive(code: int, payload: memoryview) -> object:
    """The value of an extension; ValueError if `to_wire` never makes such a code or payload."""
    reviver = _REVIVERS.get(code)
    if reviver is None:
        raise ValueError(f"extension {code} is not one of this protocol")
    read, build = reviver
    return build(read(payload))


def _reader(kind: Any) -> Callable[[memoryview], Any]:
    """A reader of payloads of one type, which refuses any other.

    Otherwise a few hostile bytes could be a tuple of a range of 2**62, or a Decimal of a large
    integer, which takes quadratic time.
    """
    return msgspec.msgpack.Decoder(kind, ext_hook=revive).decode


_text, _items = _reader(str), _reader(list[Any])
_moment_fields = _reader(tuple[str, float | None, int])
_integers = _reader(tuple[int, int, int])

_BIG_INT, _TEXT, _DICT = 1, 6, 15
_SEQUENCES: dict[type, int] = {tuple: 2, set: 3, frozenset: 4}
_Reader = Callable[[memoryview], Any]
_SCALARS: dict[type, tuple[int, Callable[[Any], object], _Reader, Callable[[Any], object]]] = {
    complex: (5, lambda v: [v.real, v.imag], _reader(tuple[float, float]), lambda v: complex(*v)),
    dt.datetime: (7, _fields, _moment_fields, lambda v: _moment(dt.datetime, v)),
    dt.date: (8, dt.date.isoformat, _text, dt.date.fromisoformat),
    dt.time: (9, _fields, _moment_fields, lambda v: _moment(dt.time, v)),
    dt.timedelta: (
        10,
        lambda v: [v.days, v.seconds, v.microseconds],
        _integers,
        lambda v: dt.timedelta(*v),
    ),
    decimal.Decimal: (11, str, _text, decimal.Decimal),
    uuid.UUID: (12, lambda v: v.bytes, bytes, lambda v: uuid.UUID(bytes=v)),
    bytearray: (13, bytes, bytes, bytearray),
    range: (14, _bounds, _integers, lambda v: range(*v)),
}
"""By type: the code, the payload, how that is read, and the value of what was read."""

_REVIVERS: dict[int, tuple[_Reader, Callable[[Any], object]]] = {
    _BIG_INT: (_text, lambda v: int(v, 16)),
    _TEXT: (bytes, lambda v: v.decode("utf-8", "surrogatepass")),
    _DICT: (_reader(list[tuple[Any, Any]]), dict),
    **{code: (_items, kind) for kind, code in _SEQUENCES.items()},
    **{code: (read, build) for code, _, read, build in _SCALARS.values()},
}
