"""The progress of a group from two sources: its counter, and the result backend for the rest.

Workers with streams count each member once, by its index. A member that ran on another pool, or
whose counter has expired, is in the result backend only. Does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.executions.types import GroupProgress

_FAILURES = (Outcome.FAILED, Outcome.LOST)


@dataclass(frozen=True, slots=True)
class Failure:
    """A member that failed or was lost, and why."""

    execution_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupState:
    """The progress of a group. `failures` holds failures that were not reported before."""

    total: int
    counts: dict[str, int]
    """Members that ended, by outcome."""
    failures: tuple[Failure, ...] = ()

    @property
    def done(self) -> int:
        return sum(self.counts.values())

    @property
    def failed(self) -> int:
        return sum(self.counts.get(outcome, 0) for outcome in _FAILURES)

    @property
    def is_over(self) -> bool:
        return self.done >= self.total


class GroupCount:
    """The members of a group that have ended. Without `members` only the counter is used."""

    def __init__(self, total: int, members: Sequence[str] = ()) -> None:
        self.total = total
        self.failures: list[Failure] = []
        """Failures that `state` has not reported yet."""
        self.after = ""
        """The id of the last failure that was read from the stream of failures."""
        self.members = members
        self._size = -(-len(members) // 8)
        self._counts: dict[str, int] = {}
        self._counted = bytes(self._size)
        self._from_backend: dict[int, str] = {}
        self._from_backend_bits = bytearray(self._size)
        self._from_backend_counts: Counter[str] = Counter()
        self._known_failures: set[str] = set()

    def state(self) -> GroupState:
        """The progress, with the failures since the last call."""
        failures, self.failures = tuple(self.failures), []
        counts = Counter(self._counts) + self._from_backend_counts
        return GroupState(self.total, dict(counts), failures)

    @property
    def done(self) -> int:
        return sum(self._counts.values()) + len(self._from_backend)

    @property
    def has_backend_ends(self) -> bool:
        """Whether members were found in the backend that the counter may count later."""
        return bool(self._from_backend)

    def take(self, progress: GroupProgress) -> None:
        """Take the counter's progress."""
        self._counts = progress.counts
        if progress.counted is not None:
            self._take_places(progress.counted, progress.done)
        if progress.failures:
            self.after = progress.failures[-1][0]
        for _, execution_id, reason in progress.failures:
            self._add_failure(execution_id, reason)

    def missing(self) -> list[int]:
        """The indexes of members that neither source has, by the last progress with bits."""
        indexes = range(len(self.members))
        return [
            index
            for index in indexes
            if index not in self._from_backend and not _has(self._counted, index)
        ]

    def add(self, indexes: Sequence[int], ends: Mapping[str, Ended]) -> None:
        """Take ends from the result backend."""
        for index in indexes:
            ended = ends.get(self.members[index])
            if ended is None:
                continue
            outcome = str(ended.outcome)
            self._from_backend[index] = outcome
            self._from_backend_counts[outcome] += 1
            self._from_backend_bits[index >> 3] |= 0x80 >> (index & 7)
            if ended.outcome in _FAILURES:
                self._add_failure(self.members[index], f"{ended.type}: {ended.message}")

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

    def _add_failure(self, execution_id: str, reason: str) -> None:
        if execution_id not in self._known_failures:
            self._known_failures.add(execution_id)
            self.failures.append(Failure(execution_id, reason))


def _has(bits: bytes, index: int) -> bool:
    return bool(bits[index >> 3] & 0x80 >> (index & 7))


def _ones(bits: bytes) -> int:
    return int.from_bytes(bits).bit_count()
