"""The guide of realtime sessions lists every event, every setting and every error there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from capsule_tasks.errors import realtime as errors
from capsule_tasks.realtime import events
from capsule_tasks.realtime.settings import RealtimeConfig, RealtimeModelConfig, RealtimeSettings

PAGE = (Path(__file__).parents[2] / "docs" / "realtime.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of all tables under a heading."""
    text = PAGE.partition(f"\n{heading}\n")[2]
    text = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^\| (`.+) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines]


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_guide_lists_every_event_with_its_fields() -> None:
    kinds = [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.RealtimeEvent)
    ]
    fields = {
        kind.type: [name.lstrip("_") for name in kind.__struct_fields__]
        for kind in kinds
        if kind is not events.RealtimeEvent
    }
    fields["history_updated"] = ["history"]  # a property
    assert {named(row[0])[0]: named(row[1]) for row in rows("## Events")} == fields


@pytest.mark.parametrize("kind", [RealtimeConfig, RealtimeModelConfig])
def test_the_guide_lists_every_setting_with_its_default(kind: type) -> None:
    listed = {
        name: row[1].strip("`") for row in rows(f"### {kind.__name__}") for name in named(row[0])
    }
    assert listed == {field.name: as_written(field) for field in dataclasses.fields(kind)}


def as_written(field: dataclasses.Field[object]) -> str:
    value = field.default
    if value is None or value is dataclasses.MISSING:  # a default that is empty
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if field.name.endswith("_bytes"):
        return f"{int(str(value)) >> 20} MiB"
    if field.name.endswith("_s"):
        return f"{float(str(value)):g} s"
    return str(value)


def test_the_guide_lists_every_setting_of_the_model() -> None:
    listed = [name for row in rows("### RealtimeSettings") for name in named(row[0])]
    assert sorted(listed) == sorted(RealtimeSettings.__struct_fields__)


def test_the_guide_lists_every_error_of_sessions() -> None:
    listed = {name for row in rows("## Errors") for name in named(row[0])}
    kinds = {name for name in vars(errors) if name.startswith("Realtime")}
    assert kinds <= listed
