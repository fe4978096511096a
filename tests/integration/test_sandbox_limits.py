"""Hostile code in a sandbox session: what it may use is bounded, and the limit is named."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.errors import ExecutionFailed
from capsule_tasks.protocol.messages import Error
from capsule_tasks.sessions import Session
from capsule_tasks.sessions.process.confinement import Confinement
from capsule_tasks.settings import (
    LimitSettings,
)
from tests.sandboxes import MIB, Sandbox, StartSandbox, config
from tests.sessions import HANG_S, Watched, eventually


async def test_every_limit_has_a_default_in_a_sandbox(start_sandbox: StartSandbox) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        limits = (
            "(resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))"
            " for name in ('AS', 'NOFILE', 'FSIZE', 'SIGPENDING'))"
        )
        done = await session.run(f"import resource\n[limit[1] for limit in {limits}]")
        assert done.value == [2048 * MIB, 256, 256 * MIB, 1024]
        error = await _limit_error(
            session, "import os\nwhile True: print('x' * 65536), os.write(1, bytes(65536))"
        )
        assert error.message.startswith(f"output limit of {64 * MIB} bytes: ")
        if isinstance(session, Session):
            assert session.info.metadata["config"].limits.cpu_time_s == 300


async def test_a_fork_bomb_ends_its_execution_with_the_limit_named(
    start_sandbox: StartSandbox,
) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox(max_processes=8) as session:
        source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        error = await _limit_error(session, source)
        assert error.message.startswith("limit of 8 processes: ")
        assert (await session.run("1 + 1")).value == 2


async def test_filling_the_disk_ends_its_execution_with_the_limit_named(
    start_sandbox: StartSandbox,
) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox(max_disk_bytes=8 * MIB) as session:
        source = f"for n in range(3): open(str(n), 'wb').write(bytes({7 * MIB}))"
        source += "\nimport time; time.sleep(3600)"
        error = await _limit_error(session, source)
        assert error.message.startswith(f"disk limit of {8 * MIB} bytes: ")


@pytest.mark.parametrize(
    "write", ["while True: f.write(bytes(100_000))", "os.posix_fallocate(f.fileno(), 0, 1 << 34)"]
)
async def test_one_file_cannot_outgrow_the_disk_limit(
    start_sandbox: StartSandbox, write: str
) -> None:
    """Not even between two looks at the directory."""
    async with asyncio.timeout(HANG_S), start_sandbox(max_disk_bytes=8 * MIB) as session:
        error = await _limit_error(session, f"import os\nf = open('big', 'wb', 0)\n{write}")
        assert f"file size limit of {8 * MIB} bytes" in error.notes
        if isinstance(session, Session):
            size = (await session.run("os.stat('big').st_blocks * 512")).value
            assert size <= 8 * MIB
            assert session.info.restarts == 0


@pytest.mark.parametrize(
    "source",
    [
        (
            "import os, time\nfiles = [open(name, 'wb') for name in 'xyz']\n"
            "for file in files: os.unlink(file.name), file.write(bytes(7 << 20))\n"
            "time.sleep(3600)"
        ),
        "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1",
        "import os\nwhile True:\n    os.mkdir('d' * 99)\n    os.chdir('d' * 99)",
        (
            "import os, time\nos.mkdir('d', 0o300)\n"
            "for name in 'xyz': open(f'd/{name}', 'wb').write(bytes(7 << 20))\n"
            "time.sleep(3600)"
        ),
    ],
    ids=["unlinked", "only-names", "nested", "unreadable"],
)
async def test_hidden_files_are_counted_as_disk_use(
    start_sandbox: StartSandbox, source: str
) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox(max_disk_bytes=8 * MIB) as session:
        directory = Path((await session.run("import os; os.getcwd()")).value)
        error = await _limit_error(session, source)
        assert error.message.startswith(f"disk limit of {8 * MIB} bytes: ")
    await eventually(lambda: not directory.exists())


async def test_many_files_do_not_hold_up_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    measurers: list[int] = []
    measure = Confinement._measure

    def noted(watch: Confinement, *rest: Any) -> None:
        measurers.append(threading.get_ident())
        measure(watch, *rest)

    monkeypatch.setattr(Confinement, "_measure", noted)
    async with asyncio.timeout(HANG_S), Session(config()) as session:
        source = "import os, time\nfor n in range(1000): os.mknod(str(n))\ntime.sleep(3600)"
        watched = Watched(session, source)
        await eventually(lambda: len(measurers) >= 3)
        assert await session.cancel(watched.execution_id) == "interrupted"
        await watched.ended()
    assert threading.get_ident() not in measurers


async def test_threads_left_behind_are_still_limited() -> None:
    async with asyncio.timeout(HANG_S), Session(config(max_disk_bytes=8 * MIB)) as session:
        source = (
            "import threading, time\n"
            "def fill():\n"
            "    time.sleep(0.1)\n"
            "    for name in 'xyz': open(name, 'wb').write(bytes(7 << 20))\n"
            "threading.Thread(target=fill, daemon=True).start()"
        )
        first = session.info.pid
        await session.run(source)
        await eventually(lambda: session.info.restarts == 1 and session.state == "ready")
        assert session.info.pid != first
        assert (await session.run("__import__('os').listdir()")).value == []


async def test_short_executions_in_a_row_are_watched_too() -> None:
    async with asyncio.timeout(HANG_S), Session(config(max_disk_bytes=8 * MIB)) as session:
        with pytest.raises(ExecutionFailed) as failure:  # noqa: PT012 - any of them may be the last
            for number in itertools.count():
                await session.run(f"open('{number}', 'wb').write(bytes(10_000)); None")
        assert failure.value.error.message.startswith(f"disk limit of {8 * MIB} bytes: ")


async def test_a_thread_bomb_ends_its_execution_with_the_limit_named(
    start_sandbox: StartSandbox,
) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox(max_threads=64) as session:
        source = (
            "import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
            "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
        )
        error = await _limit_error(session, source)
        assert error.message.startswith("limit of 64 threads: ")


async def test_the_memory_of_several_processes_is_counted_together(
    start_sandbox: StartSandbox,
) -> None:
    limits = LimitSettings(memory_bytes=400 * MIB)
    async with asyncio.timeout(HANG_S), start_sandbox(limits) as session:
        source = (
            "import os, time\n"
            "for _ in range(6):\n"
            "    if os.fork() == 0:\n"
            "        kept = b'x' * 100_000_000\n"
            "        time.sleep(60)\n"
            "time.sleep(60)"
        )
        error = await _limit_error(session, source)
        assert error.message.startswith(f"memory limit of {400 * MIB} bytes: ")
        assert "were used by" in error.message


async def test_a_memory_bomb_ends_its_execution_with_the_limit_named(
    start_sandbox: StartSandbox,
) -> None:
    limits = LimitSettings(memory_bytes=512 * MIB)
    async with asyncio.timeout(HANG_S), start_sandbox(limits) as session:
        error = await _limit_error(session, "x = []\nwhile True: x.append(bytearray(10_000_000))")
        assert f"memory limit of {512 * MIB} bytes" in error.message
        assert (await session.run("x = None; 1 + 1")).value == 2


async def test_descriptors_in_flight_are_as_many_as_open_files_and_one_message(
    start_sandbox: StartSandbox,
) -> None:
    """A file in transit through a socket stays open, and is no descriptor of any process."""
    source = (
        "import errno, os, socket\n"
        "def send(carrier):\n"
        "    files = [os.open('/dev/null', os.O_RDONLY) for _ in range(20)]\n"
        "    try: socket.send_fds(carrier, [b'x'], files)\n"
        "    except OSError as error: return errno.errorcode[error.errno]\n"
        "    finally: [os.close(file) for file in files]\n"
        "carrier, _kept = socket.socketpair()\n"
        "def fill():\n"
        "    sent = 0\n"
        "    while (answer := send(carrier)) is None: sent += 20\n"
        "    return sent, answer\n"
        "reading, writing = os.pipe()\n"
        "first = fill()\n"
        "if os.fork() == 0:\n"
        "    os.write(writing, repr(fill()).encode())\n"
        "    os._exit(0)\n"
        "first, eval(os.read(reading, 99))"
    )
    async with (
        asyncio.timeout(HANG_S),
        start_sandbox(LimitSettings(open_files=64)) as session,
    ):
        (sent, refusal), others = (await session.run(source)).value
    assert refusal == "ETOOMANYREFS"
    assert sent <= 64 + 20
    assert others == (0, "ETOOMANYREFS")


async def test_cpu_time_and_output_limits_name_the_limit_and_the_amount(
    start_sandbox: StartSandbox,
) -> None:
    limits = LimitSettings(cpu_time_s=0.2, output_bytes=1000)
    async with asyncio.timeout(HANG_S), start_sandbox(limits) as session:
        error = await _limit_error(session, "while True: x = 1")
        assert error.message.startswith("CPU time limit of 0.2 s: 0.2")
        error = await _limit_error(session, "while True: print('x' * 99)")
        assert error.message.startswith("output limit of 1000 bytes: ")


async def _limit_error(session: Sandbox, source: str) -> Error:
    with pytest.raises(ExecutionFailed) as failure:
        await session.run(source)
    error = failure.value.error
    assert isinstance(error, Error)
    assert error.kind == "limit", error
    return error
