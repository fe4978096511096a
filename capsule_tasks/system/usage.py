"""Memory, threads and files of processes, as the kernel counts them; 0 for one that has ended."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from capsule_tasks.system.portable import PROC
from capsule_tasks.system.prctl import libc

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_trim: Callable[[int], int] | None = getattr(libc, "malloc_trim", None)  # glibc alone has it


class CpuTimes(NamedTuple):
    """Processor time of a process since it was born."""

    born_at: int
    """In ticks since the machine was started."""
    own_s: float
    waited_s: float
    """That of its children that have ended and been waited for."""

    @property
    def total_s(self) -> float:
        return self.own_s + self.waited_s


def thread_count(pid: int) -> int:
    try:
        return os.stat(f"{PROC}/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def resident_bytes(pid: int) -> int:
    try:
        return int(_read(f"{PROC}/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def cpu_s(pid: int) -> float:
    """Processor time of a process, and of its children that have ended and been waited for."""
    times = cpu_times(pid)
    return times.total_s if times is not None else 0.0


def cpu_times(pid: int) -> CpuTimes | None:
    """The processor time of a process; None for one that has ended."""
    try:
        fields = _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()
        user, system, waited_user, waited_system = map(int, fields[11:15])
        born_at = int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    return CpuTimes(born_at, (user + system) / _TICKS, (waited_user + waited_system) / _TICKS)


def own_resident_bytes() -> int:
    """Resident memory of this process; without `/proc`, the maximum that it ever had."""
    if size := resident_bytes(os.getpid()):
        return size
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def proportional_bytes(pid: int) -> int:
    """Resident memory; each page is divided among the processes that share it."""
    try:
        rollup = _read(f"{PROC}/{pid}/smaps_rollup")
        return int(rollup.partition("\nPss:")[2].split(None, 1)[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def give_back_freed_memory() -> None:
    """Have the allocator return freed memory to the system; takes some milliseconds.

    glibc maps large blocks one by one, but raises its threshold for that to the largest block that
    was freed, 32 MiB at most. From then on large blocks are in its heap, and holes stay resident.
    """
    if _trim is not None:
        _trim(0)


def sizes_of_deleted(family: Iterable[int], directory: str) -> Iterator[int]:
    """The bytes of each file that was deleted and that some process still has open."""
    seen: set[int] = set()
    device = os.stat(directory).st_dev
    for pid in family:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{PROC}/{pid}/fd"):
                with contextlib.suppress(OSError):
                    file = os.stat(f"{PROC}/{pid}/fd/{name}")
                    is_file = stat.S_ISREG(file.st_mode) and file.st_nlink == 0
                    if is_file and file.st_dev == device and file.st_ino not in seen:
                        seen.add(file.st_ino)
                        yield file.st_blocks * 512


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
