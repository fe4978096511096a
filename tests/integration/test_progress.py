"""`progress` reports to watchers how far an execution is, in order with its output."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks import progress
from capsule_tasks.protocol.messages import Output, Progress
from capsule_tasks.sessions import Session
from capsule_tasks.settings import OutputSettings
from tests.sessions import Watched, child_config, collect, end_of, eventually

IMPORT = "from capsule_tasks import progress\n"


async def progress_of(session: Session, source: str) -> list[tuple[float, float | None, str]]:
    messages = await collect(session, IMPORT + source)
    return [(m.done, m.total, m.note) for m in messages if isinstance(m, Progress)]


async def test_progress_arrives_while_the_code_runs(session: Session) -> None:
    watched = Watched(
        session, f"{IMPORT}import time\nprogress(1, 4, 'a quarter')\ntime.sleep(3600)"
    )
    message = await watched.until(Progress)
    assert (message.done, message.total, message.note) == (1.0, 4.0, "a quarter")
    assert message.execution_id == watched.execution_id
    await session.cancel(watched.execution_id)
    await watched.ended()


async def test_progress_keeps_its_place_in_the_output(session: Session) -> None:
    messages = await collect(
        session, f"{IMPORT}for i in range(50):\n    print(i, end='')\n    progress(i)\n"
    )
    order = [m.data if isinstance(m, Output) else str(int(m.done)) for m in messages[1:-1]]
    assert order == [str(i) for i in range(50) for _ in range(2)]


async def test_total_and_note_are_optional(session: Session) -> None:
    assert await progress_of(session, "progress(0.5)") == [(0.5, None, "")]


async def test_numbers_of_any_kind_are_reported(session: Session) -> None:
    source = (
        "import fractions, numpy as np\n"
        "progress(np.float32(0.5), np.int64(2))\n"
        "progress(fractions.Fraction(1, 4), True)"
    )
    assert await progress_of(session, source) == [(0.5, 2.0, ""), (0.25, 1.0, "")]


@pytest.mark.parametrize("wrong", ["'half'", "None", "object()"])
async def test_progress_that_is_no_number_is_the_callers_error(
    session: Session, wrong: str
) -> None:
    error = await end_of(session, f"{IMPORT}progress({wrong})")
    assert error.type in ("TypeError", "ValueError")
    assert (await session.run("1")).value == 1


async def test_any_note_can_be_reported(session: Session) -> None:
    source = "progress(1, note='\\ud800')\nprogress(2, note=5)\nprogress(3, note='x' * 10_000_000)"
    notes = [note for _, _, note in await progress_of(session, source)]
    assert notes[:2] == ["\\ud800", "5"]
    assert notes[2] == "x" * len(notes[2])
    assert 100 < len(notes[2]) < 100_000


async def test_coroutines_and_threads_tell_their_own(session: Session) -> None:
    await session.run(f"{IMPORT}import asyncio")
    source = "await asyncio.sleep(0)\nprogress({0})\nawait asyncio.to_thread(progress, {0}, 10)"
    executions = [Watched(session, source.format(i)) for i in range(5)]
    for i, execution in enumerate(executions):
        await execution.ended()
        reported = [(m.done, m.total) for m in execution.messages if isinstance(m, Progress)]
        assert reported == [(i, None), (i, 10)]


async def test_progress_after_the_end_belongs_to_no_execution(session: Session) -> None:
    await session.run(
        f"{IMPORT}import threading\n"
        "go = threading.Event()\n"
        "late = threading.Thread(target=lambda: (go.wait(), progress(1)))\n"
        "late.start()"
    )
    messages = await collect(session, "go.set(); late.join()")
    assert not [m for m in messages if isinstance(m, Progress)]


async def test_when_output_may_be_dropped_it_does_not_hold_the_code_up() -> None:
    output = OutputSettings(backpressure="drop_oldest", window_bytes=20_000, chunk_bytes=4096)
    async with Session(child_config(output=output)) as session:
        stream = session.execute(f"{IMPORT}for i in range(10_000): progress(i)\n'through'")
        await anext(stream)
        await eventually(lambda: not session.info.running)
        async with asyncio.timeout(30):
            rest = [message async for message in stream]
    assert rest[-1].value == "through"  # type: ignore[attr-defined]
    assert 0 < len(rest) - 1 < 10_000


def test_outside_of_a_session_it_does_nothing() -> None:
    progress(1, 2, "unwatched")
