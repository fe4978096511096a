"""Forked children: quick, adopted, independent of what they were copied from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from capsule_tasks.errors import TemplateLost
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.sessions.process.template import Template, TemplateSpawner
from capsule_tasks.settings import PoolSettings, Profile, SessionConfig
from tests.sessions import HANG_S, eventually, until_exited


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
        with pytest.raises(TemplateLost, match="not running"):
            await template.spawn(None, SessionConfig(), "m")  # type: ignore[arg-type]


async def test_a_copy_killed_while_it_waits_costs_no_session_its_child() -> None:
    template = await loaded()
    async with asyncio.timeout(HANG_S):
        await eventually(lambda: _copies_of(template))
        (copy,) = _copies_of(template)
        os.kill(copy, signal.SIGKILL)
        await until_exited(copy)
        async with Session(spawner=template) as session:
            assert (await session.run("1")).value == 1
    template.stop()


@pytest.mark.parametrize("end", ["stop", "crash"])
async def test_no_copy_outlives_its_template(end: str) -> None:
    before = set(_children())
    template = await loaded()
    async with asyncio.timeout(HANG_S):
        await eventually(lambda: _copies_of(template))
        if end == "crash":
            os.kill(template.pid, signal.SIGKILL)
            await template.ended()
        template.stop()
    assert set(_children()) == before


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
    with pytest.raises(TemplateLost, match="Python threads running: lingerer"):
        await loaded("threaded", env=env)


async def test_an_import_that_fails_is_reported() -> None:
    with pytest.raises(TemplateLost, match=r"ModuleNotFoundError.*no_such_module"):
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
        known = {template.pid, *before}
        await eventually(lambda: set(_children()) - known == set(_copies_of(template)))
    template.stop()
    assert not set(_children()) - before


async def test_a_template_that_dies_in_the_middle_of_a_fork_leaves_no_process() -> None:
    """Also no second child at the descriptors of a session that starts cold instead."""
    before = set(_children())
    async with asyncio.timeout(HANG_S):
        for _ in range(10):
            profile = Profile(session=SessionConfig(), imports=())
            spawner = TemplateSpawner(profile)
            await spawner.start()
            template = spawner.template_pid
            assert template is not None
            sessions = [Session(spawner=spawner) for _ in range(4)]
            starting = [asyncio.create_task(session.start()) for session in sessions]
            while not _children(template) and not all(start.done() for start in starting):
                await asyncio.sleep(0)
            os.kill(template, signal.SIGKILL)
            await asyncio.gather(*starting)
            for number, session in enumerate(sessions):
                assert (await session.run(f"{number}")).value == number
            await asyncio.gather(*(session.shutdown() for session in sessions))
            await spawner.stop()
            assert set(_children()) <= before


CALLER = """
import asyncio, json, os, socket, sys
from capsule_tasks.sessions import Session
from capsule_tasks.sessions.process.template import Template
{before}
template = Template.fork_of_caller()
async def main():
    await template.load(20)
    async with Session(spawner=template) as session:
{body}
    template.stop()
asyncio.run(main())
"""


def of_caller(before: str, body: str) -> str:
    """The output of a process that copies itself after `before` and then runs `body`."""
    body = textwrap.indent(textwrap.dedent(body), " " * 8)
    script = CALLER.format(before=textwrap.dedent(before), body=body)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_fork_of_the_caller_has_what_the_caller_had() -> None:
    body = "print((await session.run('import json; json.only_here')).value)"
    assert of_caller("json.only_here = 'set in code'", body) == "set in code\n"


def test_a_fork_of_the_caller_keeps_its_files_and_pipes_alone() -> None:
    """As under `multiprocessing`. Sockets and the like are not for two processes to use."""
    before = """
    import select, tempfile
    from capsule_tasks.sessions.process.child_process import ChildDescriptors
    json.file = tempfile.NamedTemporaryFile("a+")
    reading, json.pipe = os.pipe()
    json.device = open("/dev/zero", "rb")
    ours = ChildDescriptors()
    others = [socket.socket(), select.epoll()]
    dropped = [one.fileno() for one in others] + [os.eventfd(0), os.pidfd_open(os.getpid())]
    dropped += [ours.control.fileno(), *ours.child_numbers, ours.stdout]
    dropped += [ours.child_stderr, ours.stacks]
    """
    body = """
    source = "import json, os; json.file.write('written'); json.file.flush(); "
    await session.run(source + "os.write(json.pipe, b'piped'); zero = json.device.read(1)")
    print(open(json.file.name).read(), os.read(reading, 9), (await session.run("zero")).value)
    links = f"{{os.readlink('/proc/self/fd/%d' % n) for n in {dropped}}}"
    print(*(await session.run(links)).value)
    """
    assert of_caller(before, body) == "written b'piped' b'\\x00'\n/dev/null\n"


def test_a_fork_of_the_caller_does_not_hold_the_lock_of_a_sandboxs_directory() -> None:
    """Otherwise the directory of a killed owner could not be swept while the fork lives."""
    before = """
    from capsule_tasks.system.sandbox.directories import SandboxDirectory
    json.place = SandboxDirectory()
    """
    body = """
    source = "import json, os; own = '/proc/self/fd/'; top = os.path.dirname(json.place.home); "
    source += "top in [os.path.realpath(own + number) for number in os.listdir(own)]"
    print((await session.run(source)).value)
    json.place.remove()
    """
    assert of_caller(before, body) == "False\n"


def test_objects_of_the_caller_close_no_descriptors_of_a_forked_session() -> None:
    before = "json.sockets = [socket.socket() for _ in range(20)]"
    body = """
    await session.run("import json; kept = open('/dev/zero'); del json.sockets")
    print((await session.run("kept.read(1) == chr(0)")).value, session.is_alive)
    """
    assert of_caller(before, body) == "True True\n"


DAEMON = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
os.wait()
int(os.read(reading, 20))
"""


def test_a_daemon_of_a_forked_child_that_died_by_itself_is_known_by_its_marker() -> None:
    body = f"""
    daemon = os.pidfd_open((await session.run({DAEMON!r})).value)
    async for _ in session.execute("os._exit(3)"): pass
    exited = asyncio.Event()
    asyncio.get_running_loop().add_reader(daemon, exited.set)
    await asyncio.wait_for(exited.wait(), 20)
    asyncio.get_running_loop().remove_reader(daemon)
    print("gone")
    """
    assert of_caller("import logging; logging.disable()", body) == "gone\n"


async def test_imports_that_leave_a_native_thread_are_refused(tmp_path: Path) -> None:
    (tmp_path / "native.py").write_text(
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "assert not libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(TemplateLost, match="left 1 native threads that survive a fork"):
        await loaded("native", env=env)


async def test_numpy_whose_threads_end_before_a_fork_computes_in_many_children() -> None:
    """OpenBLAS has threads in the template whatever this machine has; a child makes its own."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "4"}
    template = await loaded("numpy", env=env)
    source = "import numpy\na = numpy.ones((300, 300))\nfloat((a @ a).sum())"
    async with asyncio.timeout(HANG_S):
        sessions = [Session(spawner=template) for _ in range(3)]
        await asyncio.gather(*(session.start() for session in sessions))
        for completed in await asyncio.gather(*(session.run(source) for session in sessions)):
            assert completed.value == 300.0**3
        await asyncio.gather(*(session.shutdown() for session in sessions))
    template.stop()


def _children(pid: int | str = "self") -> list[int]:
    mine: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            mine += map(int, (thread / "children").read_text().split())
    return mine


def _copies_of(template: Template) -> list[int]:
    """Spare copies: already adopted by the owner, but still in the template's POSIX session."""
    return [pid for pid in _children() if pid != template.pid and _session(pid) == template.pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
