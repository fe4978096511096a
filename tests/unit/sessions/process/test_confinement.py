"""A child whose limits cannot be checked is killed, once, with the reason named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capsule_tasks.protocol.messages import ErrorKind
from capsule_tasks.sessions.process import confinement
from capsule_tasks.sessions.process.confinement import Confinement
from capsule_tasks.sessions.stopping import KillReason
from capsule_tasks.settings import LimitSettings, SandboxSettings


class _Child:
    """Records why it is killed."""

    def __init__(self, home: Path) -> None:
        self.process = SimpleNamespace(pid=0, sandbox_directory=SimpleNamespace(home=str(home)))
        self.is_over = False
        self.killed: asyncio.Future[KillReason] = asyncio.get_running_loop().create_future()

    def kill(self, reason: KillReason) -> None:
        self.killed.set_result(reason)


def _no_thread(_pid: int) -> list[int]:
    raise RuntimeError("can't start new thread")


def _unmeasurable(_path: str) -> Iterator[int]:
    """More entries than are measured on the loop, and a fault in the last."""
    yield from [0] * 300
    raise ValueError("no such size")


@pytest.mark.parametrize(
    ("name", "function", "fault"),
    [
        ("descendants", _no_thread, "can't start new thread"),
        ("sizes_in_tree", _unmeasurable, "no such size"),  # on the thread that measures
    ],
)
async def test_a_child_is_killed_when_its_limits_cannot_be_checked(
    name: str,
    function: Any,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(confinement, name, function)
    child: Any = _Child(tmp_path)
    with caplog.at_level(logging.ERROR, logger="capsule_tasks.sessions"):
        Confinement(child, SandboxSettings(), LimitSettings()).watch()
        async with asyncio.timeout(5):
            reason = await child.killed
    assert reason.kind is ErrorKind.LOST
    assert reason.replace
    assert reason.message.startswith("the limits could not be checked: ")
    assert fault in reason.message
    assert "the limits of the child 0 could not be checked" in caplog.text


async def test_a_quiet_child_is_checked_less_often_until_its_next_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: asyncio.Queue[int] = asyncio.Queue()

    def note_check(pid: int) -> list[int]:
        checks.put_nowait(pid)
        return []

    monkeypatch.setattr(confinement, "descendants", note_check)
    monkeypatch.setattr(confinement, "cpu_s", lambda _pid: 1.0)
    for name, seconds in (("_BUSY", 0.001), ("_IDLE", 0.001), ("_QUIET", 3600.0)):
        monkeypatch.setattr(confinement, f"{name}_CHECK_S", seconds)
    child: Any = _Child(tmp_path)
    checked = Confinement(child, SandboxSettings(), LimitSettings())
    checked.watch()
    checked.rest()
    for _ in range(2):  # the second finds that no processor time was used since the first
        await asyncio.wait_for(checks.get(), 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checks.get(), 0.05)
    checked.watch()
    await asyncio.wait_for(checks.get(), 5)
    child.is_over = True
    checked.rest()
