"""Values of user code: what is carried keeps its type and its value, all the way down."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from hypothesis import given

from capsule_tasks.protocol.codec import MessageDecoder, encode_frame
from capsule_tasks.protocol.messages import Result, ToParent
from capsule_tasks.protocol.values import to_wire
from tests.unit.fingerprints import fingerprint
from tests.unit.strategies import carried

CEILING = 64 << 20
BERLIN = ZoneInfo("Europe/Berlin")


def travelled(value: Any) -> Any:
    """`value` as the other side of a session sees it."""
    sent = Result(execution_id="e", value=to_wire(value))
    (result,) = MessageDecoder(ToParent, CEILING).feed(encode_frame(sent, CEILING))
    return result.value


CARRIED = {
    "none": None,
    "bools": [True, False, 1, 0],
    "small ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1],
    "big ints": [2**64, -(2**63) - 1, 10**5000, -(10**5000)],
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.5],
    "complex": [1j, complex(-0.0, math.nan)],
    "decimals": [decimal.Decimal(s) for s in ("1.10", "-0", "1E+999", "NaN", "sNaN12", "-Inf")],
    "text": ["", "ascii", "żółć", "😀", "\0\r\n"],
    "lone surrogates": ["\ud800", "a\udfffb", {"\udc80": "\udc80"}],
    "bytes": [b"", bytes(range(256))],
    "bytearray": [bytearray(), bytearray(b"\0\xff")],
    "uuid": [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)],
    "ranges": [range(0), range(5), range(-3, 10, 2), range(5, 0, -1), range(2**63 - 1)],
    "dates": [dt.date.min, dt.date.max],
    "times": [dt.time.min, dt.time.max, dt.time(1, 2, 3, 4, fold=1), dt.time(1, tzinfo=dt.UTC)],
    "naive datetimes": [dt.datetime.min, dt.datetime.max],  # noqa: DTZ901
    "a second 2:30": dt.datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001
    "aware datetimes": [
        dt.datetime(2024, 2, 29, 1, 2, 3, 456789, dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-23, microseconds=1))),
    ],
    "timedeltas": [dt.timedelta.min, dt.timedelta.max, dt.timedelta(0, -1, 7)],
    "tuples": [(), (1,), ((), (("x",),))],
    "sets": [set(), {1, "a", (2, b"b")}, frozenset({frozenset({1}), 2})],
    "lists": [[], [[[]]]],
    "dicts": [{}, {"a": {"b": []}}, {1: 2, None: 3, 1.5: 4, b"x": 5, False: 6}],
    "dict with odd keys": {(1, 2): 1, frozenset({3}): 2, 2**70: 3, "s": 4, dt.date(2000, 1, 1): 5},
    "dict with NaN keys": {math.nan: 1, float("nan"): 2, (math.nan,): 3},
    "everything in everything": {"k": ({1, (2**80, "\ud800")}, [bytearray(b"x"), {3j: range(2)}])},
}


@pytest.mark.parametrize("value", CARRIED.values(), ids=CARRIED.keys())
def test_a_carried_value_keeps_type_and_value(value: Any) -> None:
    assert fingerprint(travelled(value)) == fingerprint(value)


@given(carried)
def test_any_carried_value_keeps_type_and_value(value: Any) -> None:
    assert fingerprint(travelled(value)) == fingerprint(value)


def test_a_dict_keeps_its_order_also_with_odd_keys() -> None:
    for value in ({"b": 1, "a": 2}, {(2,): 1, (1,): 2, 0: 3}):
        assert list(travelled(value)) == list(value)


def test_a_zone_arrives_as_the_offset_it_had_at_that_moment() -> None:
    for month, hours in ((1, 1), (7, 2)):
        value = dt.datetime(2024, month, 1, 12, tzinfo=BERLIN)
        arrived = travelled(value)
        assert arrived == value
        assert arrived.tzinfo == dt.timezone(dt.timedelta(hours=hours))


def test_the_hour_that_happens_twice_arrives_as_the_one_it_was() -> None:
    first, second = (
        travelled(dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold)) for fold in (0, 1)
    )
    assert second - first == dt.timedelta(hours=1)
    assert (first.fold, second.fold) == (0, 1)


NUMPY = [
    (np.bool_(True), True),
    (np.int8(-5), -5),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.float16(1.5), 1.5),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float64("nan"), math.nan),
    (np.complex64(1 + 2j), 1 + 2j),
    (np.str_("żółć"), "żółć"),
    (np.str_("\ud800"), "\ud800"),
    (np.bytes_(b"ab"), b"ab"),
    (np.datetime64("2024-02-29"), dt.date(2024, 2, 29)),
    (np.datetime64("2024-02-29T01:02:03.000004"), dt.datetime(2024, 2, 29, 1, 2, 3, 4)),  # noqa: DTZ001 - NumPy knows no zones
    (np.timedelta64(90, "s"), dt.timedelta(seconds=90)),
]


@pytest.mark.parametrize(("scalar", "value"), NUMPY, ids=[repr(s) for s, _ in NUMPY])
def test_a_numpy_scalar_arrives_as_the_python_value_it_equals(scalar: Any, value: Any) -> None:
    assert fingerprint(travelled(scalar)) == fingerprint(value)
    assert fingerprint(travelled([scalar, {"k": (scalar,)}])) == fingerprint(
        [value, {"k": (value,)}]
    )


def test_a_value_changed_while_it_is_packed_does_no_harm() -> None:
    class Growing(dt.tzinfo):
        """Adds to the containers that are being packed."""

        def utcoffset(self, _: Any) -> dt.timedelta:
            if armed:
                numbers.add(len(numbers))
                table[len(table)] = 0
            return dt.timedelta()

    armed = False
    moment = dt.datetime(2024, 1, 1, tzinfo=Growing())
    numbers: set[Any] = {moment}
    table: dict[Any, Any] = {"first": moment, "second": moment}
    armed = True
    to_wire(numbers)
    to_wire(table)
    assert len(numbers) > 1
    assert len(table) > 2


def test_packing_does_not_change_the_value() -> None:
    value = [{(1,): {2}}, bytearray(b"x")]
    before = fingerprint(value)
    to_wire(value)
    assert fingerprint(value) == before


def test_a_plain_value_is_plain_messagepack() -> None:
    """A consumer in another language reads these without knowing the extensions."""
    value = {"list": [1, 2.5, None, True, "x", b"y"], "map": {"1": -1}}
    packed = msgspec.msgpack.encode(to_wire(value))
    assert msgspec.msgpack.Decoder().decode(packed) == value
