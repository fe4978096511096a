"""Arbitrary and damaged bytes: a message, `Unknown` or BadFrame, and nothing else ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.codec import MessageDecoder, Unknown, encode_frame
from capsule_tasks.protocol.messages import Message, Result, ToChild, ToParent
from capsule_tasks.protocol.values import revive, to_wire
from tests.unit.strategies import (
    CEILING,
    carried,
    damaged_bodies,
    mutated_frames,
    to_child,
    to_parent,
)

UNIONS = {"to child": (ToChild, to_child), "to parent": (ToParent, to_parent)}
both_directions = pytest.mark.parametrize(("union", "messages"), UNIONS.values(), ids=UNIONS)


def feed(union: Any, data: bytes, step: int) -> list[Any]:
    """Decode until the end or a BadFrame; any other exception fails the test."""
    decoder: MessageDecoder[Any] = MessageDecoder(union, CEILING)
    out: list[Any] = []
    try:
        for start in range(0, len(data), step):
            out.extend(decoder.feed(data[start : start + step]))
    except BadFrame:
        with pytest.raises(BadFrame):
            next(decoder.feed(b"\0"), None)
    assert all(isinstance(message, (Message, Unknown)) for message in out)
    return out


@pytest.mark.parametrize("union", [ToChild, ToParent], ids=UNIONS)
@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(1, 64))
@example(b"\xff" * 100, 1)
@example(b"\0\0\0\x01\xc1", 5)
def test_arbitrary_bytes(union: Any, data: bytes, step: int) -> None:
    feed(union, data, step)


@pytest.mark.parametrize("union", [ToChild, ToParent], ids=UNIONS)
@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=100))
def test_arbitrary_bodies_of_the_right_length(union: Any, body: bytes) -> None:
    feed(union, len(body).to_bytes(4, "big") + body, 1000)


@both_directions
@settings(max_examples=300)
@given(data=st.data())
def test_damaged_streams_of_frames(union: Any, messages: Any, data: st.DataObject) -> None:
    feed(union, data.draw(mutated_frames(messages)), data.draw(st.integers(1, 200)))


@both_directions
@settings(max_examples=300)
@given(data=st.data())
def test_damaged_bodies_in_sound_frames(union: Any, messages: Any, data: st.DataObject) -> None:
    feed(union, data.draw(damaged_bodies(messages)), 1000)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_values(data: st.DataObject) -> None:
    """Extensions with payloads that are nearly right."""
    results = carried.map(
        lambda value: Result(execution_id="e", value=to_wire(value), id="i", timestamp=0.0)
    )
    feed(ToParent, data.draw(damaged_bodies(results)), 1000)


any_extension = st.builds(
    msgspec.msgpack.Ext,
    st.integers(-1, 17),
    st.binary(max_size=20) | carried.map(lambda value: msgspec.msgpack.encode(to_wire(value))),
)


@settings(max_examples=300)
@given(any_extension)
def test_extensions_with_the_payload_of_another(extension: msgspec.msgpack.Ext) -> None:
    body = msgspec.msgpack.encode({"t": "result", "execution_id": "e", "value": extension})
    feed(ToParent, len(body).to_bytes(4, "big") + body, 1000)


@settings(max_examples=300)
@given(st.integers(-128, 127), st.binary(max_size=40))
def test_an_extension_that_cannot_be_revived_raises_an_ordinary_exception(
    code: int, payload: bytes
) -> None:
    try:
        revive(code, memoryview(payload))
    except Exception:  # noqa: BLE001 - which one does not matter, that it is one does
        return
    assert 1 <= code <= 15


@both_directions
@given(data=st.data())
def test_a_damaged_frame_does_not_change_what_came_before_it(
    union: Any, messages: Any, data: st.DataObject
) -> None:
    good = data.draw(st.lists(messages, min_size=1, max_size=4))
    stream = b"".join(encode_frame(message, CEILING) for message in good)
    stream += data.draw(mutated_frames(messages))
    assert feed(union, stream, data.draw(st.integers(1, 500)))[: len(good)] == good
