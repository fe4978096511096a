"""Callers cancelled at every turn of the loop: whatever they were in, nothing is left of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from capsule_tasks.errors import CapsuleError
from capsule_tasks.protocol.messages import Ack, InputRequest, Output
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import TimeoutSettings
from tests.chaos.census import Census
from tests.chaos.recorder import Recorder
from tests.chaos.storm import SCALE, SEED, STEP_S, unhandled_errors, until
from tests.chaos.turns import Turns
from tests.chaos.workloads import STOPPABLE, STUBBORN
from tests.sessions import Watched, collect

pytestmark = pytest.mark.chaos

Work = Coroutine[Any, Any, Any]
STRIDE = max(1, round(2 / SCALE))
MOST_TURNS = 400


async def begun(session: Session, source: str) -> Watched:
    """An execution that has begun on a session that has started."""
    if session.state is SessionState.CREATING:
        await session.start()
    watched = Watched(session, source)
    await watched.until(Output if "begun" in source else Ack)
    return watched


async def a_start(session: Session) -> Work:
    return session.start()


async def a_whole_life(session: Session) -> Work:
    async def life() -> None:
        async with session:
            await session.run("print('x' * 200_000)\n1")

    return life()


async def an_execution(session: Session) -> Work:
    await session.start()
    return collect(session, "for i in range(20): print(i, flush=True)\n6 * 7")


async def a_stubborn_execution(session: Session) -> Work:
    await session.start()
    return collect(session, STUBBORN["swallows"], timeout_s=0.02)


async def an_execution_that_waits_for_a_restart(session: Session) -> Work:
    await session.start()

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(session.restart())
            await asyncio.sleep(0)
            group.create_task(collect(session, "1 + 1"))

    return both()


async def a_cancel(session: Session) -> Work:
    return session.cancel((await begun(session, STOPPABLE["finally"])).execution_id, 5.0)


async def a_cancel_by_force(session: Session) -> Work:
    return session.cancel((await begun(session, STUBBORN["swallows"])).execution_id, 0.01)


async def a_cancel_that_condemns(session: Session) -> Work:
    await begun(session, STOPPABLE["await"])
    return session.cancel((await begun(session, STUBBORN["await ignores"])).execution_id, 0.01)


async def an_interrupt_by_force(session: Session) -> Work:
    await begun(session, STUBBORN["swallows"])
    return session.interrupt(force_restart=True)


async def a_shutdown(session: Session) -> Work:
    await begun(session, STOPPABLE["finally"])
    return session.shutdown()


async def a_shutdown_of_stubborn_code(session: Session) -> Work:
    await begun(session, STUBBORN["swallows"])
    return session.shutdown()


async def a_terminate(session: Session) -> Work:
    await begun(session, STOPPABLE["loop"])
    return session.terminate()


async def a_restart(session: Session) -> Work:
    await begun(session, STOPPABLE["loop"])
    return session.restart()


async def a_checkpoint(session: Session) -> Work:
    await session.start()
    await session.run("numbers = list(range(10_000))")

    async def there_and_back() -> None:
        await session.restore(await session.checkpoint())

    return there_and_back()


async def an_answer(session: Session) -> Work:
    watched = await begun(session, "input('? ')")
    request = await watched.until(InputRequest)

    async def answer() -> None:
        await session.input_response("me", request_id=request.id, execution_id=watched.execution_id)
        await watched.ended()

    return answer()


async def some_questions(session: Session) -> Work:
    await begun(session, STUBBORN["holds the GIL"])

    async def ask() -> None:
        await session.stack()
        await session.namespace_summary(0.05)

    return ask()


async def a_wait_for_a_message(session: Session) -> Work:
    await session.start()
    return session.receive_message(0.05)


SCENES: tuple[Callable[[Session], Awaitable[Work]], ...] = (
    a_start,
    a_whole_life,
    an_execution,
    a_stubborn_execution,
    an_execution_that_waits_for_a_restart,
    a_cancel,
    a_cancel_by_force,
    a_cancel_that_condemns,
    an_interrupt_by_force,
    a_shutdown,
    a_shutdown_of_stubborn_code,
    a_terminate,
    a_restart,
    a_checkpoint,
    an_answer,
    some_questions,
    a_wait_for_a_message,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_a_caller_cancelled_at_any_turn_leaves_nothing_of(scene: Any) -> None:
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201 - shown when the test fails
    offset = random.Random(f"{SEED} {scene.__name__}").randrange(STRIDE)
    with unhandled_errors() as unhandled:
        for number, turn in enumerate(range(offset, MOST_TURNS, STRIDE)):
            once_or_twice = (turn, turn + 1)[: 1 + number % 2]
            if not await cancelled_at(scene, *once_or_twice):
                break
    assert not unhandled, unhandled


async def cancelled_at(scene: Callable[[Session], Awaitable[Work]], *turns: int) -> bool:
    """Play the scene; whether its caller was still at work at that turn."""
    census = Census()
    came_in_time = await played(scene, census, turns)
    await census.back_to_start()
    return came_in_time


async def played(
    scene: Callable[[Session], Awaitable[Work]], census: Census, turns: tuple[int, ...]
) -> bool:
    timeouts = TimeoutSettings(ready_s=STEP_S, shutdown_s=0.1, grace_s=0.05, drain_s=0.05)
    recorder = Recorder(Session(SessionConfig(env=census.environment(), timeouts=timeouts)))
    session = recorder.session
    try:
        work = await recorder.within(STEP_S, "the scene", scene(session))
        with Turns(*turns) as counted:
            counted.victim = asyncio.create_task(work, name=scene.__name__)
            await recorder.within(STEP_S, scene.__name__, asyncio.wait({counted.victim}))
        check_end(counted.victim, counted.has_cancelled)
        await recorder.within(STEP_S, "coming to rest", rest(session))
        await recorder.within(STEP_S, "a restart", session.restart())
        assert (await recorder.within(STEP_S, "1 + 1", session.run("1 + 1"))).value == 2
        await recorder.within(STEP_S, "the end", session.terminate())
        assert not recorder.violations
    except AssertionError as error:
        error.add_note(f"cancelled at turn {turns}\n{await recorder.report()}")
        raise
    return counted.has_cancelled


def check_end(victim: asyncio.Task[Any], was_cancelled: bool) -> None:
    if victim.cancelled():
        assert was_cancelled, "nothing cancelled it"
        return
    error = victim.exception()
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    allowed = (CapsuleError, TimeoutError, type(None))
    assert all(isinstance(error, allowed) for error in errors), errors


async def rest(session: Session) -> None:
    """On its way nowhere, and nothing runs that was to be stopped."""
    moving = (SessionState.WARMING, SessionState.SHUTTING_DOWN)
    await until(lambda: session.state not in moving)
