"""However a child goes, every wait ends at once with an error that names the cause."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.errors import SessionLost, SessionStateError
from capsule_tasks.protocol.messages import Ack, Error, ErrorKind, Message
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import ChildSettings, DiagnosticSettings, TimeoutSettings
from tests.chaos.census import Census
from tests.sessions import HANG_S, Watched, collect, end_of, eventually, text

GARBAGE_EVERYWHERE = """\
import os
for descriptor in map(int, os.listdir('/proc/self/fd')):
    if descriptor != 0:
        try: os.write(descriptor, b'\\xff' * 4096)
        except OSError: pass
import time; time.sleep(3600)
"""


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    """A session that leaves nothing behind, however it ends."""
    census = Census()
    async with Session(SessionConfig(env=census.environment())) as session:
        yield session
    kept_by_pytest = ("LiveChild", "ExecutionStream")
    await eventually(
        lambda: not [line for line in census.left_behind() if not line.startswith(kept_by_pytest)]
    )


async def lost(session: Session, source: str) -> Error:
    """The error of an execution in which the child is lost."""
    error = await end_of(session, source)
    assert isinstance(error, Error)
    assert (error.kind, error.type) == (ErrorKind.LOST, "SessionLost")
    assert session.state is SessionState.ERROR
    assert not session.is_alive
    assert session.info.last_error == error.message
    return error


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import os; os._exit(3)", "exited with status 3"),
        ("import os; os._exit(0)", "exited with status 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("import os, asyncio\nawait asyncio.sleep(0)\nos._exit(4)", "exited with status 4"),
        ("import ctypes; ctypes.CDLL(None).exit(5)", "exited with status 5"),
    ],
    ids=["exit 3", "exit 0", "SIGKILL", "SIGTERM", "abort", "in a coroutine", "by C code"],
)
async def test_the_error_names_the_exit(session: Session, source: str, cause: str) -> None:
    assert cause in (await lost(session, source)).message


async def test_a_crash_carries_the_stack_that_faulthandler_wrote(session: Session) -> None:
    error = await lost(
        session, "import ctypes\ndef deep_inside(): ctypes.string_at(0)\ndeep_inside()"
    )
    assert "was killed by SIGSEGV" in error.message
    assert "Segmentation fault" in error.stack
    assert "deep_inside" in error.stack


@pytest.mark.parametrize("lowest", [0, 3])
@pytest.mark.parametrize("last", ["print('x' * 100_000)", "'the end'", "while True: print(1)"])
async def test_code_that_closes_the_childs_descriptors_loses_the_session(
    session: Session, lowest: int, last: str
) -> None:
    error = await lost(session, f"import os\nos.closerange({lowest}, 65_536)\n{last}")
    assert "the child " in error.message


async def test_closed_descriptors_are_noticed_at_the_next_request(session: Session) -> None:
    watched = Watched(session, "import os, time\nos.closerange(3, 65_536)\ntime.sleep(3600)")
    await watched.until(Ack)

    async def ask_again_and_again() -> None:
        while True:
            await session.namespace_summary(timeout_s=HANG_S)

    with pytest.raises((SessionLost, SessionStateError)):
        await ask_again_and_again()
    assert (await watched.ended()).kind == ErrorKind.LOST


async def test_a_bad_frame_is_named_as_the_cause(session: Session) -> None:
    error = await lost(session, GARBAGE_EVERYWHERE)
    assert "broke the protocol" in error.message
    assert "4294967295 bytes" in error.message


async def test_an_end_of_file_without_an_exit_costs_no_cpu_until_the_kill(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule_tasks.sessions.process.live_child._LOST_GRACE_S", 1.0)
    cpu = time.process_time()
    error = await lost(
        session,
        "import os, socket, stat, time\n"
        "for n in map(int, os.listdir('/proc/self/fd')):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(n).st_mode):\n"
        "            socket.socket(fileno=os.dup(n)).shutdown(socket.SHUT_WR)\n"
        "    except OSError: pass\n"
        "time.sleep(3600)",
    )
    assert "closed its end" in error.message
    assert "was killed by SIGKILL" in error.message
    assert time.process_time() - cpu < 0.5


async def test_code_that_closes_its_output_costs_the_parent_no_cpu(session: Session) -> None:
    cpu = time.process_time()
    await session.run("import os, time\nos.close(1); os.close(2)\ntime.sleep(1)")
    assert time.process_time() - cpu < 0.5


async def test_the_exit_is_noticed_while_a_descendant_holds_the_pipes(session: Session) -> None:
    error = await lost(
        session,
        "import os, subprocess\nsubprocess.Popen(['sleep', '3600'], close_fds=False)\nos._exit(7)",
    )
    assert "exited with status 7" in error.message


async def test_output_from_before_a_kill_arrives(session: Session) -> None:
    messages = await collect(
        session,
        "import os\nprint('x' * 500_000)\nprint('last', flush=True)\nos.kill(os.getpid(), 9)",
    )
    assert text(messages) == "x" * 500_000 + "\nlast\n"
    assert messages[-1].stdout_bytes == 500_006


async def test_a_kill_in_the_middle_of_a_flood_ends_it_once(session: Session) -> None:
    watched = Watched(session, "while True: print('x' * 1000)")
    await watched.until_output("x")
    os.kill(session.info.pid or 0, signal.SIGKILL)
    error = await watched.ended()
    assert "was killed by SIGKILL" in error.message
    assert error.stdout_bytes == len(text(watched.messages))


async def test_every_kind_of_wait_ends_when_the_child_is_lost(session: Session) -> None:
    await session.run("import asyncio, os")
    executions = [Watched(session, "await asyncio.sleep(3600)") for _ in range(3)]
    asking = Watched(session, "await asyncio.to_thread(input)")
    await eventually(lambda: session.info.inputs.pending == 1)
    os.kill(session.info.pid or 0, signal.SIGSTOP)  # so that it answers none of these
    os.waitid(os.P_PID, session.info.pid or 0, os.WSTOPPED)  # noqa: ASYNC222 - all its threads
    waits: dict[str, asyncio.Future[Any]] = {
        "receive": asyncio.ensure_future(session.receive_message()),
        "summary": asyncio.ensure_future(session.namespace_summary(timeout_s=None)),
        "checkpoint": asyncio.ensure_future(session.checkpoint(timeout_s=None)),
        "restore": asyncio.ensure_future(session.restore(b"", timeout_s=None)),
    }
    cancelling = asyncio.ensure_future(session.cancel(executions[0].execution_id, grace_s=3600))
    await asyncio.sleep(0)
    os.kill(session.info.pid or 0, signal.SIGKILL)
    for execution in (*executions, asking):
        assert (await execution.ended()).kind == ErrorKind.LOST
    for wait in waits.values():
        with pytest.raises(SessionLost, match="was killed by SIGKILL"):
            await asyncio.wait_for(wait, HANG_S)
    assert await asyncio.wait_for(cancelling, HANG_S) == "not_running"
    assert session.info.inputs.pending == 0


async def test_large_input_on_its_way_to_a_dead_child_does_not_hang(session: Session) -> None:
    os.kill(session.info.pid or 0, signal.SIGSTOP)
    sending = asyncio.ensure_future(collect(session, f"x = '{'x' * 20_000_000}'"))
    await eventually(lambda: session.info.running)
    await asyncio.sleep(0)
    os.kill(session.info.pid or 0, signal.SIGKILL)
    messages = await asyncio.wait_for(sending, HANG_S)
    assert [type(m) for m in messages] == [Error]
    assert messages[0].kind == ErrorKind.LOST


async def test_each_execution_of_a_lost_child_ends_exactly_once(session: Session) -> None:
    seen: list[Message] = []
    session.add_message_interceptor(seen.append)
    await session.run("import asyncio, os")
    executions = [Watched(session, "await asyncio.sleep(3600)") for _ in range(20)]
    await eventually(lambda: len(session.info.running) == 20)
    final = Watched(session, "os._exit(9)\nawait asyncio.sleep(0)")
    for execution in (*executions, final):
        assert (await execution.ended()).kind == ErrorKind.LOST
    ends = [m.execution_id for m in seen if isinstance(m, Error)]
    assert sorted(ends) == sorted(e.execution_id for e in (*executions, final))


async def test_a_child_killed_while_idle_is_noticed(session: Session) -> None:
    os.kill(session.info.pid or 0, signal.SIGKILL)
    await eventually(lambda: session.state is SessionState.ERROR)
    with pytest.raises(SessionStateError, match="restart"):
        await collect(session, "1")
    with pytest.raises(SessionStateError, match="no child"):
        await session.receive_message()
    await session.restart()
    assert (await session.run("1")).value == 1


async def test_a_stopped_child_is_reported_and_goes_on_when_continued() -> None:
    """Silence is not death: nothing ends by itself, and the work survives."""
    child = ChildSettings(diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02))
    timeouts = TimeoutSettings(unresponsive_s=0.1)
    async with Session(SessionConfig(child=child, timeouts=timeouts)) as session:
        await session.run("x = 1")
        os.kill(session.info.pid or 0, signal.SIGSTOP)
        await eventually(lambda: session.info.health.unresponsive)
        assert session.info.health.process_state in ("T", "t")
        assert session.is_alive
        os.kill(session.info.pid or 0, signal.SIGCONT)
        await eventually(lambda: not session.info.health.unresponsive)
        assert (await session.run("x")).value == 1
