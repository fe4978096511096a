"""Finding and killing every process that a session's child has started.

A descendant can leave its process group (`setsid`) and lose its parent (daemonise), so no single
criterion finds all of them. Three are used together: the tree below the child (the child is a
subreaper, so it adopts orphans), the POSIX session that the child leads, and a marker in the
environment, which only a program that clears its environment loses.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from capsule_tasks.system.portable import IS_LINUX, PROC, parents
from capsule_tasks.system.prctl import is_subreaper

MARKER = "CAPSULE_SESSION"
_MAX_PASSES = 20

_STATE, _SESSION, _FLAGS, _BORN_AT = 0, 3, 6, 19
"""Fields of `/proc/<pid>/stat`, counted from the one behind the name."""
_KERNEL_THREAD = 0x00200000
_NO_LEADER = -1


class _Bond(Enum):
    """Whether a process belongs to a session."""

    OURS = auto()
    NONE = auto()
    UNKNOWN = auto()
    """The process shows no environment at all: it may be in the middle of `exec`."""


class Orphans(NamedTuple):
    """The descendants of a dead child that were found."""

    killed: set[int]
    """Among them zombies, which wait to be reaped."""
    is_incomplete: bool
    """A process as young as the child was in the middle of `exec`: search once more later."""
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

    The processes are stopped first, pass after pass until no new one shows up: killed one by one,
    they could fork faster than they die. A process that forks a copy and exits between two passes
    is killed with its group, which the kernel kills as a whole.
    """
    killed: set[int] = set()
    groups: set[int] = set()
    for _ in range(_MAX_PASSES):
        fresh = [child for child in descendants(pid) if child not in killed]
        if not fresh:
            break
        groups.update(_or_zero(os.getpgid, child) for child in fresh)
        _signal_all(fresh, signal.SIGSTOP)
        killed.update(fresh)
    _signal_all(killed, signal.SIGKILL)
    for group in groups - {0, os.getpgrp(), _or_zero(os.getpgid, pid)}:
        _kill_group(group)
    return killed


def kill_family(pid: int) -> set[int]:
    """Kill a session's child and everything below it; the processes below it."""
    _signal_all([pid], signal.SIGSTOP)
    killed = kill_descendants(pid)
    _kill_group(pid)
    _signal_all([pid], signal.SIGKILL)
    return killed


def kill_orphans(leader: int, marker: str) -> Orphans:
    """Kill what a dead child left: processes of its POSIX session, and those with its marker.

    The leader must not have been reaped yet, so that no other process can have its number. A
    subreaper finds orphans among its children; any other process has to search all processes.
    """
    _kill_group(leader)
    born_at = _born_at(leader)
    members = _members(leader)
    orphans = _kill_found(leader, marker, born_at)
    return orphans._replace(killed=orphans.killed | members)


def kill_late_orphans(marker: str, born_at: int) -> Orphans:
    """Kill what a child left that has been reaped: only its marker identifies them."""
    return _kill_found(_NO_LEADER, marker, born_at)


def _kill_found(leader: int, marker: str, born_at: int) -> Orphans:
    """Kill the orphans among this process's children, until a listing shows no new process.

    A parent among them can die between the listing and the check of its bond. It is a zombie
    then, and its children, which this process adopts at that moment, are only in the next listing.
    """
    needle = f"{MARKER}={marker}".encode()
    killed: set[int] = set()
    unrelated: set[int] = set()
    unknown: set[int] = set()
    for _ in range(_MAX_PASSES):
        candidates = _children(os.getpid()) if is_subreaper() else _all_pids()
        fresh = set(candidates) - unrelated - killed - unknown
        if not fresh:
            return Orphans(killed, bool(unknown), born_at)
        bonds = {pid: _bond(pid, leader, needle, born_at) for pid in fresh | unknown}
        orphans = {pid for pid, bond in bonds.items() if bond is _Bond.OURS}
        unrelated |= {pid for pid, bond in bonds.items() if bond is _Bond.NONE}
        unknown = {pid for pid, bond in bonds.items() if bond is _Bond.UNKNOWN}
        for orphan in tuple(orphans):  # a subreaper adopts its children only after its end
            orphans |= kill_descendants(orphan)
        _signal_all(orphans, signal.SIGKILL)
        killed |= orphans
    return Orphans(killed, bool(unknown), born_at)


def kill_members(leader: int, spared: frozenset[int] | set[int]) -> None:
    """Kill and reap the children of this process that belong to a POSIX session.

    The leader must not have been reaped yet, so that no other process can have its number.
    """
    for _ in range(_MAX_PASSES):  # a process may have forked just before it was killed
        members = _members(leader) - spared
        if not members:
            return
        _signal_all(members, signal.SIGKILL)
        for pid in members:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _members(leader: int) -> set[int]:
    """The children of this process that belong to the leader's POSIX session."""
    sessions = {pid: _or_zero(os.getsid, pid) for pid in _children(os.getpid())}
    return {pid for pid, session in sessions.items() if session == leader and pid != leader}


def reap(pids: Iterable[int]) -> set[int]:
    """Reap those of the killed that this process adopted; the processes that are still dying."""
    dying: set[int] = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # adopted by another process, or reaped before
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                dying.add(pid)
    return dying


def _bond(pid: int, leader: int, needle: bytes, born_at: int) -> _Bond:
    if pid == os.getpid():
        return _Bond.NONE
    if not IS_LINUX:  # the environment of another process cannot be read
        return _Bond.OURS if _or_zero(os.getsid, pid) == leader else _Bond.NONE
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
    """The fields behind the program's name, which may contain any character."""
    return _read(f"{PROC}/{pid}/stat").rpartition(b")")[2].split()


def kill_own_group() -> None:
    """End this process, and everything that never left the group it leads."""
    leads = os.getpgrp() == os.getpid()
    os.kill(-os.getpid() if leads else os.getpid(), signal.SIGKILL)


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def _or_zero(lookup: Callable[[int], int], pid: int) -> int:
    """The process's group, or the leader of its POSIX session; 0 if the process has ended."""
    try:
        return lookup(pid)
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
        pass  # the process ended meanwhile: its children have other parents now
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
