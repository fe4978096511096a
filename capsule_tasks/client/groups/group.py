"""`GroupExecution`: watch, count and cancel a Celery group as one execution."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.result import GroupResult

from capsule_tasks.client.cancelling import CancelAnswer, cancel_all, check_type
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.groups.counting import AskMany, GroupWatch, ask_missing
from capsule_tasks.client.groups.group_count import Failure, GroupCount
from capsule_tasks.client.watching.results import keeps_results, stored_ends
from capsule_tasks.client.watching.streaming import current_app
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.client.watching.watcher import in_batches
from capsule_tasks.protocol.events import Outcome


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
        return sum(self.counts.get(outcome, 0) for outcome in (Outcome.FAILED, Outcome.LOST))

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
        self.app = app if app is not None else current_app()
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
        backend: many in a call, ever more seldom, and only while the counter does not move. The
        lookup needs the members' ids: from `of`, or from a group result that was saved.
        """
        watcher = await watch_thread.watcher(self.app)
        count = await self._count()
        steps = GroupWatch(watcher, self.id, self.total, count, self._ask()).steps()
        try:
            async for step in steps:
                yield GroupState(self.total, step.counts, step.failures)
        finally:
            await steps.aclose()

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
        failures = count.take(progress)
        if not progress.done and ask is not None:
            failures += await ask_missing(count, ask)
        return GroupState(self.total, count.counts, tuple(failures))

    def snapshot(self) -> GroupState:
        return watch_thread.call(self.asnapshot())

    async def _count(self) -> GroupCount:
        if not self._members:
            self._members = await asyncio.to_thread(self._saved_members)
        return GroupCount(self._members)

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

    def cancel(self, grace_s: float | None = None) -> dict[CancelAnswer, int]:
        return watch_thread.call(self.acancel(grace_s))


def saved_group(app: Any, group_id: str) -> GroupResult | None:
    """The group result in the result backend, or None."""
    try:
        return GroupResult.restore(group_id, app=app)
    except Exception:  # noqa: BLE001  a backend that stores no groups may raise anything
        return None


def saved_groups(app: Any, ids: Sequence[str]) -> dict[str, GroupResult]:
    """The saved group results among the ids."""
    found: dict[str, GroupResult] = {}
    for some in in_batches(ids):
        for one in _possible_groups(app.backend, some):
            if (saved := saved_group(app, one)) is not None:
                found[one] = saved
    return found


def _possible_groups(backend: Any, ids: Sequence[str]) -> Sequence[str]:
    """The ids with a stored group, if the backend can read many at once; else all of them."""
    try:
        values = backend.mget([backend.get_key_for_group(one) for one in ids])
    except Exception:  # noqa: BLE001  a backend without these methods may raise anything
        return ids
    if not isinstance(values, list):
        return ids
    return [one for one, value in zip(ids, values, strict=True) if value is not None]
