"""Telling values apart more strictly than `==` does."""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from typing import Any


def fingerprint(value: Any) -> Any:
    """Equal for two values if and only if they have the same types and values all the way down.

    NaN equals itself, 0.0 is not -0.0, True is not 1, and dicts keep their order.
    """
    kind = type(value)
    return kind.__name__, _WITHIN.get(kind, repr)(value)


def _float(value: float) -> Any:
    return "nan" if value != value else struct.pack("d", value)  # noqa: PLR0124 - that is NaN


def _moment(value: dt.datetime | dt.time) -> Any:
    return value.replace(tzinfo=None).isoformat(), value.utcoffset(), value.fold


def _ordered(value: Any) -> Any:
    return tuple(fingerprint(item) for item in value)


def _unordered(value: Any) -> Any:
    return tuple(sorted((fingerprint(item) for item in value), key=repr))


_WITHIN: dict[type, Any] = {
    int: hex,  # repr of a large one is quadratic, and refused
    float: _float,
    complex: lambda v: (_float(v.real), _float(v.imag)),
    decimal.Decimal: str,
    dt.datetime: _moment,
    dt.time: _moment,
    list: _ordered,
    tuple: _ordered,
    set: _unordered,
    frozenset: _unordered,
    dict: lambda v: tuple((fingerprint(key), fingerprint(item)) for key, item in v.items()),
}
