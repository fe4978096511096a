"""The lines of the commands, for a terminal and as JSON, and their exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capsule_tasks.cli import views
from capsule_tasks.client import Event, GroupState
from capsule_tasks.protocol.events import AttemptClaimed, AttemptEnded, SessionRestored
from capsule_tasks.protocol.messages import InputRequest, Output, RunEvent
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
def test_json_escapes_controls_and_drops_none(line: str) -> None:
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


def test_a_group_without_any_state_has_not_succeeded() -> None:
    assert views.group_status(None) == 1


def shown(capsys: pytest.CaptureFixture[str], message: Any) -> str:
    printer = views.EventPrinter(respond_with="celery capsule respond e TEXT", raw=False)
    printer.show(Event("1-1", 0.0, message))
    return capsys.readouterr().err


def test_a_claim_names_its_worker(capsys: pytest.CaptureFixture[str]) -> None:
    claimed = AttemptClaimed(worker="celery@a")
    assert shown(capsys, claimed) == "-- claimed by celery@a\n"


def test_a_question_is_shown_with_the_command_that_responds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = InputRequest(execution_id="e", prompt="name? ")
    assert shown(capsys, asked) == (
        "-- question: name?\n-- respond with: celery capsule respond e TEXT\n"
    )


@pytest.mark.parametrize(("detail", "added"), [("", ""), ("the child died", " (the child died)")])
def test_the_end_of_an_attempt_announces_another_one(
    capsys: pytest.CaptureFixture[str], detail: str, added: str
) -> None:
    ended = AttemptEnded(outcome="lost", detail=detail)
    assert shown(capsys, ended) == f"-- attempt ended: lost{added}; another attempt follows\n"


def test_a_restored_session_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "its namespace is empty; 2 calls since are lost" in shown(
        capsys, SessionRestored(lost_calls=2)
    )
    restored = SessionRestored(
        saved_at=0.0, lost=("a\x1b[1m", "b"), differences=("numpy 1, not 2",)
    )
    said = shown(capsys, restored)
    assert "from its checkpoint of 19" in said
    assert "; lost: a, b; different: numpy 1, not 2" in said


def test_an_event_of_a_run_is_a_line_unless_it_is_a_piece_of_a_reply(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turn = RunEvent.of("turn", "support", {"turn": 1})
    assert shown(capsys, turn) == "-- turn of support\n"
    piece = RunEvent.of("raw_response_event", "support", {"delta": "I ref"})
    assert shown(capsys, piece) == ""
    piece.dropped_events = 7
    line = "-- raw_response_event of support (7 events before it were dropped)\n"
    assert shown(capsys, piece) == line


def test_the_data_of_an_event_of_a_run_is_json_within_json() -> None:
    event = RunEvent.of("turn", "support", {"turn": 1})
    event.execution_id = "e"
    assert json.loads(views.as_json(Event("1-1", 0.0, event))) == {
        "event": "1-1",
        "at": 0.0,
        "t": "run_event",
        "kind": "turn",
        "agent": "support",
        "data": {"turn": 1},
    }
