"""A limit that is reached ends one execution with an error that names it and its amount."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from capsule_tasks.protocol.messages import Error, ErrorKind
from capsule_tasks.sessions import Session, SessionState
from capsule_tasks.settings import (
    KIB,
    MIB,
    LimitSettings,
    OutputSettings,
    RoutingSettings,
    SandboxSettings,
    SessionConfig,
)
from tests.sessions import Watched, child_config, collect, end_of, eventually, submitted, text


async def assert_unharmed(session: Session) -> None:
    assert session.state is SessionState.READY
    assert (await session.run("'unharmed'")).value == "unharmed"
    assert session.info.restarts == 0


def limited(**limits: float) -> Session:
    return Session(child_config(limits=LimitSettings(**limits)))  # type: ignore[arg-type]


def named_in(error: Error) -> str:
    assert isinstance(error, Error)
    assert error.kind == ErrorKind.LIMIT
    return "\n".join((error.message, *error.notes))


async def test_memory() -> None:
    async with limited(memory_bytes=512 * MIB) as session:
        error = await end_of(session, "kept = 1\nbig = bytearray(1 << 30)")
        assert error.type == "MemoryError"
        assert f"memory limit of {512 * MIB} bytes" in named_in(error)
        assert (await session.run("kept")).value == 1
        await assert_unharmed(session)


async def test_memory_that_grows_bit_by_bit() -> None:
    async with limited(memory_bytes=512 * MIB) as session:
        error = await end_of(session, "l = []\nwhile True: l.append(bytes(1_000_000))")
        assert error.type == "MemoryError"
        await session.run("del l")
        await assert_unharmed(session)


async def test_open_files() -> None:
    async with limited(open_files=64) as session:
        error = await end_of(session, "files = [open('/dev/null') for _ in range(100)]")
        assert error.type == "OSError"
        assert "limit of 64 open files" in named_in(error)
        await assert_unharmed(session)


async def test_file_size(tmp_path: Path) -> None:
    async with limited(file_bytes=10_000) as session:
        source = f"with open({str(tmp_path / 'file')!r}, 'wb', 0) as f:\n"
        error = await end_of(session, source + "    while True: f.write(b'x' * 1000)")
        assert error.type == "OSError"
        assert "file size limit of 10000 bytes" in named_in(error)
        assert (tmp_path / "file").stat().st_size == 10_000
        await assert_unharmed(session)


@pytest.mark.parametrize(
    "code",
    ["while True: sum(range(1000))", "import asyncio\nwhile True: await asyncio.sleep(0)"],
    ids=["a loop", "a coroutine"],
)
async def test_cpu_time(code: str) -> None:
    async with limited(cpu_time_s=0.2) as session:
        error = await end_of(session, f"kept = 1\n{code}")
        assert "CPU time limit of 0.2 s" in named_in(error)
        assert error.type == "ExecutionCancelled"
        assert (await session.run("kept")).value == 1
        await assert_unharmed(session)


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try: sum(range(1000))\n    except BaseException: pass",
        "sum(iter(int, 1))",
        "import asyncio\nawait asyncio.sleep(0)\nsum(iter(int, 1))",
    ],
    ids=["swallows it", "holds the GIL", "a coroutine that holds the GIL"],
)
async def test_cpu_time_of_code_that_cannot_be_stopped(code: str) -> None:
    """The child is killed and replaced; the error states that, and where the code was."""
    async with limited(cpu_time_s=0.2) as session:
        pid = session.info.pid
        error = await end_of(session, code)
        assert "CPU time limit of 0.2 s" in named_in(error)
        assert error.message.endswith("(killed)")
        assert "<cell 1>" in error.stack
        assert (await session.run("'replaced'")).value == "replaced"
        assert session.info.pid != pid


async def test_cpu_time_of_a_submitted_execution_is_limited() -> None:
    """Stopped by the child, or by a kill, as what `execute` runs."""
    async with limited(cpu_time_s=0.2) as session:
        for code, is_killed in (("while True: pass", False), ("sum(iter(int, 1))", True)):
            error = (await submitted(session, code))[-1]
            assert isinstance(error, Error)
            assert "CPU time limit of 0.2 s" in named_in(error)
            assert error.message.endswith("(killed)") is is_killed


async def test_code_left_running_between_executions_has_no_cpu_limit() -> None:
    """A thread that burns for longer than any execution may, while nothing is executed."""
    async with limited(cpu_time_s=0.2) as session:
        await session.run(
            "import threading, time\n"
            "def burn():\n"
            "    while time.process_time() < 2.5: sum(range(1000))\n"
            "thread = threading.Thread(target=burn)\n"
            "thread.start()"
        )
        await eventually(lambda: cpu_seconds(session) > 2.4)
        assert (await session.run("'alive'")).value == "alive"


def cpu_seconds(session: Session) -> float:
    fields = Path(f"/proc/{session.info.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_cpu_time_is_that_of_one_execution_and_not_of_its_wait() -> None:
    """Each uses half of the limit; together, with the time they wait, they use far more."""
    async with limited(cpu_time_s=0.4) as session:
        await session.run("import time")
        source = (
            "end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
            "time.sleep(0.3)\n'done'"
        )
        executions = [Watched(session, source, on_busy="wait") for _ in range(4)]
        for execution in executions:
            assert (await execution.ended()).value == "done"


async def test_cpu_time_is_counted_from_the_start_of_the_code() -> None:
    async with limited(cpu_time_s=0.5) as session:
        messages = await collect(
            session,
            "import time\n"
            "begun = time.process_time()\n"
            "try:\n"
            "    while True: sum(range(100))\n"
            "finally: print(time.process_time() - begun)",
        )
        assert "CPU time limit of 0.5 s" in named_in(messages[-1])  # type: ignore[arg-type]
        assert 0.4 < float(text(messages)) < 0.9


async def test_output() -> None:
    async with limited(output_bytes=1000) as session:
        messages = await collect(session, "kept = 1\nprint('x' * 5000)")
        error = messages[-1]
        assert isinstance(error, Error)
        assert "output limit of 1000 bytes: 5000 were written" in named_in(error)
        assert text(messages) == "x" * 1000
        assert error.stdout_bytes == 1000
        assert (await session.run("kept")).value == 1
        await assert_unharmed(session)


@pytest.mark.parametrize("flush", [True, False])
async def test_output_that_comes_in_drops(flush: bool) -> None:
    async with limited(output_bytes=1000) as session:
        messages = await collect(
            session,
            "import sys, time\n"
            "for i in range(10_000):\n"
            f"    print('é' * 49, file=(sys.stdout, sys.stderr)[i % 2], flush={flush})\n"
            "    if i % 5 == 0: time.sleep(0.001)",
        )
        assert "output limit of 1000 bytes" in named_in(messages[-1])  # type: ignore[arg-type]
        written = text(messages) + text(messages, "stderr")
        assert len(written.encode()) == 1000


async def test_output_up_to_the_limit_is_allowed_and_the_next_execution_counts_from_zero() -> None:
    async with limited(output_bytes=64 * KIB) as session:
        for _ in range(3):
            assert len((await session.run(f"print('x' * {64 * KIB - 1})")).stdout) == 64 * KIB


async def test_output_of_a_thread_ends_the_execution_too() -> None:
    async with limited(output_bytes=1000) as session:
        error = await end_of(
            session,
            "import threading\n"
            "t = threading.Thread(target=print, args=('x' * 5000,))\n"
            "t.start(); t.join()\n"
            "'as if nothing were wrong'",
        )
        assert "output limit of 1000 bytes" in named_in(error)
        await assert_unharmed(session)


async def test_output_of_coroutines_is_counted_apart() -> None:
    async with limited(output_bytes=1000) as session:
        await session.run("import asyncio\ngo = asyncio.Event()")
        modest = Watched(session, "print('there')\nawait go.wait()\nprint('x' * 900)\n'fine'")
        await modest.until_output("there")
        error = await end_of(session, "await asyncio.sleep(0)\nprint('x' * 5000)")
        assert "output limit of 1000 bytes" in named_in(error)
        await session.run("await asyncio.sleep(0)\ngo.set()")
        assert (await modest.ended()).value == "fine"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.write(1, b'x' * 99)",
        "import os\nwhile True: print('x'); os.write(2, b'x' * 99)",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: print(0)'])",
    ],
    ids=["a descriptor", "both ways", "a program"],
)
async def test_output_past_sys_stdout_counts_too(code: str) -> None:
    async with limited(output_bytes=100 * KIB) as session:
        error = await end_of(session, f"kept = 1\n{code}")
        assert f"output limit of {100 * KIB} bytes: " in named_in(error)
        assert error.type == "LimitReached"
        assert (await session.run("kept")).value == 1
        await assert_unharmed(session)


async def test_run_keeps_the_newest_output_and_counts_what_it_dropped() -> None:
    routing = RoutingSettings(run_bytes=100 * KIB)
    async with Session(SessionConfig(routing=routing)) as session:
        done = await session.run(
            "import sys\n"
            "for n in range(100_000): print(f'{n:9}', file=(sys.stdout, sys.stderr)[n % 2])"
        )
        lost = {gap.stream: gap.lost_bytes for gap in done.gaps}
        assert 0 < len(done.stdout + done.stderr) <= 100 * KIB
        assert len(done.stdout) + lost["stdout"] == len(done.stderr) + lost["stderr"] == 500_000
        assert all(gap.lost_messages > 0 for gap in done.gaps)
        assert done.stderr.endswith(f"{99_999:9}\n")
        assert (await session.run("print('little')")).gaps == ()


async def test_run_counts_what_the_child_dropped() -> None:
    output = OutputSettings(backpressure="drop_oldest", window_bytes=10_000, chunk_bytes=1000)
    async with Session(child_config(output=output)) as session:
        done = await session.run("print('x' * 999_999)")
        assert len(done.stdout) + sum(gap.lost_bytes for gap in done.gaps) == 1_000_000


async def test_code_that_swallows_the_output_limit_gets_no_more_through() -> None:
    async with limited(output_bytes=1000) as session:
        messages = await collect(
            session,
            "for _ in range(100):\n    try: print('x' * 99)\n    except BaseException: pass\n",
        )
        assert "output limit of 1000 bytes" in named_in(messages[-1])  # type: ignore[arg-type]
        assert len(text(messages)) <= 1100


async def test_limits_hold_in_a_replaced_child_too() -> None:
    async with limited(open_files=64) as session:
        await asyncio.wait_for(session.restart(), 30)
        error = await end_of(session, "files = [open('/dev/null') for _ in range(100)]")
        assert "limit of 64 open files" in named_in(error)


def confined(**sandbox: int) -> Session:
    return Session(child_config(sandbox=SandboxSettings(**sandbox)))  # type: ignore[arg-type]


async def test_files_without_content_count_too() -> None:
    """Or any number of them could stand before the one that fills the disk."""
    async with confined(max_disk_bytes=1 * MIB) as session:
        error = await end_of(
            session,
            "import time\nfor n in range(5_000): open(f'empty-{n}', 'w').close()\ntime.sleep(3600)",
        )
        assert f"disk limit of {1 * MIB} bytes" in named_in(error)


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("for n in range(9): open(f'{n}', 'wb').write(bytes(50_000))", {"max_disk_bytes": 100_000}),
        ("for _ in range(5): subprocess.Popen(['/bin/sleep', '3600'])", {"max_processes": 3}),
    ],
    ids=["disk", "processes"],
)
async def test_a_kill_at_a_limit_shows_where_the_code_was(
    code: str, limits: dict[str, int]
) -> None:
    """Also why it was killed: what it had started is gone by then."""
    async with confined(**limits, readable=("/bin", "/usr/bin")) as session:  # type: ignore[arg-type]
        source = (
            f"import subprocess, time\ndef at_work():\n    {code}\n    time.sleep(3600)\nat_work()"
        )
        error = await end_of(session, source)
        assert "limit of" in named_in(error)
        assert "in at_work" in error.stack
        assert (await session.run("'replaced'")).value == "replaced"
