"""The page on the wire format and the code say the same."""

from __future__ import annotations

import ast
import json
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from capsule_tasks.protocol import values
from capsule_tasks.protocol.codec import HEADER
from capsule_tasks.protocol.flow import OVERHEAD, message_cost
from capsule_tasks.protocol.messages import (
    CAPABILITIES,
    VERSIONS,
    ErrorKind,
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
    RunEvent,
)
from capsule_tasks.protocol.values import revive, to_wire
from tests.unit import wire_tables
from tests.unit.wire_tables import PARTS, SECTIONS, Row, all_messages, direction, rows

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
TAG_LINE = re.compile(r"^`(\w+)` · (.+) · (control|bulk)$", re.MULTILINE)
TELL = "docs/wire-format.md differs; `python -m tests.unit.wire_tables` prints the tables"


def parts_of_page() -> dict[str, str]:
    """The text under each heading."""
    _, *pieces = HEADING.split(PAGE)
    assert len(set(pieces[::2])) == len(pieces[::2])
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


TEXT = parts_of_page()


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    lines = [line for line in TEXT[heading].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def fields(heading: str) -> list[Row]:
    return [
        Row(name.strip("`"), kind, default.strip("`")) for name, kind, default, _ in table(heading)
    ]


def column(heading: str, number: int = 0) -> list[str]:
    return [row[number].strip("`") for row in table(heading)]


# --- messages ----------------------------------------------------------------------------------


def test_the_page_has_every_message_and_no_other() -> None:
    described = {
        name: tag.groups() for name, text in TEXT.items() if (tag := TAG_LINE.search(text))
    }
    coded = {
        kind.__name__: (kind.__struct_config__.tag, direction(kind)) for kind in all_messages()
    }
    assert {name: found[:2] for name, found in described.items()} == coded, TELL
    assert len(TAG_LINE.findall(PAGE)) == len(coded)


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in all_messages()]
    assert len(set(tags)) == len(tags)
    assert all(kind.__struct_config__.tag_field == "t" for kind in all_messages())


@pytest.mark.parametrize("kind", [*all_messages(), *PARTS, *SECTIONS], ids=lambda k: k.__name__)
def test_each_struct_has_its_fields_types_and_defaults_on_the_page(
    kind: type[msgspec.Struct],
) -> None:
    assert fields(kind.__name__) == rows(kind), TELL
    for *_, meaning in table(kind.__name__):
        assert len(meaning) > 2, f"a field of {kind.__name__} is not explained"


def test_fields_of_every_message_are_on_the_page_once() -> None:
    assert fields("Every message") == rows(Message, common=True)
    for kind in all_messages():
        names = [field.name for field in msgspec.structs.fields(kind)]
        assert tuple(names[:2]) == wire_tables.COMMON


def test_every_struct_inside_a_message_is_on_the_page() -> None:
    known = {kind.__name__ for kind in (*PARTS, *SECTIONS)}
    for kind in (*all_messages(), *PARTS, *SECTIONS):
        for row in rows(kind):
            for word in re.findall(r"\b[A-Z]\w+", re.sub(r'"\w+"', "", row.type)):
                assert word in known, f"{kind.__name__}.{row.name} has a {word}"


def test_parts_have_the_tags_and_the_form_the_page_gives_them() -> None:
    for part in PARTS:
        config, text = part.__struct_config__, TEXT[part.__name__]
        assert ("Tag: `" in text) == (config.tag is not None)
        assert config.tag is None or f"Tag: `{config.tag}`" in text
        assert ("An array of its fields" in text) == config.array_like
    assert not any(kind.__struct_config__.array_like for kind in all_messages())


def test_the_ways_an_execution_can_end_are_on_the_page() -> None:
    assert column("How an execution ends") == [kind.value for kind in ErrorKind], TELL


# --- the rest ----------------------------------------------------------------------------------


def test_versions_and_capabilities_are_on_the_page() -> None:
    assert f"Versions: {', '.join(map(str, VERSIONS))}." in TEXT["Negotiation"]
    assert column("Negotiation") == list(CAPABILITIES), TELL


def test_the_length_of_a_frame_is_on_the_page() -> None:
    assert f"{HEADER} bytes, big endian" in TEXT["Frames"]


PAID = [
    (Output(stream="stdout", data="é"), "data", 2),
    (Progress(execution_id="e", done=1, note="é"), "note", 2),
    (RunEvent(execution_id="e", kind="turn", json=b"12"), "json", 2),
    (InputRequest(execution_id="e", prompt="é"), "prompt", 2),
    (InputClosed(execution_id="e", request_id="r", reason="eof"), None, 0),
    (Gap(stream="stdout", lost_bytes=9, lost_messages=9), None, 0),
]


def test_the_costs_on_the_page_are_those_that_are_charged() -> None:
    lines = {name.strip("`"): cost for name, cost in table("Credit for output")}
    assert list(lines) == [type(message).__name__ for message, *_ in PAID]
    for message, field, size in PAID:
        fixed, _, rest = lines[type(message).__name__].partition(" + ")
        assert message_cost(message) == int(fixed) + size
        assert rest == (f"bytes of `{field}`" if field else "")
    assert f"and {OVERHEAD} bytes" in TEXT["Credit for output"]


PYTHON = {
    "UTC": UTC,
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "Decimal": Decimal,
    "UUID": UUID,
}
EXTENSIONS = table("Values")


def test_the_extension_codes_on_the_page_are_those_that_are_read() -> None:
    assert [int(row[0]) for row in EXTENSIONS] == sorted(values._REVIVERS), TELL
    for code in (0, len(EXTENSIONS) + 1):
        with pytest.raises(ValueError, match="not one of this protocol"):
            revive(code, memoryview(b"\xc0"))


@pytest.mark.parametrize("row", EXTENSIONS, ids=lambda row: row[1])
def test_each_example_is_written_and_read_as_the_page_says(row: list[str]) -> None:
    code, type_name, payload, example, written = (cell.strip("`") for cell in row)
    value = eval(example, dict(PYTHON))  # the page is ours
    wire = to_wire(value)
    assert wire.code == int(code)
    assert type(value).__name__ == type_name.split()[0]
    if payload.startswith("raw"):
        assert wire.data.hex() == written
    else:
        assert _as_written(msgspec.msgpack.decode(wire.data)) == ast.literal_eval(_python(written))
    revived = revive(wire.code, memoryview(wire.data))
    assert (type(revived), revived) == (type(value), value)


def _as_written(payload: Any) -> Any:
    """An extension inside a payload as the page writes it."""
    if isinstance(payload, list):
        return [_as_written(item) for item in payload]
    return f"<{payload.code}>" if isinstance(payload, msgspec.msgpack.Ext) else payload


def _python(written: str) -> str:
    quoted = re.sub(r"(<\d+>)", r'"\1"', written)
    return repr(json.loads(quoted))


def test_the_depth_that_is_carried_is_on_the_page() -> None:
    assert f"more than {values._MAX_DEPTH} deep" in TEXT["Values"]


def test_links_of_the_page_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in TEXT}
    for target in re.findall(r"\]\((#?[^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (Path(__file__).parents[2] / "docs" / target).exists(), target
