"""Processor time of a process family, also of members that end between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from capsule_tasks.system.family import descendants
from capsule_tasks.system.usage import CpuTimes, cpu_times


class Process(NamedTuple):
    """A process for as long as the machine runs: numbers are used again."""

    pid: int
    born_at: int


Members = Mapping[Process, CpuTimes]
"""The processor time of each member of a family."""


def members_of(pid: int) -> dict[Process, CpuTimes]:
    """The family of a process as it is now; empty without the process."""
    found: dict[Process, CpuTimes] = {}
    for member in (pid, *descendants(pid)) if pid else ():
        if (times := cpu_times(member)) is not None:
            found[Process(member, times.born_at)] = times
    return found


class FamilyCpu:
    """Adds up what the members of one family use, from one reading to the next.

    The kernel adds the time of a member that ends to its parent's waited time, or forgets it, as
    the parent likes. So time of a parent's children counts only as far as it was not seen before,
    in members that are gone by now. What a member uses between the last reading and its end is not
    counted if nobody waits for it.
    """

    def __init__(self) -> None:
        self.used_s = 0.0
        self._members: Members = {}
        self._gone: dict[Process, CpuTimes] = {}
        """Members that the last reading missed; one may have had another parent just then."""
        self._seen_s = 0.0
        """Time of members that are gone, which may come up again as waited time of others."""

    def read(self, members: Members) -> None:
        """Count what was used since the last reading."""
        before = {**self._gone, **self._members}
        waited_s = 0.0
        for process, now in members.items():
            then = before.get(process)
            self.used_s += max(0.0, now.own_s - (then.own_s if then else 0.0))
            waited_s += max(0.0, now.waited_s - (then.waited_s if then else 0.0))
        back = (times for process, times in self._gone.items() if process in members)
        self._seen_s = max(0.0, self._seen_s - sum(each.total_s for each in back))
        self._gone = {each: of for each, of in self._members.items() if each not in members}
        self._seen_s += sum(times.total_s for times in self._gone.values())
        seen_before_s = min(waited_s, self._seen_s)
        self._seen_s -= seen_before_s
        self.used_s += waited_s - seen_before_s
        self._members = members
