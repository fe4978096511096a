"""Code that runs once, before anyone else's: its names stay, its output goes to the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.errors import SessionStartFailed
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import TimeoutSettings
from tests.chaos.census import Census
from tests.sessions import HANG_S, Watched, collect, end_of, eventually, text


@pytest.fixture
async def census() -> AsyncIterator[Census]:
    census = Census()
    yield census
    await census.back_to_start()


def warmed(census: Census, warmup: str, **settings: Any) -> Session:
    return Session(SessionConfig(env=census.environment(), warmup=warmup, **settings))


async def failure(session: Session) -> SessionStartFailed:
    async with asyncio.timeout(HANG_S):
        with pytest.raises(SessionStartFailed) as failed:
            await session.start()
    assert session.state is SessionState.ERROR
    await session.shutdown()
    return failed.value.with_traceback(None)


async def test_its_names_are_there_for_the_first_execution(census: Census) -> None:
    async with warmed(census, "import json\ndef greet(): return json.dumps('hi')") as session:
        assert session.state is SessionState.READY
        assert (await session.run("greet()")).value == '"hi"'


async def test_output_of_a_warmup_goes_to_the_log_and_to_no_execution(
    census: Census, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "capsule_tasks.sessions")
    source = "import os\nprint('w' * 500_000)\nprint('warming')\nos.system('echo raw')"
    async with warmed(census, source) as session:
        messages = await collect(session, "print('mine')")
        assert text(messages) == "mine\n"
        assert messages[-1].stdout_bytes == 5  # type: ignore[attr-defined]
    assert "warming" in caplog.text
    assert "raw" in caplog.text


async def test_a_warmup_is_no_execution_of_the_sessions_user(census: Census) -> None:
    async with warmed(census, "1 + 1") as session:
        assert (session.info.execution_count, session.info.error_count) == (0, 0)
        assert (await end_of(session, "_")).value == 2
        assert session.info.running == ()


async def test_a_warmup_may_await(census: Census) -> None:
    source = (
        "import asyncio\nawait asyncio.sleep(0)\ntask = asyncio.ensure_future(asyncio.sleep(0, 5))"
    )
    async with warmed(census, source) as session:
        assert (await session.run("await task")).value == 5


async def test_executions_and_checkpoints_work_as_without_it(census: Census) -> None:
    async with warmed(census, "x = 1\nprint('warm')") as session:
        assert (await session.checkpoint()).saved == ("x",)
        watched = Watched(session, "print('on', flush=True)\nimport time; time.sleep(3600)")
        await watched.until_output("on")
        assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
        await watched.ended()
        assert (await session.run("x")).value == 1


async def test_a_warmup_runs_again_after_a_restart(census: Census) -> None:
    async with warmed(census, "x = ['fresh']") as session:
        await session.run("x.append('used')")
        await session.restart()
        assert (await session.run("x")).value == ["fresh"]


async def test_a_warmup_that_raises_fails_the_start_and_says_why(census: Census) -> None:
    error = await failure(warmed(census, "def warm():\n    1 / 0\nwarm()"))
    assert str(error) == "the warmup failed: ZeroDivisionError: division by zero"
    assert 'File "<warmup>", line 2, in warm' in error.__notes__[0]


async def test_a_warmup_that_does_not_compile_fails_the_start(census: Census) -> None:
    assert "SyntaxError" in str(await failure(warmed(census, "def")))


async def test_a_warmup_that_exits_the_process_fails_the_start(census: Census) -> None:
    assert "exited with status 9" in str(await failure(warmed(census, "import os; os._exit(9)")))


async def test_a_warmup_that_calls_sys_exit_fails_the_start(census: Census) -> None:
    assert "SystemExit: 9" in str(await failure(warmed(census, "import sys; sys.exit(9)")))


@pytest.mark.parametrize(
    "hang",
    ["time.sleep(3600)", "while True: pass", "ctypes.PyDLL(None).sleep(3600)"],
    ids=["sleeps", "loops", "holds the GIL"],
)
async def test_a_warmup_that_hangs_fails_the_start_and_leaves_its_stack(
    census: Census, hang: str
) -> None:
    source = f"import ctypes, time\ndef stuck():\n    {hang}\nstuck()"
    timeouts = TimeoutSettings(warmup_s=0.2, stack_s=10)
    error = await failure(warmed(census, source, timeouts=timeouts))
    assert "the warmup ran longer than 0.2 s" in str(error)
    assert "stuck" in error.__notes__[0]


async def test_a_warmup_that_asks_for_input_is_not_answered_and_times_out(census: Census) -> None:
    timeouts = TimeoutSettings(warmup_s=0.2)
    error = await failure(warmed(census, "input('anyone?')", timeouts=timeouts))
    assert "the warmup ran longer than 0.2 s" in str(error)


async def test_the_session_is_not_ready_before_it_has_ended(census: Census) -> None:
    session = warmed(census, "import time; time.sleep(3600)")
    states: list[SessionState] = []
    session.add_state_listener(lambda old, new: states.append(new))
    starting = asyncio.ensure_future(session.start())
    await eventually(lambda: session.info.running == ("warmup",))
    assert states == [SessionState.WARMING]
    await session.terminate()
    with pytest.raises(SessionStartFailed):
        await starting
    assert SessionState.READY not in states
