"""Finding and ending every process that a session's child brought into the world.

A descendant can leave its process group (`setsid`) and lose its parent (daemonise), so none of
the usual handles is enough alone. Three are used together: the tree below the child (the child is
a subreaper, so orphans come back to it), the POSIX session the child leads, and a marker in the
environment that survives everything but an explicit scrub.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from capsule_tasks.system.portable import IS_LINUX, PROC, parents
from capsule_tasks.system.prctl import is_subreaper

MARKER = "CAPSULE_SESSION"
_MAX_PASSES = 20

_STATE, _SESSION, _FLAGS, _BORN_AT = 0, 3, 6, 19
"""Fields of `/proc/<pid>/stat`, counted from the one behind the name."""
_KERNEL_THREAD = 0x00200000
_NOBODY = -1


class _Bond(Enum):
    """What a process has to do with a session."""

    OURS = auto()
    NONE = auto()
    UNKNOWN = auto()
    """It shows no environment at all: it may be in the middle of `exec`."""


class Orphans(NamedTuple):
    """What was found of a dead child's descendants, those included that wait to be reaped."""

    killed: set[int]
    is_unsure: bool
    """A process as young as the child was in the middle of `exec`: look once more later."""
    born_at: int


def descendants(pid: int) -> list[int]:
    """The live processes below `pid`, parents before children."""
    found: list[int] = []
    frontier = [pid]
    while frontier:
        children = [child for parent in frontier for child in _children(parent)]
        found += children
        frontier = children
    return found


def kill_descendants(pid: int) -> set[int]:
    """Kill everything below `pid`; the processes killed.

    They are stopped first, pass after pass until no new one shows up, so that a process that
    forks faster than it is killed cannot win. Nor can one that hands on to a copy and exits: the
    kernel kills a whole group at once.
    """
    doomed: set[int] = set()
    groups: set[int] = set()
    for _ in range(_MAX_PASSES):
        fresh = [child for child in descendants(pid) if child not in doomed]
        if not fresh:
            break
        groups.update(map(_group, fresh))
        _signal_all(fresh, signal.SIGSTOP)
        doomed.update(fresh)
    _signal_all(doomed, signal.SIGKILL)
    for group in groups - {0, os.getpgrp(), _group(pid)}:
        _kill_group(group)
    return doomed


def kill_family(pid: int) -> set[int]:
    """Kill a session's child and everything below it; what was below it.

    Safe when parts are gone already.
    """
    _signal_all([pid], signal.SIGSTOP)
    doomed = kill_descendants(pid)
    _kill_group(pid)
    _signal_all([pid], signal.SIGKILL)
    return doomed


def kill_orphans(leader: int, marker: str) -> Orphans:
    """Kill what a dead child left: members of its POSIX session and bearers of its marker.

    The leader must not have been collected yet, so that nobody else can have its number. Orphans
    come to a subreaper; any other process has to look for them among all there are.
    """
    _kill_group(leader)
    born_at = _born_at(leader)
    members = {pid for pid in _children(os.getpid()) if pid != leader and _leader(pid) == leader}
    orphans = _kill_found(leader, marker, born_at)
    return orphans._replace(killed=orphans.killed | members)


def kill_late_orphans(marker: str, born_at: int) -> Orphans:
    """The same for a child that has been collected: only its marker tells."""
    return _kill_found(_NOBODY, marker, born_at)


def _kill_found(leader: int, marker: str, born_at: int) -> Orphans:
    """Kill the orphans among this process's children, until a listing shows no new process.

    A parent among them can die between the listing and the look at it. It then counts as a
    zombie, and its children, which have just come to this process, are only in the next listing.
    """
    needle = f"{MARKER}={marker}".encode()
    killed: set[int] = set()
    strangers: set[int] = set()
    unsure: set[int] = set()
    for _ in range(_MAX_PASSES):
        candidates = _children(os.getpid()) if is_subreaper() else _all_pids()
        fresh = set(candidates) - strangers - killed - unsure
        if not fresh:
            return Orphans(killed, bool(unsure), born_at)
        bonds = {pid: _bond(pid, leader, needle, born_at) for pid in fresh | unsure}
        orphans = {pid for pid, bond in bonds.items() if bond is _Bond.OURS}
        strangers |= {pid for pid, bond in bonds.items() if bond is _Bond.NONE}
        unsure = {pid for pid, bond in bonds.items() if bond is _Bond.UNKNOWN}
        for orphan in tuple(orphans):  # its own children come to a subreaper only after its end
            orphans |= kill_descendants(orphan)
        _signal_all(orphans, signal.SIGKILL)
        killed |= orphans
    return Orphans(killed, bool(unsure), born_at)


def kill_members(leader: int, spared: frozenset[int] | set[int]) -> None:
    """Kill and collect the children of this process that belong to a POSIX session.

    The leader must not have been collected yet, so that nobody else can have its number.
    """
    for _ in range(_MAX_PASSES):  # one that is being killed may just have forked
        members = {pid for pid in _children(os.getpid()) if _leader(pid) == leader}
        members -= {leader, *spared}
        if not members:
            return
        _signal_all(members, signal.SIGKILL)
        for pid in members:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def reap(pids: Iterable[int]) -> set[int]:
    """Collect those of the killed that this process, a subreaper, adopted; who is still dying."""
    dying: set[int] = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # adopted by another, or collected before
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                dying.add(pid)
    return dying


def _bond(pid: int, leader: int, needle: bytes, born_at: int) -> _Bond:
    if pid == os.getpid():
        return _Bond.NONE
    if not IS_LINUX:  # nobody may see another's environment
        return _Bond.OURS if _leader(pid) == leader else _Bond.NONE
    try:
        stat = _stat(pid)
        if stat[_STATE] in b"ZX":
            return _Bond.NONE
        if int(stat[_SESSION]) == leader:
            return _Bond.OURS
        environment = _read(f"{PROC}/{pid}/environ")
        if needle in environment.split(b"\0"):
            return _Bond.OURS
        is_program = not int(stat[_FLAGS]) & _KERNEL_THREAD
        if not environment and is_program and int(stat[_BORN_AT]) >= born_at:
            return _Bond.UNKNOWN
    except (OSError, ValueError):
        pass
    return _Bond.NONE


def _born_at(pid: int) -> int:
    try:
        return int(_stat(pid)[_BORN_AT])
    except (OSError, ValueError):
        return 0


def _stat(pid: int) -> list[bytes]:
    """The fields behind the name of the program, which may hold anything."""
    return _read(f"{PROC}/{pid}/stat").rpartition(b")")[2].split()


def kill_own_group() -> None:
    """End this process, and everything that never left the group it leads."""
    leads = os.getpgrp() == os.getpid()
    os.kill(-os.getpid() if leads else os.getpid(), signal.SIGKILL)


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def _group(pid: int) -> int:
    """The process group; 0 if the process is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _leader(pid: int) -> int:
    """The leader of a process's POSIX session; 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    if not IS_LINUX:
        return [child for child, parent in parents().items() if parent == pid]
    found: list[int] = []
    try:
        for thread in os.listdir(f"{PROC}/{pid}/task"):
            found += map(int, _read(f"{PROC}/{pid}/task/{thread}/children").split())
    except OSError:
        pass  # the process ended while it was being read: it has no children any more
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _all_pids() -> list[int]:
    if not IS_LINUX:
        return list(parents())
    try:
        return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]
    except OSError:
        return []


def _signal_all(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)
