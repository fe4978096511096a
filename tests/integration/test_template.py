"""Forked children: quick, adopted, independent of what they were copied from."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsule_tasks.errors import TemplateGone
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.sessions.template import Template
from capsule_tasks.settings import PoolSettings, Profile, SessionConfig
from tests.sessions import HANG_S, eventually


async def loaded(*imports: str, **options: object) -> Template:
    template = Template.fresh(imports, python=sys.executable, **options)  # type: ignore[arg-type]
    await template.load(HANG_S)
    return template


async def test_a_forked_child_has_the_imports_and_belongs_to_this_process() -> None:
    template = await loaded("json", "numpy")
    async with asyncio.timeout(HANG_S), Session(spawner=template) as session:
        value = (await session.run("import sys, os; ('numpy' in sys.modules, os.getppid())")).value
        assert value == (True, os.getpid())
        assert (await session.run("import numpy; int(numpy.arange(5).sum())")).value == 10
    template.stop()


async def test_copies_do_not_draw_the_same_random_numbers() -> None:
    template = await loaded("random", "numpy.random")
    drawn = []
    for _ in range(2):
        async with asyncio.timeout(HANG_S), Session(spawner=template) as session:
            source = "import random, numpy.random as r; random.random(), float(r.rand())"
            drawn.append((await session.run(source)).value)
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    template.stop()


async def test_a_forked_child_keeps_every_promise_of_a_session() -> None:
    template = await loaded()
    async with asyncio.timeout(HANG_S), Session(spawner=template) as session:
        running = asyncio.create_task(session.run("while True: pass", execution_id="loop"))
        await eventually(lambda: session.info.running)
        assert await session.cancel("loop") == "interrupted"
        await asyncio.wait({running})
        assert running.exception() is not None
        assert (await session.run("import os; _ = os.system('echo raw')")).stdout == "raw\n"
        assert session.info.pid is not None
        os.kill(session.info.pid, signal.SIGKILL)
        await eventually(lambda: session.state == "error")
        assert "SIGKILL" in session.info.last_error
    template.stop()


async def test_the_marker_of_a_forked_child_shows_in_proc() -> None:
    template = await loaded()
    async with asyncio.timeout(HANG_S), Session(spawner=template) as session:
        source = "import os; os.environ['CAPSULE_SESSION'], open('/proc/self/environ').read()"
        marker, shown = (await session.run(source)).value
        assert f"CAPSULE_SESSION={marker}\0" in shown
    template.stop()


async def test_the_crash_of_a_template_is_survived_by_its_children() -> None:
    template = await loaded()
    async with asyncio.timeout(HANG_S), Session(spawner=template) as session:
        await session.run("x = 5")
        os.kill(template.pid, signal.SIGKILL)
        assert await template.ended() == "its process ended"
        assert (await session.run("x")).value == 5
        with pytest.raises(TemplateGone, match="not running"):
            await template.spawn(None, SessionConfig(), "m")  # type: ignore[arg-type]


async def test_a_pool_starts_cold_while_its_template_is_replaced() -> None:
    profile = Profile(pool=PoolSettings(min_idle=1, max_sessions=2, fresh=True))
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:
        first = pool.info().template_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: pool.info().templates_lost_total == 1)
        while pool.info().cold_starts_total == 0:
            async with pool.borrow() as session:
                assert (await session.run("1")).value == 1
        await eventually(lambda: pool.info().template_pid not in (None, first))


async def test_imports_that_leave_a_thread_are_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='lingerer', daemon=True).start()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(TemplateGone, match="Python threads running: lingerer"):
        await loaded("threaded", env=env)


async def test_an_import_that_fails_is_reported() -> None:
    with pytest.raises(TemplateGone, match=r"ModuleNotFoundError.*no_such_module"):
        await loaded("no_such_module")


async def test_a_spawn_that_is_cancelled_leaves_no_child() -> None:
    before = set(_children())
    template = await loaded()
    async with asyncio.timeout(HANG_S):
        for steps in range(12):
            session = Session(spawner=template)
            starting = asyncio.create_task(session.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait({starting})
            await session.terminate()
        await eventually(lambda: set(_children()) - before == {template.pid})
    template.stop()
    assert not set(_children()) - before


def test_a_fork_of_the_caller_has_what_the_caller_had() -> None:
    script = """
import asyncio
from capsule_tasks.sessions.template import Template
import capsule_tasks.sessions.session
import json
json.only_here = 'set in code'
template = Template.fork_of_caller()
async def main():
    from capsule_tasks.sessions import Session
    await template.load(20)
    async with Session(spawner=template) as session:
        print((await session.run("import json; json.only_here")).value)
    template.stop()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.stdout, done.stderr) == ("set in code\n", "")


def _children() -> list[int]:
    mine = []
    for thread in Path("/proc/self/task").iterdir():
        mine += map(int, (thread / "children").read_text().split())
    return mine
