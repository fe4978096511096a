"""Follow a group: by its counter while that moves, otherwise by the result backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from capsule_tasks.client.groups.group_count import Failure, GroupCount
from capsule_tasks.client.watching.watcher import MAX_OUTAGE_S, ExecutionWatcher, wait_for_ring
from capsule_tasks.protocol.events import Ended
from capsule_tasks.storage.drivers import retry_while_unavailable

_MIN_POLL_S = 1.0
_MAX_POLL_S = 15.0
_SHARE = 20
"""Lookups in the result backend take at most one part in so many of the time."""
_BATCH_SIZE = 200
"""Members that are looked up in one call; the backend answers with their results."""

_FAILURES = 100
"""Failures that are read in one call."""

AskMany = Callable[[Sequence[str]], Mapping[str, Ended]]
"""The ends that the result backend has stored for these ids."""


@dataclass(frozen=True, slots=True)
class Step:
    """The counts of a group, and its failures that were not reported before."""

    counts: dict[str, int]
    failures: tuple[Failure, ...]


class GroupWatch:
    """One watcher of one group."""

    def __init__(
        self,
        watcher: ExecutionWatcher,
        group_id: str,
        total: int,
        count: GroupCount,
        ask: AskMany | None,
    ) -> None:
        """With `ask`, members that are not counted are looked up in the result backend."""
        self._watcher = watcher
        self._group_id = group_id
        self._total = total
        self._count = count
        self._ask = ask if count.members else None
        self._ringing = asyncio.Event()
        self._failures: list[Failure] = []
        self._reported = -1
        self._loop = asyncio.get_running_loop()
        self._silent_since: float | None = None
        self._wait_s = _MIN_POLL_S
        self._poll_at = self._loop.time() + _MIN_POLL_S

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the progress whenever it changes, until every member has ended."""
        channel = self._watcher.store.core.group_keys_of(self._group_id).channel
        try:
            await self._watcher.bells.listen(channel, self._ring)
            while True:
                self._ringing.clear()
                await self._read(which=self._count.has_backend_ends)
                if self._ask is not None and self._is_due():
                    await self._look_up(self._ask)
                done = self._count.done
                # A counter that has expired does not take back progress that was reported.
                if done > self._reported or self._failures:
                    self._reported = max(done, self._reported)
                    step = Step(self._count.counts, tuple(self._failures))
                    self._failures = []
                    yield step
                if done >= self._total:
                    return
                wait_s = None if self._ask is None else self._poll_at - self._loop.time()
                await wait_for_ring(self._ringing, wait_s)
        finally:
            self._watcher.bells.leave(channel, self._ring)

    def _ring(self, _message: bytes | None) -> None:
        self._ringing.set()

    def _is_due(self) -> bool:
        """Whether members are missing and the count has not moved for long enough."""
        now = self._loop.time()
        if self._count.done > self._reported:
            self._wait_s = _MIN_POLL_S
            self._poll_at = now + self._wait_s
        return now >= self._poll_at and self._count.done < self._total

    async def _read(self, *, which: bool) -> None:
        progress = None
        while progress is None or len(progress.failures) == _FAILURES:
            progress = await retry_while_unavailable(
                lambda: self._watcher.store.read_group(
                    self._group_id, self._count.after, _FAILURES, which=which
                ),
                MAX_OUTAGE_S,
            )
            self._failures += self._count.take(progress)

    async def _look_up(self, ask: AskMany) -> None:
        """Look up members that are not counted, and set the time of the next lookup."""
        began = self._loop.time()
        await self._read(which=True)
        known = self._count.done
        try:
            self._failures += await ask_missing(self._count, ask)
            self._silent_since = None
        except Exception:
            # Any backend, any error: the backend may be unavailable.
            self._silent_since = self._silent_since or began
            if began - self._silent_since > MAX_OUTAGE_S:
                raise
        took_s = self._loop.time() - began
        has_moved = self._count.done > known
        self._wait_s = _MIN_POLL_S if has_moved else min(_MAX_POLL_S, 2 * self._wait_s)
        self._poll_at = self._loop.time() + max(self._wait_s, _SHARE * took_s)


async def ask_missing(count: GroupCount, ask: AskMany) -> list[Failure]:
    """Look up members that are not counted in the result backend; the failures among them."""
    failures: list[Failure] = []
    missing = count.missing()
    for first in range(0, len(missing), _BATCH_SIZE):
        indexes = missing[first : first + _BATCH_SIZE]
        ends = await asyncio.to_thread(ask, [count.members[index] for index in indexes])
        failures += count.add(indexes, ends)
    return failures
