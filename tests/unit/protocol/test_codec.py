"""Messages to frames and back: what is known, unknown, new, old, malformed or too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import BadFrame, FrameTooLarge
from capsule_tasks.protocol.codec import (
    HEADER,
    MessageDecoder,
    Unknown,
    decoder_of,
    encode_frame,
    message_types,
)
from capsule_tasks.protocol.messages import (
    Ack,
    Execute,
    Heartbeat,
    Hello,
    Message,
    Output,
    Result,
    ToChild,
    ToParent,
    new_id,
)
from capsule_tasks.settings import ChildSettings
from tests.unit.strategies import CEILING, messages_of, to_child, to_parent

DIRECTIONS = {"to child": ToChild, "to parent": ToParent}
CASES = [
    pytest.param(union, kind, id=f"{kind.__name__} {direction}")
    for direction, union in DIRECTIONS.items()
    for kind in message_types(union)
]


def wire(**fields: Any) -> bytes:
    """A frame with exactly these fields; `type_` stands for `t`."""
    if "type_" in fields:
        fields["t"] = fields.pop("type_")
    return framed(msgspec.msgpack.encode(fields))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def decoded(data: bytes, union: Any = ToParent) -> list[Any]:
    return list(MessageDecoder(union, CEILING).feed(data))


@pytest.mark.parametrize(("union", "kind"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_round_trips(union: Any, kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    (arrived,) = decoded(bytes(encode_frame(message, CEILING)), union)
    assert type(arrived) is kind
    assert arrived == message


@pytest.mark.parametrize(
    ("union", "messages"), [(ToChild, to_child), (ToParent, to_parent)], ids=DIRECTIONS
)
@given(data=st.data())
def test_a_conversation_survives_any_cutting(
    union: Any, messages: st.SearchStrategy[Message], data: st.DataObject
) -> None:
    said = data.draw(st.lists(messages, max_size=5))
    stream = b"".join(encode_frame(message, CEILING) for message in said)
    decoder: MessageDecoder[Any] = MessageDecoder(union, CEILING)
    heard, position = [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, 64))
        heard += decoder.feed(stream[position : position + size])
        position += size
    assert heard == said


def test_each_message_has_an_id_of_its_own_and_a_time_that_only_grows() -> None:
    first, second = (
        Ack(ack_of="a", execution_id="e", accepted_at=0.0),
        Hello(versions=(1,), session_id="s"),
    )
    assert first.id != second.id
    assert first.timestamp <= second.timestamp


def test_ids_are_unique_over_many() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000


# --- other versions ----------------------------------------------------------------------------


def test_an_unknown_type_comes_out_as_unknown_with_its_id_and_the_rest_goes_on() -> None:
    stream = wire(type_="from_the_future", id="x-1", anything=[1, {"a": 2}]) + wire(
        type_="ack", ack_of="a", execution_id="e", accepted_at=1.0
    )
    unknown, ack = decoded(stream)
    assert unknown == Unknown("from_the_future", "x-1")
    assert isinstance(ack, Ack)


def test_an_unknown_type_needs_no_id() -> None:
    assert decoded(wire(type_="odd")) == [Unknown("odd", "")]


def test_a_message_of_the_other_direction_is_unknown() -> None:
    frame = encode_frame(Hello(versions=(1,), session_id="s", id="h"), CEILING)
    assert decoded(bytes(frame), ToParent) == [Unknown("hello", "h")]


def test_an_unknown_type_can_carry_extensions_of_its_own() -> None:
    body = msgspec.msgpack.encode({"t": "odd", "id": "1", "x": msgspec.msgpack.Ext(99, b"?")})
    assert decoded(framed(body)) == [Unknown("odd", "1")]


def test_an_unknown_message_is_quoted_in_short_form() -> None:
    (unknown,) = decoded(wire(type_="t" * 500_000, id="i" * 500_000))
    assert len(unknown.what) <= 200
    assert len(unknown.id) <= 200


def test_unknown_fields_are_ignored_also_deep_inside() -> None:
    config = msgspec.to_builtins(ChildSettings()) | {"newer": {"a": [1]}}
    config["output"] |= {"colour": "red"}
    (hello,) = decoded(
        wire(type_="hello", versions=[1], session_id="s", config=config, mood="good"), ToChild
    )
    assert hello.config == ChildSettings()
    assert not hasattr(hello, "mood")


def required_fields(kind: type[msgspec.Struct]) -> Iterator[msgspec.structs.FieldInfo]:
    return (field for field in msgspec.structs.fields(kind) if field.required)


@pytest.mark.parametrize(("union", "kind"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_fields_that_an_older_peer_does_not_send_get_their_defaults(
    union: Any, kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages_of(kind))
    fields = {f.name: getattr(message, f.name) for f in required_fields(kind)}
    (arrived,) = decoded(wire(type_=kind.__struct_config__.tag, **fields), union)
    expected = kind(**fields, id=arrived.id, timestamp=arrived.timestamp)
    assert arrived == expected


# --- faults ------------------------------------------------------------------------------------

MALFORMED = {
    "field missing": {"type_": "ack", "ack_of": "a"},
    "field of another type": {"type_": "output", "stream": "stdout", "data": 5},
    "number as text": {"type_": "heartbeat", "rss_bytes": "1", "cpu_s": 1.0, "namespace_size": 1},
    "value out of its list": {"type_": "output", "stream": "stdlog", "data": "x"},
    "settings out of range": {
        "type_": "ready",
        "session_id": "s",
        "version": 1,
        "pid": 1,
        "config": {"max_frame_bytes": 1},
    },
    "nested message malformed": {
        "type_": "stack_reply",
        "in_reply_to": "x",
        "stacks": [{"name": "n", "kind": "fibre", "frames": []}],
    },
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_of_a_known_type_is_a_bad_frame(fields: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match=rf"a malformed '{fields['type_']}' message: "):
        decoded(wire(**fields))


NO_MESSAGES = {
    "nothing of MessagePack": b"\xc1",
    "a number": b"\x01",
    "an array": b"\x90",
    "text": b"\xa5hello",
    "a map without a type": b"\x80",
    "a type that is no text": msgspec.msgpack.encode({"t": 5}),
    "a map cut off": msgspec.msgpack.encode({"t": "ack", "id": "x"})[:-1],
    "something behind the message": msgspec.msgpack.encode({"t": "odd"}) + b"\xc0",
    "text that is not UTF-8": b"\x82\xa1t\xa3ack\xa2id\xa2\xff\xfe",
    "an id that is no text": msgspec.msgpack.encode({"t": "ack", "id": 5}),
    "an unknown type with a bad id": msgspec.msgpack.encode({"t": "odd", "id": 5}),
}


@pytest.mark.parametrize("body", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_a_body_that_is_no_message_is_a_bad_frame(body: bytes) -> None:
    for union in DIRECTIONS.values():
        with pytest.raises(BadFrame):
            decoded(framed(body), union)


def test_messages_before_a_bad_frame_are_delivered_and_none_after_it() -> None:
    ack = wire(type_="ack", ack_of="a", execution_id="e", accepted_at=1.0)
    decoder: MessageDecoder[Any] = MessageDecoder(ToParent, CEILING)
    messages = decoder.feed(ack + wire(type_="ack") + ack)
    assert isinstance(next(messages), Ack)
    with pytest.raises(BadFrame):
        next(messages)
    with pytest.raises(BadFrame, match="already"):
        list(decoder.feed(ack))


def test_an_error_about_a_frame_does_not_repeat_the_frame() -> None:
    with pytest.raises(BadFrame) as caught:
        decoded(wire(type_="output", stream="x" * 500_000, data=""))
    assert len(str(caught.value)) < 500


# --- the ceiling -------------------------------------------------------------------------------


def sized(size: int) -> Output:
    """A message whose body has exactly so many bytes."""
    message = Output(stream="stdout", data="x" * 1000, id="i", timestamp=0.0)
    excess = len(encode_frame(message, CEILING)) - HEADER - size
    message.data = message.data[: len(message.data) - excess]
    return message


def test_a_body_as_large_as_the_ceiling_is_written_and_read() -> None:
    message = sized(800)
    frame = encode_frame(message, 800)
    assert len(frame) == 800 + HEADER
    assert list(MessageDecoder(ToParent, 800).feed(bytes(frame))) == [message]


def test_a_body_over_the_ceiling_is_not_written() -> None:
    with pytest.raises(FrameTooLarge, match="801 bytes is over the ceiling of 800") as caught:
        encode_frame(sized(801), 800)
    assert (caught.value.size, caught.value.ceiling) == (801, 800)


def test_a_body_over_the_ceiling_is_not_read() -> None:
    frame = bytes(encode_frame(sized(801), CEILING))
    with pytest.raises(BadFrame, match="claims 801 bytes; allowed are 1 to 800"):
        list(MessageDecoder(ToParent, 800).feed(frame[:HEADER]))


def test_defaults_are_not_sent() -> None:
    small = encode_frame(Result(execution_id="e", id="i", timestamp=0.0), CEILING)
    fields = msgspec.msgpack.decode(small[HEADER:])
    assert fields == {"t": "result", "id": "i", "timestamp": 0.0, "execution_id": "e"}


def test_a_message_of_any_python_thread_or_fork_is_plain_data() -> None:
    """Nothing in a message needs this package to be read, as long as it has no extensions."""
    execute = wire_fields(Execute(execution_id="e", seq=1, payload={"source": "1"}))  # type: ignore[arg-type]
    beat = wire_fields(Heartbeat(rss_bytes=1, cpu_s=0.5, namespace_size=0, running=("a",)))
    assert execute["payload"] == {"source": "1"}
    assert beat["running"] == ["a"]


def wire_fields(message: Message) -> dict[str, Any]:
    return msgspec.msgpack.decode(encode_frame(message, CEILING)[HEADER:], type=dict)


def test_a_subclass_of_a_message_elsewhere_is_never_decoded() -> None:
    class Piece(Output, kw_only=True):
        """Output with something of its receiver's."""

    decoder_of.cache_clear()
    kinds = message_types(ToParent)
    assert Output in kinds
    assert Piece not in kinds
    sent = Output(stream="stdout", data="x")
    assert [type(m) for m in decoded(bytes(encode_frame(sent, CEILING)))] == [Output]
