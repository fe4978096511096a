"""The private directories of sandboxes: each is swept after its owner, and nothing else is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from capsule_tasks.system.sandbox import directories
from tests.sandboxes import Sandbox, refused
from tests.sessions import eventually

_OWNER = """
import asyncio, sys
from capsule_tasks.sessions import Session
from tests.sandboxes import config
async def own():
    async with Session(config()) as session:
        print((await session.run("import os; os.makedirs('a/b'); os.getcwd()")).value, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(own())
"""


class Owner:
    """A program with one sandbox, which works in `home`."""

    def __init__(self, temporary: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        assert self.process.stdout is not None
        self.home = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def leave(self) -> None:
        self.process.communicate("\n")
        assert self.process.returncode == 0


async def test_directories_of_a_killed_owner_are_swept_at_the_next_start(tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:
        killed, alive = Owner(tmp_path), Owner(tmp_path)
        undo.callback(alive.kill)
        assert tmp_path in killed.home.parents
        killed.kill()
        assert killed.home.is_dir()
        following = Owner(tmp_path)
        undo.callback(following.kill)
        await eventually(lambda: not killed.home.parent.exists())
        assert (alive.home / "a/b").is_dir()
        alive.leave()
        following.leave()
    await eventually(lambda: not any(tmp_path.iterdir()))


async def test_a_sandbox_cannot_reach_the_directory_that_is_locked(sandbox: Sandbox) -> None:
    await refused(sandbox, "import os; os.open('..', os.O_RDONLY)")
    await refused(sandbox, "import os; os.rename('.', '../other')", "OSError")
    await refused(sandbox, "import os; os.symlink('/etc', '../link')")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def _leftover(temporary: Path, name: str = "capsule-sandbox-left") -> Path:
    """The directory of a killed owner, whose lock is free."""
    home = temporary / name / "home"
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    return home


def test_a_sweep_follows_no_link_out_of_a_leftover(temporary: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    mode = precious.stat().st_mode
    home = _leftover(temporary)
    (home / "to-directory").symlink_to(precious)
    (home / "to-file").symlink_to(precious / "file")
    hidden = home / "hidden"
    hidden.mkdir()
    (hidden / "up").symlink_to(precious)
    hidden.chmod(0)
    directories.sweep()
    assert not home.parent.exists()
    assert (precious / "file").read_text() == "x"
    assert precious.stat().st_mode == mode


def test_a_removal_that_was_interrupted_is_finished(temporary: Path) -> None:
    home = _leftover(temporary)
    (home.parent / "capsule-0").mkdir()
    directories.sweep()
    assert not home.parent.exists()


def test_a_directory_that_a_sweep_took_before_it_was_locked_costs_no_descriptor(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not taken:
            taken.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            taken[0].rmdir()

    monkeypatch.setattr(fcntl, "flock", late)
    own = directories.SandboxDirectory()
    own.remove()
    assert taken
    assert taken[0] != Path(own.home).parent
    open_now = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    assert not [target for target in open_now if target.startswith(str(taken[0]))]


def test_a_sweep_leaves_what_is_not_a_leftover(temporary: Path, tmp_path: Path) -> None:
    elsewhere = _leftover(tmp_path)
    (temporary / "capsule-sandbox-link").symlink_to(elsewhere.parent)
    others = _leftover(temporary, "capsule-sandbox-notes")
    (others.parent / "notes.txt").write_text("x")
    shared = _leftover(temporary, "capsule-sandbox-shared")
    shared.parent.chmod(0o755)
    older = _leftover(temporary, "capsule-kept")
    kept = [elsewhere, others, shared, older]
    if os.geteuid() == 0:
        foreign = _leftover(temporary, "capsule-sandbox-foreign")
        os.chown(foreign.parent, 65534, 65534)
        kept.append(foreign)
    own = directories.SandboxDirectory()
    directories.sweep()
    assert all(home.is_dir() for home in [*kept, Path(own.home)])
    own.remove()
    assert not Path(own.home).parent.exists()
