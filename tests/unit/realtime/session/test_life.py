"""The life of a session: its phases, and the steps of its cleanup."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.realtime.session.life import ACTIVE, TRANSITIONS, Phase, SessionLife, Step
from capsule_tasks.realtime.session.tasks import OwnedTasks


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


# --- the cleanup ---------------------------------------------------------------------------------


def life_of(*steps: Step) -> SessionLife:
    def nothing(error: Exception | None) -> None:
        assert error is None

    return SessionLife(OwnedTasks(nothing, 5), nothing, *steps)


async def test_all_steps_are_tried_and_only_failed_ones_are_made_again() -> None:
    made: list[int] = []
    failing = {1: ValueError("first"), 2: ValueError("second")}

    def step(number: int) -> Step:
        async def make() -> None:
            made.append(number)
            if number in failing:
                raise failing.pop(number)

        return make

    steps = [step(number) for number in range(5)]
    life = life_of(*steps)
    for each in (3, 2, 1, 0):
        life.add_to_cleanup(steps[each])
    with pytest.raises(ValueError, match="first"):
        await life.close()
    assert (made, life.phase) == ([0, 1, 2, 3], Phase.CLOSE_FAILED)
    await life.close()
    assert (made[4:], life.phase) == ([1, 2], Phase.CLOSED)
    await life.close()
    assert made[6:] == []


async def test_a_cancel_of_the_cleanup_skips_no_later_step() -> None:
    made: list[str] = []
    has_begun = asyncio.Event()

    async def waiting() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    async def later() -> None:
        made.append("later")

    life = life_of(waiting, later)
    life.add_to_cleanup(waiting)
    life.add_to_cleanup(later)
    closing = asyncio.create_task(life.close())
    await has_begun.wait()
    [cleanup] = asyncio.all_tasks() - {closing, asyncio.current_task()}
    cleanup.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (made, life.phase) == (["later"], Phase.CLOSE_FAILED)
