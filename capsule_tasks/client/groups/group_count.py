"""How far a group is, from two sources: its counter, and the result backend for the rest.

Workers with streams count each member once, by its index. A member that ran on another pool, or
whose counter is gone, is known to the result backend only. Decides, and does no I/O.
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
    """What is known of a group. `members` may be empty: then only its counter can tell."""

    def __init__(self, members: Sequence[str] = ()) -> None:
        self.after = ""
        """The last failure that the counter's stream has told."""
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
    def has_found(self) -> bool:
        """Whether members are counted here which the counter may count later."""
        return bool(self._from_backend)

    def take(self, progress: GroupProgress) -> list[Failure]:
        """What the counter says now; the failures that were not told before."""
        self._counts = progress.counts
        if progress.counted is not None:
            self._take_places(progress.counted, progress.done)
        if progress.failures:
            self.after = progress.failures[-1][0]
        return self._news((one, why) for _, one, why in progress.failures)

    def missing(self) -> list[int]:
        """The indexes of those of whom nothing is known, as of the last progress that told."""
        indexes = range(len(self.members))
        return [
            index
            for index in indexes
            if index not in self._from_backend and not _has(self._counted, index)
        ]

    def add(self, indexes: Sequence[int], ends: Mapping[str, Ended]) -> list[Failure]:
        """What the result backend knows of these; the failures among it."""
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
        """Whom the counter has counted; those that were found here are its own from now on."""
        if _ones(counted) != done:
            # A part of the counter is lost: whom it had counted, and how, cannot be told.
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
