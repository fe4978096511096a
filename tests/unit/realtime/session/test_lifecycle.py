"""The phases of a session: every phase and move, and where they can lead."""

from __future__ import annotations

from itertools import product

import pytest

from capsule_tasks.realtime.session.lifecycle import ACTIVE, TRANSITIONS, Move, Phase, moved


@pytest.mark.parametrize(("phase", "move"), [*product(Phase, Move)])
def test_a_move_leads_where_the_table_says_or_is_refused(phase: Phase, move: Move) -> None:
    assert moved(phase, move) is TRANSITIONS.get((phase, move))


def test_a_session_is_entered_once() -> None:
    entered = [phase for phase in Phase if moved(phase, Move.ENTER)]
    assert entered == [Phase.NEW]


def test_each_phase_but_the_last_can_be_closed_and_the_last_is_left_by_nothing() -> None:
    for phase in set(Phase) - {Phase.CLOSED, Phase.CLOSING}:
        assert moved(phase, Move.CLOSE) is Phase.CLOSING
    assert not any(moved(Phase.CLOSED, move) for move in Move)


def test_a_failed_close_goes_nowhere_but_to_another_close() -> None:
    assert [move for move in Move if moved(Phase.CLOSE_FAILED, move)] == [Move.CLOSE]


def test_nothing_is_active_that_is_closing_or_closed() -> None:
    assert sorted(ACTIVE) == [Phase.OPEN, Phase.OPENING]
