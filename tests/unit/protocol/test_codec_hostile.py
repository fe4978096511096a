"""Bytes made to hang, crash or bloat the reader."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.codec import MessageDecoder, Unknown
from capsule_tasks.protocol.messages import Result, ToParent
from capsule_tasks.protocol.values import to_wire

CEILING = 64 << 20
Ext = msgspec.msgpack.Ext
encode = msgspec.msgpack.encode

HUGE = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x02",
}
"""Headers that claim 4 GiB."""
PLACES = {
    "value": ("result", "value"),
    "text field": ("output", "data"),
    "bytes field": ("checkpoint_piece", "data"),
    "tuple field": ("heartbeat", "running"),
    "list of structs": ("stack_reply", "stacks"),
    "dict field": ("checkpointed", "skipped"),
    "unknown field": ("ack", "junk"),
    "tag": ("", "t"),
    "id": ("ack", "id"),
}


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def with_field(tag: str, name: str, encoded: bytes) -> bytes:
    """A message in which one field is given as raw bytes."""
    fields = {"t": encode(tag), "execution_id": encode("e"), name: encoded}
    pairs = b"".join(encode(key) + item for key, item in fields.items())
    return framed(bytes([0x80 | len(fields)]) + pairs)


def read(data: bytes) -> list[Any]:
    return list(MessageDecoder(ToParent, CEILING).feed(data))


@pytest.fixture
def peak() -> Iterator[Any]:
    """The most memory taken since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("header", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_length_claimed_inside_a_message_allocates_nothing(
    peak: Any, place: tuple[str, str], header: bytes
) -> None:
    with pytest.raises(BadFrame):
        read(with_field(*place, header + b"\xa0" * 100))
    assert peak() < 256 * 1024


@pytest.mark.parametrize("header", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize("code", range(1, 16))
def test_a_length_claimed_inside_an_extension_allocates_nothing(
    peak: Any, code: int, header: bytes
) -> None:
    extension = encode(Ext(code, header + b"\xa0" * 20))
    try:
        read(with_field("result", "value", extension))
    except BadFrame:
        pass
    else:
        assert code in (6, 13)  # text and bytearray: any bytes will do
    assert peak() < 256 * 1024


DEPTH = 200_000
NESTED = {
    "arrays": b"\x91" * DEPTH + b"\xc0",
    "maps": b"\x81\xa1k" * DEPTH + b"\xc0",
    "maps as keys": b"\x81" * DEPTH + b"\xc0" * (DEPTH + 1),
}


def nested_extensions(depth: int) -> bytes:
    body = b"\xc0"
    for _ in range(depth):
        body = encode(Ext(2, b"\x91" + body))
    return body


@pytest.mark.parametrize("name", ["value", "junk"])
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED.keys())
def test_nesting_without_end_is_a_bad_frame(nested: bytes, name: str) -> None:
    for tag in ("result", "from_the_future"):
        if (tag, name) == ("from_the_future", "value"):
            continue
        with pytest.raises(BadFrame):
            read(with_field(tag, name, nested))


@pytest.mark.parametrize("depth", [1000, 3000])
def test_extensions_nested_without_end_are_a_bad_frame(depth: int) -> None:
    with pytest.raises(BadFrame):
        read(with_field("result", "value", nested_extensions(depth)))


def test_nesting_does_not_overflow_the_stack_of_a_process_with_a_high_recursion_limit() -> None:
    """User code raises the limit, and a parent embedded in its program inherits it."""
    program = (
        "import sys; sys.setrecursionlimit(20_000)\n"
        "from tests.unit.protocol.test_codec_hostile import *\n"
        "for nested in [*NESTED.values(), nested_extensions(3000)]:\n"
        "    try: read(with_field('result', 'value', nested))\n"
        "    except BadFrame: print('refused')\n"
        "    else: print('read')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) <= {"refused", "read"}
    assert done.stdout.count("refused") >= len(NESTED)


def ext_range(*numbers: int) -> Ext:
    return Ext(14, encode(numbers))


BOMBS = {
    "tuple of a range": Ext(2, encode(ext_range(0, 2**62, 1))),
    "set of a range": Ext(3, encode(ext_range(0, 2**62, 1))),
    "frozenset of a range": Ext(4, encode(ext_range(0, 2**62, 1))),
    "dict of a range": Ext(15, encode(ext_range(0, 2**62, 1))),
    "tuple of text": Ext(2, encode("x" * 1_000_000)),
    "set of bytes": Ext(3, encode(bytes(1_000_000))),
    "complex of text": Ext(5, encode("1" * 1_000_000)),
    "decimal of a big integer": Ext(11, encode(Ext(1, encode("f" * 8_000_000)))),
    "decimal of an array": Ext(11, encode([0, [1] * 1000, 10**18])),
    "big integer that is no text": Ext(1, encode(b"ff")),
    "big integer that is no number": Ext(1, encode("x" * 8_000_000)),
    "date without end": Ext(8, encode("2" * 8_000_000)),
    "datetime without end": Ext(7, encode(["2" * 8_000_000, None, 0])),
    "offset beyond a day": Ext(7, encode(["2024-01-01T00:00:00", 1e300, 0])),
    "offset that is no number": Ext(9, encode(["00:00:00", float("nan"), 0])),
    "timedelta of big integers": Ext(10, encode([Ext(1, encode("f" * 8_000_000)), 0, 0])),
    "timedelta beyond all": Ext(10, encode([2**63, 0, 0])),
    "range without a step": ext_range(0, 1, 0),
    "range of big integers": Ext(14, encode([0, Ext(1, encode("f" * 100)), 1])),
    "unhashable members": Ext(3, encode([[1]])),
    "unhashable keys": Ext(15, encode([[[1], 2]])),
    "pairs of three": Ext(15, encode([[1, 2, 3]])),
    "pairs of text": Ext(15, encode(["ab"])),
    "short uuid": Ext(12, b"x"),
    "broken text": Ext(6, b"\xff"),
    "unknown code": Ext(99, b"x" * 1_000_000),
    "negative code": Ext(-5, b""),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_an_extension_with_an_unknown_payload_is_refused_at_once(peak: Any, bomb: Ext) -> None:
    """Before they were refused, some of these would have run for minutes."""
    with pytest.raises(BadFrame):
        read(with_field("result", "value", encode(bomb)))
    assert peak() < 128 << 20


def test_an_unhashable_key_of_a_plain_map_is_refused() -> None:
    for key in (b"\x80", encode(Ext(13, b"x")), encode(Ext(3, b"\x90"))):
        with pytest.raises(BadFrame):
            read(with_field("result", "value", b"\x81" + key + b"\xc0"))


def test_large_numbers_of_users_are_read_in_linear_time() -> None:
    """Hexadecimal: in decimal digits this one would take minutes, and be refused by Python."""
    number = 1 << (8 * 16_000_000)
    body = encode(Result(execution_id="e", value=to_wire([number, -number])))
    (result,) = read(framed(body))
    assert result.value == [number, -number]


def test_many_tiny_frames_are_as_good_as_a_few() -> None:
    tiny = framed(encode({"t": "x"}))
    assert read(tiny * 100_000) == [Unknown("x", "")] * 100_000
