"""The phases of a session, and where they can lead."""

from __future__ import annotations

from capsule_tasks.realtime.session.lifecycle import ACTIVE, TRANSITIONS, Phase


def phases_before(phase: Phase) -> list[Phase]:
    return [before for before in Phase if phase in TRANSITIONS[before]]


def test_a_session_is_entered_once() -> None:
    assert phases_before(Phase.NEW) == []
    assert phases_before(Phase.OPENING) == [Phase.NEW]
    assert phases_before(Phase.OPEN) == [Phase.OPENING]


def test_each_phase_but_the_last_can_be_closed_and_the_last_is_left_by_nothing() -> None:
    assert set(phases_before(Phase.CLOSING)) == set(Phase) - {Phase.CLOSED, Phase.CLOSING}
    assert not TRANSITIONS[Phase.CLOSED]


def test_a_failed_close_goes_nowhere_but_to_another_close() -> None:
    assert TRANSITIONS[Phase.CLOSE_FAILED] == {Phase.CLOSING}


def test_nothing_is_active_that_is_closing_or_closed() -> None:
    assert sorted(ACTIVE) == [Phase.OPEN, Phase.OPENING]
