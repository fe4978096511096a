"""Values that are not carried: look-alikes, unknown objects, structures without an end."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import sys
import types
import uuid
from typing import Any

import numpy as np
import pytest

from capsule_tasks.protocol.values import NotCarried, to_wire


def subclass(base: type) -> type:
    return type(f"My{base.__name__}", (base,), {})


class Colour(enum.IntEnum):
    RED = 1


class Zoneless(dt.tzinfo):
    def utcoffset(self, _: Any) -> None:
        return None


@dataclasses.dataclass
class Point:
    x: int = 0


SUBCLASSES = [
    subclass(base)(*args)
    for base, args in [
        (int, (1,)),
        (float, (1.0,)),
        (complex, (1j,)),
        (str, ("x",)),
        (bytes, (b"x",)),
        (bytearray, (b"x",)),
        (list, ([1],)),
        (tuple, ([1],)),
        (set, ([1],)),
        (frozenset, ([1],)),
        (dict, ({"a": 1},)),
        (dt.date, (2000, 1, 1)),
        (dt.datetime, (2000, 1, 1)),
        (dt.time, (1,)),
        (dt.timedelta, (1,)),
        (decimal.Decimal, (1,)),
        (uuid.UUID, (None, b"x" * 16)),
    ]
]
OTHERS = [
    object(),
    object,
    print,
    lambda: None,
    sys,
    Colour.RED,
    Point(),
    fractions.Fraction(1, 3),
    collections.OrderedDict(a=1),
    collections.Counter("ab"),
    collections.deque([1]),
    collections.namedtuple("P", "x")(1),  # noqa: PYI024 - as users write it
    memoryview(b"x"),
    types.SimpleNamespace(),
    iter([1]),
    (n for n in [1]),
    {}.keys(),
    slice(1),
    Ellipsis,
    NotImplemented,
    ValueError("x"),
    np.array([1]),
    np.longdouble(1),
    np.datetime64("2024-01-01", "ns"),
    np.datetime64("NaT", "s"),
    np.timedelta64(1, "ns"),
    np.timedelta64(1, "Y"),
    np.void(b"abc"),
    np.array((1, 2.0), dtype="i4,f4")[()],
    range(2**63),
    range(0, 10, 2**70),
    dt.datetime(2000, 1, 1, tzinfo=Zoneless()),
    dt.time(1, tzinfo=Zoneless()),
]


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, id=f"{number} {type(value).__name__}")
        for number, value in enumerate(SUBCLASSES + OTHERS)
    ],
)
def test_a_value_of_a_look_alike_or_foreign_type_is_not_carried_at_any_depth(value: Any) -> None:
    for hidden in (value, [value], (1, value), {"k": value}, [{"k": ([value],)}]):
        with pytest.raises(NotCarried):
            to_wire(hidden)
    if is_hashable(value):
        for hidden in ({value: 1}, {value}, frozenset({value}), {(value,): 1}):
            with pytest.raises(NotCarried):
                to_wire(hidden)


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPPERS = {
    "lists": lambda v: [v],
    "tuples": lambda v: (v,),
    "dicts": lambda v: {"k": v},
    "odd dicts": lambda v: {(1,): v},
    "frozensets": lambda v: frozenset({v}),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_value_nested_too_deeply_is_not_carried(wrap: Any) -> None:
    to_wire(nested(150, wrap))
    for depth in (250, 500):
        with pytest.raises(NotCarried, match="deeply"):
            to_wire(nested(depth, wrap))


def test_a_value_that_contains_itself_is_not_carried() -> None:
    endless: list[Any] = []
    endless.append({"me": (endless,)})
    with pytest.raises(NotCarried, match="deeply"):
        to_wire(endless)


def test_a_stack_that_is_nearly_full_makes_a_value_not_carried_instead_of_raising() -> None:
    value = nested(150, lambda v: [v])

    def deeper() -> object:
        try:
            return deeper()
        except RecursionError:
            return to_wire(value)

    with pytest.raises(NotCarried, match="this stack"):
        deeper()


def test_a_module_called_numpy_that_is_not_numpy_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", types.ModuleType("numpy"))
    with pytest.raises(NotCarried):
        to_wire(object())


def test_no_code_of_the_value_runs() -> None:
    class Nosy:
        ran = False

        def __getattribute__(self, name: str) -> Any:
            Nosy.ran = True
            raise AssertionError(name)

        __iter__ = __len__ = __repr__ = __bool__ = __getattribute__

    with pytest.raises(NotCarried):
        to_wire([Nosy()])
    assert not Nosy.ran
