"""`GroupExecution`: watch, count and cancel a Celery group as one execution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.app import app_or_default
from celery.result import GroupResult

from capsule_tasks.client.cancelling import CancelAnswer, cancel_all, check_type
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.watching.results import keeps_results, stored_ends
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.client.watching.watcher import (
    MAX_OUTAGE_S,
    BackendOutage,
    ExecutionWatcher,
    in_batches,
    wait_for_ring,
)
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.drivers import retry_while_unavailable
from capsule_tasks.storage.executions.types import GroupProgress

_MIN_POLL_S = 1.0
_MAX_POLL_S = 15.0
_SHARE = 20
"""Lookups in the result backend take at most one part in so many of the time."""
_BATCH_SIZE = 200
"""Members that are looked up in one call; the backend answers with their results."""
_MAX_FAILURES = 100
"""Failures that are read in one call."""

_FAILED = (Outcome.FAILED, Outcome.LOST)

AskMany = Callable[[Sequence[str]], Mapping[str, Ended]]
"""The ends that the result backend has stored for these ids."""


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
        return sum(self.counts.get(outcome, 0) for outcome in _FAILED)

    @property
    def is_over(self) -> bool:
        return self.done >= self.total


class GroupExecution:
    """The executions of one Celery group: progress from one counter, failures from one stream.

    The stream of a member is opened only by `member`, so that a group of 50,000 tasks does not
    cost 50,000 reads. Made with `GroupExecution.of(group_result)`, or from the group's id and the
    number of its members.
    """

    def __init__(
        self, group_id: str, total: int, app: Any = None, members: tuple[str, ...] = ()
    ) -> None:
        check_type("group_id", group_id, str)
        check_type("total", total, int)
        if total < 0:
            raise ValueError(f"total = {total}: must be the number of members")
        self.id = group_id
        self.total = total
        self.app = app_or_default(app)
        self._members = members

    @classmethod
    def of(cls, result: GroupResult) -> GroupExecution:
        members = tuple(child.id for child in result.results)
        return cls(result.id, len(members), result.app, members)

    def __repr__(self) -> str:
        return f"<GroupExecution {self.id} of {self.total}>"

    def member(self, index: int) -> Execution:
        """The execution of one member, by its index in the group."""
        return Execution(self._known_members()[index], app=self.app)

    def _known_members(self) -> tuple[str, ...]:
        if not self._members and self.total:
            raise LookupError("this group was made without its members: use GroupExecution.of()")
        return self._members

    async def awatch(self) -> AsyncGenerator[GroupState, None]:
        """Yield the progress whenever it changes, until every member has ended.

        Workers with streams count their members. Members that no worker counted (they ran on
        another pool, were discarded, or the counter has expired) are looked up in the result
        backend: many in a call, with growing pauses, and only while the counter does not move. The
        lookup needs the members' ids: from `of`, or from a group result that was saved.
        """
        watcher = await watch_thread.watcher(self.app)
        count = await self._count()
        watch = _GroupWatch(watcher, self.id, count, self._ask() if count.members else None)
        async with aclosing(watch.states()) as states:
            async for state in states:
                yield state

    def watch(self) -> Iterator[GroupState]:
        """The blocking form of `awatch`."""
        return watch_thread.iterate(self.awatch)

    async def asnapshot(self) -> GroupState:
        """The progress now, with up to a thousand failures.

        From the group's counter; from the result backend if the counter has counted no member.
        """
        watcher = await watch_thread.watcher(self.app)
        progress = await watcher.store.read_group(self.id, count=1000)
        count, ask = await self._count(), self._ask()
        count.take(progress)
        if not progress.done and ask is not None:
            await _ask_missing(count, ask)
        return count.state()

    snapshot = blocking(asnapshot)

    async def _count(self) -> GroupCount:
        if not self._members:
            self._members = await asyncio.to_thread(self._saved_members)
        return GroupCount(self.total, self._members)

    def _saved_members(self) -> tuple[str, ...]:
        """The members of a saved group result, if their number is right. Chords save theirs."""
        saved = saved_group(self.app, self.id)
        members = tuple(child.id for child in saved.results) if saved is not None else ()
        return members if len(members) == self.total else ()

    def _ask(self) -> AskMany | None:
        return partial(stored_ends, self.app) if keeps_results(self.app) else None

    async def acancel(self, grace_s: float | None = None) -> dict[CancelAnswer, int]:
        """Cancel every member; the number of members for each answer."""
        answers: dict[CancelAnswer, int] = {"requested": 0, "pending": 0, "over": 0}
        for answer in (await cancel_all(self.app, self._known_members(), grace_s)).values():
            answers[answer] += 1
        return answers

    cancel = blocking(acancel)


class GroupCount:
    """The members of a group that have ended, by its counter and the result backend. No I/O.

    Workers with streams count each member once, by its index. A member that ran on another pool, or
    whose counter has expired, is in the result backend only. Without `members` only the counter is
    used.
    """

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
            if ended.outcome in _FAILED:
                self._add_failure(self.members[index], f"{ended.type}: {ended.message}")

    def _take_places(self, counted: bytes, done: int) -> None:
        """Take the members that the counter has counted; they no longer count as found."""
        if int.from_bytes(counted).bit_count() != done:
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


@dataclass(eq=False)
class _GroupWatch:
    """One watcher of one group: by its counter while that moves, else by the result backend."""

    watcher: ExecutionWatcher
    group_id: str
    count: GroupCount
    ask: AskMany | None
    """Looks up members that are not counted in the result backend."""

    def __post_init__(self) -> None:
        self._ringing = asyncio.Event()
        self._reported = -1
        self._time = asyncio.get_running_loop().time
        self._outage = BackendOutage()
        self._wait_s = _MIN_POLL_S
        self._poll_at = self._time() + _MIN_POLL_S

    async def states(self) -> AsyncGenerator[GroupState, None]:
        """Yield the progress whenever it changes, until every member has ended."""
        count = self.count
        channel = self.watcher.store.group_keys_of(self.group_id).channel
        async with self.watcher.ringing(channel, self._ringing):
            while True:
                self._ringing.clear()
                await self._read(which=count.has_backend_ends)
                if self.ask is not None and self._is_due():
                    await self._look_up(self.ask)
                # A counter that has expired does not take back progress that was reported.
                if count.done > self._reported or count.failures:
                    self._reported = max(count.done, self._reported)
                    yield count.state()
                if count.done >= count.total:
                    return
                wait_s = None if self.ask is None else self._poll_at - self._time()
                await wait_for_ring(self._ringing, wait_s)

    def _is_due(self) -> bool:
        """Whether members are missing and the count has not moved for long enough."""
        now = self._time()
        if self.count.done > self._reported:
            self._wait_s = _MIN_POLL_S
            self._poll_at = now + self._wait_s
        return now >= self._poll_at and self.count.done < self.count.total

    async def _read(self, *, which: bool) -> None:
        progress = None
        while progress is None or len(progress.failures) == _MAX_FAILURES:
            progress = await retry_while_unavailable(
                lambda: self.watcher.store.read_group(
                    self.group_id, self.count.after, _MAX_FAILURES, which=which
                ),
                MAX_OUTAGE_S,
            )
            self.count.take(progress)

    async def _look_up(self, ask: AskMany) -> None:
        """Look up members that are not counted, and set the time of the next lookup."""
        began = self._time()
        await self._read(which=True)
        known = self.count.done
        with self._outage.tolerated():
            await _ask_missing(self.count, ask)
        took_s = self._time() - began
        has_moved = self.count.done > known
        self._wait_s = _MIN_POLL_S if has_moved else min(_MAX_POLL_S, 2 * self._wait_s)
        self._poll_at = self._time() + max(self._wait_s, _SHARE * took_s)


async def _ask_missing(count: GroupCount, ask: AskMany) -> None:
    """Look up members that are not counted in the result backend."""
    missing = count.missing()
    for first in range(0, len(missing), _BATCH_SIZE):
        indexes = missing[first : first + _BATCH_SIZE]
        ends = await asyncio.to_thread(ask, [count.members[index] for index in indexes])
        count.add(indexes, ends)


def saved_group(app: Any, group_id: str) -> GroupResult | None:
    """The group result in the result backend, or None."""
    try:
        return GroupResult.restore(group_id, app=app)
    except Exception:  # noqa: BLE001  a backend that stores no groups may raise anything
        return None


def saved_groups(app: Any, ids: Sequence[str]) -> dict[str, GroupResult]:
    """The saved group results among the ids."""
    possible = [one for some in in_batches(ids) for one in _possible_groups(app.backend, some)]
    return {one: saved for one in possible if (saved := saved_group(app, one)) is not None}


def _possible_groups(backend: Any, ids: Sequence[str]) -> Sequence[str]:
    """The ids with a stored group, if the backend can read many at once; else all of them."""
    try:
        values = backend.mget([backend.get_key_for_group(one) for one in ids])
    except Exception:  # noqa: BLE001  a backend without these methods may raise anything
        return ids
    if not isinstance(values, list):
        return ids
    return [one for one, value in zip(ids, values, strict=True) if value is not None]
