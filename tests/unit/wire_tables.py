"""The tables of docs/wire-format.md, as the code has them.

`python -m tests.unit.wire_tables` prints them, for a developer who has changed a message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as mi

from capsule_tasks.protocol import messages
from capsule_tasks.protocol.codec import message_types
from capsule_tasks.protocol.messages import (
    Code,
    Failure,
    Frame,
    Message,
    NamespaceEntry,
    Raised,
    Stack,
    TaskCall,
)
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    ExecutorSettings,
    InputSettings,
    LimitSettings,
    OutputSettings,
    SandboxSettings,
    TaskChildSettings,
)

PARTS = (Code, TaskCall, Frame, Stack, NamespaceEntry, Raised, Failure)
"""Structs inside messages."""
SECTIONS = (
    ChildSettings,
    ExecutorSettings,
    OutputSettings,
    InputSettings,
    LimitSettings,
    DiagnosticSettings,
    SandboxSettings,
    TaskChildSettings,
)
COMMON = ("id", "timestamp")

TO_CHILD = message_types(messages.ToChild)
TO_PARENT = message_types(messages.ToParent)


class Row(NamedTuple):
    """One field."""

    name: str
    type: str
    default: str


def all_messages() -> list[type[Message]]:
    """Each type once, parent to child first."""
    return list(dict.fromkeys(TO_CHILD + TO_PARENT))


def direction(kind: type[Message]) -> str:
    ways = (kind in TO_CHILD, kind in TO_PARENT)
    return {
        (True, False): "parent → child",
        (False, True): "child → parent",
        (True, True): "both ways",
    }[ways]


def rows(kind: type[msgspec.Struct], *, common: bool = False) -> list[Row]:
    """The fields of a struct; those of every message only if asked for."""
    described = mi.type_info(kind)
    assert isinstance(described, mi.StructType)
    wanted = [f for f in described.fields if (f.name in COMMON) == common or kind in PARTS]
    return [Row(f.encode_name, _type(f.type), _default(f)) for f in wanted]


def _type(kind: mi.Type) -> str:
    return _NAMES[type(kind)](kind)


def _one_of(kind: mi.UnionType) -> str:
    null_last = sorted(kind.types, key=lambda member: isinstance(member, mi.NoneType))
    return " or ".join(map(_type, null_last))


_NAMES: dict[type[mi.Type], Callable[[Any], str]] = {
    mi.AnyType: lambda _: "any",
    mi.NoneType: lambda _: "null",
    mi.BoolType: lambda _: "bool",
    mi.IntType: lambda _: "int",
    mi.FloatType: lambda _: "float",
    mi.StrType: lambda _: "str",
    mi.BytesType: lambda _: "bytes",
    mi.LiteralType: lambda kind: " or ".join(json.dumps(value) for value in kind.values),
    mi.StructType: lambda kind: kind.cls.__name__,
    mi.ListType: lambda kind: f"array of {_type(kind.item_type)}",
    mi.VarTupleType: lambda kind: f"array of {_type(kind.item_type)}",
    mi.DictType: lambda kind: f"map of {_type(kind.key_type)} to {_type(kind.value_type)}",
    mi.UnionType: _one_of,
}


def _default(field: mi.Field) -> str:
    if field.required:
        return "required"
    if field.default is mi.NODEFAULT:
        made = field.default_factory
        return json.dumps(made()) if made in (dict, list) else "generated"
    if isinstance(field.default, msgspec.Struct):
        return "its defaults"
    return json.dumps(field.default)


def table(kind: type[msgspec.Struct], *, common: bool = False) -> str:
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{r.name}` | {r.type} | `{r.default}` | |" for r in rows(kind, common=common)]
    return "\n".join(lines)


def pages() -> str:
    out = [f"### Every message\n\n{table(Message, common=True)}\n"]
    for kind in all_messages():
        tag = f"`{kind.__struct_config__.tag}` · {direction(kind)} · control or bulk"
        out.append(f"### {kind.__name__}\n\n{tag}\n\n{kind.__doc__}\n")
        out += [f"{table(kind)}\n"] if rows(kind) else []
    out += [f"### {p.__name__}\n\n{p.__doc__}\n\n{table(p)}\n" for p in PARTS + SECTIONS]
    return "\n".join(out)


if __name__ == "__main__":
    sys.stdout.write(pages())
