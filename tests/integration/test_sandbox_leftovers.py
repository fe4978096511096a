"""Hostile code in a sandbox session: what it leaves behind blocks no other session."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from capsule_tasks.errors import ExecutionFailed, ExecutionTimeout
from capsule_tasks.system.prctl import become_subreaper
from tests.sandboxes import StartSandbox, code_pool
from tests.sessions import HANG_S, eventually, until_exited


async def test_daemons_die_with_their_session(start_sandbox: StartSandbox) -> None:
    source = (
        "import os, time\n"
        "reading, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.write(writing, str(os.getpid()).encode())\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "int(os.read(reading, 20))"
    )
    become_subreaper()
    async with asyncio.timeout(HANG_S), start_sandbox() as session:
        daemon = (await session.run(source)).value
    await until_exited(daemon)
    await eventually(lambda: not Path(f"/proc/{daemon}").exists())  # no zombie either


async def test_threads_children_and_exit_hooks_left_behind_delay_no_stop() -> None:
    source = (
        "import atexit, os, threading, time\n"
        "atexit.register(time.sleep, 60)\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "os.fork() or time.sleep(60)"
    )
    async with asyncio.timeout(HANG_S), code_pool(min_idle=1, max_sessions=2) as pool:
        async with pool.borrow("code") as session:
            await session.run(source)
        async with pool.borrow("code") as session:
            assert (await session.run("import threading; threading.active_count()")).value < 5


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.closerange(0, 65_536)",
        (
            "import os\nfor fd in range(200):\n"
            "    try: os.write(fd, bytes(range(256)) * 40)\n    except OSError: pass"
        ),
    ],
    ids=["closes", "garbles"],
)
async def test_ruining_every_descriptor_ruins_only_its_own_session(
    start_sandbox: StartSandbox, source: str
) -> None:
    async with asyncio.timeout(HANG_S), start_sandbox() as other:
        async with start_sandbox() as session:
            with contextlib.suppress(ExecutionFailed, ExecutionTimeout):
                await session.run(source, timeout_s=5)
        assert (await other.run("1 + 1")).value == 2


async def test_monkeypatched_builtins_reach_no_other_borrower() -> None:
    async with asyncio.timeout(HANG_S), code_pool(min_idle=1, max_sessions=1) as pool:
        async with pool.borrow("code") as session:
            await session.run("import builtins; builtins.divmod = lambda *_: 'mine'")
        async with pool.borrow("code") as session:
            assert (await session.run("divmod(7, 2)")).value == (3, 1)
