"""Hypothesis strategies: values that can be carried, messages of every type, hostile bytes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from capsule_tasks.protocol.codec import encode_frame, message_types
from capsule_tasks.protocol.messages import Message, ToChild, ToParent
from capsule_tasks.settings import ChildSettings, LimitSettings, OutputSettings

CEILING = 1 << 20

any_text = st.text(st.characters(exclude_categories=()))
"""Text with lone surrogates in it."""
offsets = st.timedeltas(
    min_value=dt.timedelta(hours=-24, microseconds=1),
    max_value=dt.timedelta(hours=24, microseconds=-1),
)
zones = st.none() | offsets.map(dt.timezone) | st.just(dt.UTC)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3).map(lambda n: n * 2**70),
    st.floats(),
    st.complex_numbers(),
    st.decimals(allow_nan=False),
    any_text,
    st.binary(),
    st.dates(),
    st.builds(lambda t, z, f: t.replace(tzinfo=z, fold=f), st.times(), zones, st.integers(0, 1)),
    st.builds(
        lambda t, z, f: t.replace(tzinfo=z, fold=f), st.datetimes(), zones, st.integers(0, 1)
    ),
    st.timedeltas(),
    st.uuids(),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9)),
)
keys = st.recursive(
    hashable,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
carried = st.recursive(
    hashable | st.binary().map(bytearray) | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)
"""Everything that `to_wire` takes."""

configs = st.sampled_from(
    [
        ChildSettings(),
        ChildSettings(output=OutputSettings(backpressure="drop_oldest", window_bytes=1)),
        ChildSettings(limits=LimitSettings(cpu_time_s=1.5, open_files=64), max_frame_bytes=1 << 20),
    ]
)


_DRAWN = ("id", "timestamp")


def _struct(kind: type) -> st.SearchStrategy[Any]:
    if kind is ChildSettings:
        return configs
    described = mi.type_info(kind)
    assert isinstance(described, mi.StructType)
    # Ids and times are always drawn: Hypothesis cannot repeat what a default made up.
    required = {f.name: _field(f.type) for f in described.fields if f.required or f.name in _DRAWN}
    optional = {f.name: _field(f.type) for f in described.fields if f.name not in required}
    if described.array_like:
        return st.tuples(*required.values()).map(lambda values: kind(*values))
    return st.fixed_dictionaries(required, optional=optional).map(lambda v: kind(**v))


def _field(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of a field, as msgspec understands its annotation."""
    return _FIELDS[type(kind)](kind)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
"""Values of the types that MessagePack has natively."""


_FIELDS: dict[type[mi.Type], Callable[[Any], st.SearchStrategy[Any]]] = {
    mi.AnyType: lambda _: plain,
    mi.NoneType: lambda _: st.none(),
    mi.BoolType: lambda _: st.booleans(),
    mi.IntType: lambda _: st.integers(-(2**63), 2**64 - 1),
    mi.FloatType: lambda _: st.floats(allow_nan=False),
    mi.StrType: lambda _: st.text(max_size=20),
    mi.BytesType: lambda _: st.binary(max_size=20),
    mi.LiteralType: lambda kind: st.sampled_from(kind.values),
    mi.StructType: lambda kind: _struct(kind.cls),
    mi.ListType: lambda kind: st.lists(_field(kind.item_type), max_size=3),
    mi.VarTupleType: lambda kind: st.lists(_field(kind.item_type), max_size=3).map(tuple),
    mi.DictType: lambda kind: st.dictionaries(
        _field(kind.key_type), _field(kind.value_type), max_size=3
    ),
    mi.UnionType: lambda kind: st.one_of(*map(_field, kind.types)),
}


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of one type, optional fields given or left out."""
    return _struct(kind)


to_child = st.one_of(*map(messages_of, message_types(ToChild)))
to_parent = st.one_of(*map(messages_of, message_types(ToParent)))


@st.composite
def mutated_frames(draw: st.DrawFn, messages: st.SearchStrategy[Message]) -> bytes:
    """A few valid frames, damaged in a few places."""
    data = bytearray()
    for message in draw(st.lists(messages, min_size=1, max_size=3)):
        data += encode_frame(message, CEILING)
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data[start:end] = draw(st.binary(max_size=8) | st.just(bytes(data[start:end]) * 2))
    return bytes(data)


@st.composite
def damaged_bodies(draw: st.DrawFn, messages: st.SearchStrategy[Message]) -> bytes:
    """One frame with a length that is right and a body that is not."""
    body = bytearray(msgspec.msgpack.encode(draw(messages)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.integers(0, 6)))
        body[start:end] = draw(st.binary(max_size=6))
    return len(body).to_bytes(4, "big") + bytes(body)
