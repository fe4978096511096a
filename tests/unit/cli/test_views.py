"""What the commands print, as JSON and as their exit status."""

from __future__ import annotations

import json

import pytest

from capsule_tasks.cli import views
from capsule_tasks.client import Event, GroupState
from capsule_tasks.protocol.messages import Output
from capsule_tasks.storage.executions.types import RecentEntry

HOSTILE = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)])) + '"\\ é'


@pytest.mark.parametrize(
    "line",
    [
        views.as_json(Event("1-1", 0.0, Output(stream="stdout", data=HOSTILE))),
        views.format_line({"data": HOSTILE}),
        views.entry_json(RecentEntry("e", 0.0, "running", task=HOSTILE)),
    ],
)
def test_json_has_no_controls_and_loses_none(line: str) -> None:
    assert HOSTILE in json.loads(line).values()
    assert line.isprintable()


@pytest.mark.parametrize(
    ("counts", "total", "status"),
    [
        ({}, 0, 0),
        ({"succeeded": 2}, 2, 0),
        ({"succeeded": 1}, 2, 1),
        ({"succeeded": 1, "failed": 1}, 2, 1),
        ({"succeeded": 1, "lost": 1}, 2, 1),
        ({"cancelled": 2}, 2, 1),
        ({"rejected": 2}, 2, 1),
    ],
)
def test_a_group_succeeds_if_every_member_does(
    counts: dict[str, int], total: int, status: int
) -> None:
    assert views.group_status(GroupState(total, counts)) == status


def test_a_group_of_which_nothing_was_heard_has_not_succeeded() -> None:
    assert views.group_status(None) == 1
