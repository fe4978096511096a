"""Everything that a session's child brings into the world dies with it, and it with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.sessions import Session, SessionConfig
from capsule_tasks.system import family
from capsule_tasks.system.prctl import become_subreaper
from tests.chaos.census import Census
from tests.sessions import HANG_S, Watched, end_of, eventually, until_exited

DAEMONISE = """\
import os, sys, time
def daemonise():
    '''A process that left its group, its session and its parent; its pid arrives by a pipe.'''
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            os.close(writing)
            time.sleep(3600)
        os._exit(0)
    os.close(writing)
    os.wait()
    return int(os.read(reading, 20))
"""
DESCENDANTS = {
    "a subprocess": "import subprocess\npid = subprocess.Popen(['sleep', '3600']).pid",
    "one in its own session": (
        "import subprocess\npid = subprocess.Popen(['sleep', '3600'], start_new_session=True).pid"
    ),
    "a daemon": f"{DAEMONISE}\npid = daemonise()",
    "one that ignores signals": (
        "import subprocess\n"
        "pid = subprocess.Popen(['sh', '-c', \"trap '' TERM HUP INT; sleep 3600; :\"]).pid"
    ),
    "one with a scrubbed environment": (
        "import subprocess\n"
        "pid = subprocess.Popen(['/bin/sleep', '3600'], env={}, start_new_session=True).pid"
    ),
    "a stopped one": (
        "import os, signal, subprocess\n"
        "pid = subprocess.Popen(['sleep', '3600'], start_new_session=True).pid\n"
        "os.kill(pid, signal.SIGSTOP)"
    ),
    "a grandchild": (
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'setsid sleep 3600 & echo $!; wait'],\n"
        "                         stdout=subprocess.PIPE, text=True)\n"
        "pid = int(child.stdout.readline())"
    ),
}


async def born(session: Session, source: str) -> int:
    pid = (await session.run(f"{source}\npid")).value
    assert isinstance(pid, int)
    os.kill(pid, 0)
    return pid


@pytest.mark.parametrize("end", ["shutdown", "terminate", "restart"])
@pytest.mark.parametrize("source", DESCENDANTS.values(), ids=DESCENDANTS)
async def test_every_descendant_dies_with_the_session(
    session: Session, source: str, end: str
) -> None:
    pid = await born(session, source)
    await getattr(session, end)()
    await until_exited(pid)


LEFT_ALONE = {name: DESCENDANTS[name] for name in DESCENDANTS if "scrubbed" not in name}


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("source", LEFT_ALONE.values(), ids=LEFT_ALONE)
async def test_every_descendant_dies_when_the_child_dies_by_itself(
    session: Session, source: str, end: str
) -> None:
    pid = await born(session, source)
    await end_of(session, f"import os\n{end}")
    await until_exited(pid)


async def test_an_orphan_that_was_in_the_middle_of_its_exec_is_found_a_little_later(
    session: Session, tmp_path: Path
) -> None:
    """As there, it shows no environment when the child dies, and its marker afterwards."""
    os.mkfifo(tmp_path / "go")
    exec_ = f'read _ < {tmp_path}/go; CAPSULE_SESSION="$0" exec sleep 3600'
    pid = await born(
        session,
        "import os, subprocess\n"
        f"sh = ['/bin/sh', '-c', {exec_!r}, os.environ['CAPSULE_SESSION']]\n"
        "pid = subprocess.Popen(sh, env={}, start_new_session=True).pid",
    )
    await eventually(lambda: Path(f"/proc/{pid}/environ").read_bytes() == b"")
    await end_of(session, "os._exit(3)")
    with (tmp_path / "go").open("w") as go:
        go.write("now\n")
    await until_exited(pid)


async def test_a_grandchild_that_is_adopted_while_orphans_are_listed_is_found(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is in the listing, and a zombie by the time the parent is looked at."""
    become_subreaper()
    source = DESCENDANTS["a grandchild"]
    await session.run("import os, subprocess")
    pid, parent = (await session.run(f"{source}\npid, child.pid")).value
    look = family._bond

    def look_when_the_parent_is_a_zombie(found: int, *args: Any) -> Any:
        if found == parent:
            os.kill(parent, signal.SIGKILL)
            while "\nState:\tZ" not in Path(f"/proc/{parent}/status").read_text():
                time.sleep(0.001)
        return look(found, *args)

    monkeypatch.setattr(family, "_bond", look_when_the_parent_is_a_zombie)
    monkeypatch.setattr(family, "_kill_group", lambda group: None)
    await end_of(session, "os._exit(3)")
    await until_exited(pid)


async def test_every_descendant_dies_with_a_child_that_had_to_be_killed(session: Session) -> None:
    pid = await born(session, DESCENDANTS["a daemon"])
    watched = Watched(
        session,
        "import ctypes\n"
        "while True:\n"
        "    try: print('held', flush=True); ctypes.PyDLL(None).sleep(3600)\n"
        "    except BaseException: pass",
    )
    await watched.until_output("held")
    assert await session.cancel(watched.execution_id, grace_s=0) == "killed"
    await until_exited(pid)


async def test_processes_that_multiply_are_all_killed() -> None:
    """Three of them hand on to a copy every other millisecond: moving targets among many."""
    census = Census()
    async with Session(SessionConfig(env=census.environment())) as session:
        await session.run(
            "import os, time\n"
            "def run_away():\n"
            "    os.setsid()\n"
            "    while True:\n"
            "        if os.fork(): os._exit(0)\n"
            "        time.sleep(0.002)\n"
            "for _ in range(3):\n"
            "    if os.fork() == 0: run_away()\n"
            "for _ in range(20):\n"
            "    if os.fork() == 0: time.sleep(3600)\n"
        )
        await session.terminate()
    await eventually(lambda: not census.processes())
    for _ in range(20):
        assert not census.processes()


async def test_processes_of_other_sessions_are_left_alone(session: Session) -> None:
    async with Session() as other:
        mine = await born(session, DESCENDANTS["a daemon"])
        theirs = await born(other, DESCENDANTS["a daemon"])
        await session.terminate()
        await until_exited(mine)
        os.kill(theirs, 0)
        assert (await other.run("os.getpgid(pid) > 0")).value is True
    await until_exited(theirs)


async def test_the_descendants_of_an_execution_outlive_it_but_not_the_session(
    session: Session,
) -> None:
    pid = await born(session, DESCENDANTS["a subprocess"])
    await end_of(session, "1 / 0")
    os.kill(pid, 0)
    await session.shutdown()
    await until_exited(pid)


# --- dying with the parent -----------------------------------------------------------------------

PARENT = """\
import asyncio, sys
from capsule_tasks.sessions import Session

async def main():
    session = Session()
    await session.start()
    done = await session.run({prepare!r})
    print(session.info.pid, done.value, flush=True)
    async for message in session.execute({last!r}):
        pass

asyncio.run(main())
"""
HOLDS_THE_GIL = "import ctypes\nctypes.PyDLL(None).sleep(3600)"


def start_parent(tmp_path: Path, prepare: str, last: str) -> subprocess.Popen[str]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(prepare=textwrap.dedent(prepare), last=last))
    return subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


async def pids_of(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    async with asyncio.timeout(HANG_S):
        line = await asyncio.to_thread(parent.stdout.readline)
    return [int(word) for word in line.split()]


@pytest.mark.parametrize(
    "last",
    [
        "import time; time.sleep(3600)",
        "while True: pass",
        "while True: print('x' * 1000)",
        "while True:\n    try: input()\n    except BaseException: pass",
        "import asyncio\nawait asyncio.sleep(3600)",
        "None",
    ],
    ids=["sleep", "loop", "flood", "stubborn", "coroutine", "nothing"],
)
async def test_a_killed_parent_leaves_neither_child_nor_daemon(tmp_path: Path, last: str) -> None:
    parent = start_parent(tmp_path, f"{DAEMONISE}\ndaemonise()", last)
    try:
        child, daemon = await pids_of(parent)
        parent.send_signal(signal.SIGKILL)
        await until_exited(child)
        await until_exited(daemon)
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize(
    "last",
    [
        HOLDS_THE_GIL,
        # No signal ends this one's call: it takes 16 s.
        pytest.param("sum(range(10 ** 12))", marks=pytest.mark.full),
    ],
    ids=["sleeps", "computes"],
)
async def test_a_child_that_holds_the_gil_dies_with_its_parent_too(
    tmp_path: Path, last: str
) -> None:
    parent = start_parent(tmp_path, "0", last)
    try:
        child, _ = await pids_of(parent)
        parent.send_signal(signal.SIGKILL)
        await until_exited(child)
    finally:
        parent.kill()
        parent.communicate()


async def test_a_parent_that_exits_without_a_shutdown_leaves_no_child(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    source = PARENT.format(prepare=f"{DAEMONISE}\ndaemonise()", last="None")
    script.write_text(source.replace("    async for", "    import os; os._exit(0)\n    async for"))
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    out, _ = await asyncio.wait_for(parent.communicate(), HANG_S)
    for pid in map(int, out.split()):
        await until_exited(pid)
