"""When the history of a run is compacted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.compaction.compacting import kept_by
from capsule_tasks.runs.compaction.compactors import Compactor
from capsule_tasks.runs.compaction.cutting import since_compaction, size_of
from capsule_tasks.runs.records import Item
from capsule_tasks.settings import Count, check_value


@dataclass(frozen=True)
class Compaction:
    """When the history of a run is compacted, and how.

    Items count from the last compaction on. One of `threshold_items`, `threshold_bytes` (of the
    items as JSON) and `should`, a function of those items, says when it is due.
    """

    compactor: Compactor
    threshold_items: int | None = None
    threshold_bytes: int | None = None
    should: Callable[[Sequence[Item]], bool] | None = None
    keep_last: int | None = None
    """The latest items that stay as they are; None for the compactor's own number."""

    def __post_init__(self) -> None:
        for name in ("threshold_items", "threshold_bytes", "keep_last"):
            check_value(name, getattr(self, name), Count | None)
        rules = (self.threshold_items, self.threshold_bytes, self.should)
        given = [rule for rule in rules if rule is not None]
        if len(given) != 1:
            must = "exactly one of threshold_items, threshold_bytes and should"
            raise InvalidSetting("Compaction", given, must)
        kept = kept_by(self.compactor, self.keep_last)
        if self.threshold_items is not None and self.threshold_items <= kept:
            must = f"more than the {kept} items that are kept (keep_last)"
            raise InvalidSetting("threshold_items", self.threshold_items, must)


class Seen(Protocol):
    """The items that a model sees, as `runs.conversation.View` has them."""

    def __len__(self) -> int: ...

    def since(self, start: int) -> list[Item]:
        """The items from this index on."""
        ...


class CompactionWatch:
    """Says when the compaction of one run is due, without looking at the same items twice."""

    def __init__(self, policy: Compaction) -> None:
        self.policy = policy
        self._start = self._measured = self._bytes = 0
        self._not_before = 0

    def restart(self, seen: Seen) -> None:
        """Begin anew, with another view of the history."""
        self._start = self._measured = since_compaction(seen.since(0))
        self._bytes = self._not_before = 0

    def is_due(self, seen: Seen) -> bool:
        """Whether the items of this view since the last compaction are too many."""
        if len(seen) < self._measured:
            self.restart(seen)
        count = len(seen) - self._start
        if count < self._not_before:
            return False
        policy = self.policy
        if policy.threshold_items is not None:
            return count >= policy.threshold_items
        if policy.threshold_bytes is not None:
            self._bytes += size_of(seen.since(self._measured))
            self._measured = len(seen)
            return self._bytes >= policy.threshold_bytes
        return policy.should is not None and policy.should(seen.since(self._start))

    def put_off(self, seen: Seen) -> None:
        """Wait for a quarter more items: what a compaction could do about these was just tried."""
        count = len(seen) - self._start
        self._not_before = count + max(1, count // 4)
