"""Count resources that a test must release: processes, descriptors, tasks, threads, memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from capsule_tasks.sessions.process.live_child import LiveChild
from capsule_tasks.sessions.stream import ExecutionStream

TAG = "CAPSULE_CHAOS"
BACK_TO_START_S = 20.0
"""How long the kernel and the event loop may take to free what was released."""
_PAUSE_S = 0.01


class Census:
    """Counts what exists now; `back_to_start` waits until nothing more than that exists again."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self._loop: Any = asyncio.get_running_loop()
        gc.collect()  # what waited for the collector would hide as much that is left behind
        self._before = self._count()

    def environment(self, name: str = "") -> dict[str, str]:
        """For a session's children: descendants that do not scrub it are found by their tag."""
        return {**os.environ, TAG: self.tag + name}

    async def back_to_start(self) -> None:
        """Wait until nothing more exists; AssertionError lists what was left behind."""
        deadline = time.monotonic() + BACK_TO_START_S
        while left := self.left_behind():
            assert time.monotonic() < deadline, "left behind:\n" + "\n".join(left)
            await asyncio.sleep(_PAUSE_S)

    def left_behind(self) -> list[str]:
        """List the resources that exist now and did not before, one line each."""
        gc.collect()
        more = self._count() - self._before
        return [f"{name} (x{number})" for name, number in more.items()]

    def processes(self, name: str = "") -> list[int]:
        """The live processes of this test, or of the session that was given this name."""
        needle = f"{TAG}={self.tag}{name}".encode()
        return [
            pid
            for pid in _all_pids()
            if any(entry.startswith(needle) for entry in _environment(pid))
        ]

    def _count(self) -> Counter[str]:
        own = asyncio.current_task()
        found: Counter[str] = Counter()
        found.update(f"process {pid}: {_command(pid)}" for pid in self.processes())
        found.update(f"descriptor {number}: {target}" for number, target in _descriptors())
        found.update(f"task {task!r}" for task in asyncio.all_tasks() if task is not own)
        found.update(f"thread {thread.name}" for thread in threading.enumerate())
        found.update(f"registered {key.fd}" for key in self._registered())
        found.update(
            f"timer {handle!r}"
            for handle in self._loop._scheduled
            if not handle.cancelled() and "capsule_tasks" in repr(handle)
        )
        kinds = (LiveChild, ExecutionStream)
        found.update(type(o).__name__ for o in gc.get_objects() if issubclass(type(o), kinds))
        return found

    def _registered(self) -> list[Any]:
        return list(self._loop._selector.get_map().values())


def resident_mib() -> float:
    """Memory of this process, free lists given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _descriptors() -> list[tuple[str, str]]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append((entry.name, str(entry.readlink())))
        except OSError:
            continue  # the one that the listing used
    return found


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(gone)"
    return b" ".join(words).decode(errors="replace")[:100]
