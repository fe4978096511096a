"""The progress of a group from two sources: its counter, and the result backend for the rest.

Workers with streams count each member once, by its index. A member that ran on another pool, or
whose counter has expired, is in the result backend only. Does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.executions.types import GroupProgress

_FAILURES = (Outcome.FAILED, Outcome.LOST)


@dataclass(frozen=True, slots=True)
class Failure:
    """A member that failed or was lost, and why."""

    execution_id: str
    reason: str


class GroupCount:
    """The members of a group that have ended. Without `members` only the counter is used."""

    def __init__(self, members: Sequence[str] = ()) -> None:
        self.after = ""
        """The id of the last failure that was read from the stream of failures."""
        self.members = members
        self._size = -(-len(members) // 8)
        self._counts: dict[str, int] = {}
        self._counted = bytes(self._size)
        self._from_backend: dict[int, str] = {}
        self._from_backend_bits = bytearray(self._size)
        self._from_backend_counts: Counter[str] = Counter()
        self._reported: set[str] = set()

    @property
    def counts(self) -> dict[str, int]:
        """Members that ended, by outcome."""
        return dict(Counter(self._counts) + self._from_backend_counts)

    @property
    def done(self) -> int:
        return sum(self._counts.values()) + len(self._from_backend)

    @property
    def has_backend_ends(self) -> bool:
        """Whether members were found in the backend that the counter may count later."""
        return bool(self._from_backend)

    def take(self, progress: GroupProgress) -> list[Failure]:
        """Take the counter's progress; the failures that were not reported before."""
        self._counts = progress.counts
        if progress.counted is not None:
            self._take_places(progress.counted, progress.done)
        if progress.failures:
            self.after = progress.failures[-1][0]
        return self._news((one, why) for _, one, why in progress.failures)

    def missing(self) -> list[int]:
        """The indexes of members that neither source has, by the last progress with bits."""
        indexes = range(len(self.members))
        return [
            index
            for index in indexes
            if index not in self._from_backend and not _has(self._counted, index)
        ]

    def add(self, indexes: Sequence[int], ends: Mapping[str, Ended]) -> list[Failure]:
        """Take ends from the result backend; the failures among them."""
        failures = []
        for index in indexes:
            ended = ends.get(self.members[index])
            if ended is None:
                continue
            outcome = str(ended.outcome)
            self._from_backend[index] = outcome
            self._from_backend_counts[outcome] += 1
            self._from_backend_bits[index >> 3] |= 0x80 >> (index & 7)
            if ended.outcome in _FAILURES:
                failures.append((self.members[index], f"{ended.type}: {ended.message}"))
        return self._news(failures)

    def _take_places(self, counted: bytes, done: int) -> None:
        """Take the members that the counter has counted; they no longer count as found."""
        if _ones(counted) != done:
            # A part of the counter is lost, so its counts cannot be trusted.
            self._counts, counted = {}, b""
        self._counted = counted[: self._size].ljust(self._size, b"\0")
        if int.from_bytes(self._counted) & int.from_bytes(self._from_backend_bits):
            for index in [index for index in self._from_backend if _has(self._counted, index)]:
                self._from_backend_counts[self._from_backend.pop(index)] -= 1
                self._from_backend_bits[index >> 3] &= ~(0x80 >> (index & 7))

    def _news(self, failures: Iterable[tuple[str, str]]) -> list[Failure]:
        news = [Failure(one, why) for one, why in failures if one not in self._reported]
        self._reported.update(failure.execution_id for failure in news)
        return news


def _has(bits: bytes, index: int) -> bool:
    return bool(bits[index >> 3] & 0x80 >> (index & 7))


def _ones(bits: bytes) -> int:
    return int.from_bytes(bits).bit_count()
