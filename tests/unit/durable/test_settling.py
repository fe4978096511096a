"""The answers of people about uncertain calls."""

from __future__ import annotations

import pytest

from capsule_tasks.durable.engine import ToolCall
from capsule_tasks.durable.settling import Settlement, request_to_settle, settlement
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from capsule_tasks.storage.runs.types import Decisions, StoredDecision

REQUEST = request_to_settle(ToolCall("call_1", "bare:pay", "shop", "{}"), 1)


def answered(approved: bool, message: str | None, output: str | None) -> Settlement | None:
    decision = StoredDecision(
        call=REQUEST.call_id,
        tool=REQUEST.tool,
        agent=REQUEST.agent,
        approved=approved,
        at=2,
        message=message,
        output=output,
    )
    return settlement(REQUEST, Decisions(exact=(decision,)))


@pytest.mark.parametrize(
    ("approved", "message", "output", "expected"),
    [
        (True, None, None, Settlement("again")),
        (False, None, '{"paid":9}', Settlement("made", {"paid": 9})),
        (False, None, "null", Settlement("made", None)),
        (False, "too late", None, Settlement("never", "too late")),
        (False, "made:null", None, Settlement("never", "made:null")),
        (False, None, None, Settlement("never", DEFAULT_REJECTION)),
    ],
)
def test_an_answer_is_read_as_it_was_given(
    approved: bool, message: str | None, output: str | None, expected: Settlement
) -> None:
    assert answered(approved, message, output) == expected


def test_without_an_answer_there_is_nothing_to_do() -> None:
    assert settlement(REQUEST, Decisions()) is None
