"""Starting: what is agreed on, what is applied, and how each way of failing ends."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capsule_tasks.errors import IncompatibleProtocol, SessionStartFailed
from capsule_tasks.protocol.messages import CAPABILITIES, Message, Output, Ready
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    ExecutorSettings,
    InputSettings,
    LimitSettings,
    OutputSettings,
    TimeoutSettings,
)
from tests.chaos.census import Census
from tests.sessions import HANG_S, eventually

IMPATIENT = TimeoutSettings(ready_s=0.3)


@pytest.fixture
async def census() -> AsyncIterator[Census]:
    """Nothing of a start that fails is left."""
    census = Census()
    yield census
    await census.back_to_start()


def script(tmp_path: Path, source: str) -> str:
    """An interpreter that is none."""
    path = tmp_path / "python"
    path.write_text(source)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def failure(census: Census, **settings: Any) -> BaseException:
    """How a start fails; the session is in ERROR, can be stopped, and a restart fails alike."""
    session = Session(SessionConfig(env=census.environment(), **settings))
    async with asyncio.timeout(HANG_S):
        with pytest.raises((SessionStartFailed, IncompatibleProtocol)) as failed:
            await session.start()
        assert session.state is SessionState.ERROR
        assert not session.is_alive
        assert session.info.pid is None
        assert session.info.last_error
        with pytest.raises(type(failed.value)):
            await session.restart()
        assert session.state is SessionState.ERROR
        await session.shutdown()
        await session.terminate()
    assert session.state is SessionState.TERMINATED
    return failed.value.with_traceback(None)


# --- what is agreed on ---------------------------------------------------------------------------


async def test_the_negotiated_values_are_in_the_info(session: Session) -> None:
    metadata = session.info.metadata
    assert metadata["protocol_version"] == 1
    assert metadata["capabilities"] == tuple(sorted(CAPABILITIES))
    assert metadata["python"].startswith("3.")


async def test_the_best_common_version_is_chosen() -> None:
    async with Session(SessionConfig(protocol_versions=(99, 1))) as session:
        assert session.info.metadata["protocol_version"] == 1


async def test_ready_names_the_session_and_the_child() -> None:
    seen: list[Message] = []
    session = Session(session_id="named")
    session.add_message_interceptor(seen.append)
    async with session:
        ready = seen[0]
        assert isinstance(ready, Ready)
        assert (ready.session_id, ready.pid) == ("named", session.info.pid)


async def test_the_effective_settings_come_back() -> None:
    child = ChildSettings(
        executor=ExecutorSettings(max_waiting=7, switch_interval_s=0.002),
        output=OutputSettings(backpressure="drop_oldest", window_bytes=12_345),
        input=InputSettings(timeout_s=12.5),
        limits=LimitSettings(output_bytes=99),
        diagnostics=DiagnosticSettings(summary_names=3, redact=("*x*",), log_level="ERROR"),
        max_frame_bytes=1_000_000,
    )
    async with Session(SessionConfig(child=child)) as session:
        assert session.info.metadata["config"] == child
        assert (await session.run("import sys; sys.getswitchinterval()")).value == 0.002


async def test_a_limit_over_the_systems_own_comes_back_as_it_really_is() -> None:
    limits = LimitSettings(open_files=2**40)
    async with Session(SessionConfig(child=ChildSettings(limits=limits))) as session:
        source = "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)[0]"
        real = (await session.run(source)).value
        assert session.info.metadata["config"].limits.open_files == real < 2**40


async def test_the_child_logs_its_effective_settings() -> None:
    settings = DiagnosticSettings(log_level="INFO", summary_names=77)
    async with Session(SessionConfig(child=ChildSettings(diagnostics=settings))) as session:
        message = await session.receive_message(timeout_s=HANG_S)
        assert isinstance(message, Output)
        assert (message.execution_id, message.stream) == (None, "stderr")
        assert "summary_names=77" in message.data


async def test_environment_and_directory_are_as_configured(tmp_path: Path) -> None:
    environment = {**os.environ, "ONLY_HERE": "yes"}
    async with Session(SessionConfig(cwd=str(tmp_path), env=environment)) as session:
        done = await session.run("import os; (os.getcwd(), os.environ['ONLY_HERE'])")
    assert done.value == (str(tmp_path), "yes")


async def test_the_child_knows_neither_celery_nor_redis_nor_the_parents_side(
    session: Session,
) -> None:
    source = (
        "import sys\n"
        "[m for m in sys.modules if m.partition('.')[0] in ('celery', 'kombu', 'redis')\n"
        " or m.startswith('capsule_tasks.sessions')]"
    )
    assert (await session.run(source)).value == []


# --- how a start fails ---------------------------------------------------------------------------


async def test_without_a_common_version_the_session_ends_in_error(census: Census) -> None:
    error = await failure(census, protocol_versions=(99, 98))
    assert isinstance(error, IncompatibleProtocol)
    assert str(error).startswith("incompatible_protocol: ")
    assert "[99, 98]" in str(error)


async def test_an_interpreter_that_does_not_exist(census: Census) -> None:
    error = await failure(census, python="/nowhere/python")
    assert "/nowhere/python" in str(error)


async def test_a_directory_that_does_not_exist(census: Census) -> None:
    assert "/nowhere" in str(await failure(census, cwd="/nowhere"))


async def test_a_child_that_exits_at_once(census: Census, tmp_path: Path) -> None:
    python = script(tmp_path, "#!/bin/sh\necho 'cannot do that' >&2\nexit 41\n")
    error = await failure(census, python=python)
    assert "exited with status 41" in str(error)


async def test_an_interpreter_without_the_package(census: Census, tmp_path: Path) -> None:
    """The child dies of an ImportError, and its traceback is not lost."""
    python = script(tmp_path, "#!/bin/sh\necho 'No module named msgspec' >&2\nexit 1\n")
    error = await failure(census, python=python)
    assert "No module named msgspec" in "\n".join(error.__notes__)


async def test_a_child_that_never_gets_ready(census: Census, tmp_path: Path) -> None:
    python = script(tmp_path, "#!/bin/sh\nsleep 3600\n")
    error = await failure(census, python=python, timeouts=IMPATIENT)
    assert "not ready within 0.3 s" in str(error)


async def test_a_child_that_stops_on_the_way_up(census: Census, tmp_path: Path) -> None:
    python = script(tmp_path, "#!/bin/sh\nkill -STOP $$\n")
    error = await failure(census, python=python, timeouts=IMPATIENT)
    assert "not ready within 0.3 s" in str(error)


async def test_a_child_that_answers_hello_with_garbage(census: Census, tmp_path: Path) -> None:
    """Its descriptors are the fourth argument and those behind it: control comes first."""
    python = script(
        tmp_path,
        "#!/bin/sh\n"
        "while [ $# -gt 5 ]; do shift; done\n"
        'for n in "$@"; do { echo "garbage garbage" >&$n; } 2>/dev/null; done\n'
        "sleep 3600\n",
    )
    error = await failure(census, python=python)
    assert "the child " in str(error)


async def test_a_child_killed_on_the_way_up(census: Census) -> None:
    session = Session(SessionConfig(env=census.environment()))
    starting = asyncio.ensure_future(session.start())
    pid = await eventually(lambda: session.info.pid)
    os.kill(pid, 9)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(SessionStartFailed, match="SIGKILL"):
            await starting
    assert session.state is SessionState.ERROR
    await session.restart()
    assert (await session.run("1")).value == 1
    await session.shutdown()


async def test_out_of_descriptors(census: Census) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    fourth_free = sorted(set(range(len(used) + 4)) - used)[3]
    session = Session(SessionConfig(env=census.environment()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fourth_free, hard))
    try:
        with pytest.raises(SessionStartFailed, match="Too many open files"):
            await session.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert session.state is SessionState.ERROR
    await session.restart()
    assert (await session.run("1")).value == 1
    await session.shutdown()


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="with at least 1 of them"):
        SessionConfig(protocol_versions=())
    with pytest.raises(ValueError, match="window_bytes = 0"):
        OutputSettings(window_bytes=0)
    assert msgspec.structs.asdict(SessionConfig())["warmup"] is None
