"""Compaction of a history: when it is due, and the one step that replaces the old items.

What is authoritative is the history. It is read with its version, the compactor makes something
shorter of the old items, and one script replaces exactly those. Items that others append meanwhile
stay behind the replacement. If any item was removed meanwhile, nothing is replaced. A failure or a
cancel at any moment leaves the history as it was, or, once the script ran, as it should be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Literal, TypeVar

import msgspec

from capsule_tasks.errors import CompactionFailed, HistoryConflict, InvalidSetting
from capsule_tasks.runs.compaction.compactors import Compactor, OldItems
from capsule_tasks.runs.compaction.cutting import (
    Cut,
    cut,
    has_halves,
    is_compaction,
    is_waiting,
    size_of,
)
from capsule_tasks.runs.items import for_history, for_model, without_orphans
from capsule_tasks.runs.models import Model, ModelReply
from capsule_tasks.runs.records import Item, Spent
from capsule_tasks.settings import Count, check_value
from capsule_tasks.storage import History, Snapshot, SyncHistory, Version

T = TypeVar("T")
Outcome = Literal["replaced", "waiting", "nothing", "not_smaller", "conflict", "failed"]


@dataclass(frozen=True, kw_only=True)
class CompactionReport:
    """The outcome of a compaction. Only `replaced` has changed the history.

    - `replaced`: `items` are now in the place of the old items;
    - `waiting`: tool calls of the latest reply wait for their outputs, or the compactor for more;
    - `nothing`: there are no old items that were not compacted before;
    - `not_smaller`: what the compactor made is as large as the old items;
    - `conflict`: items were removed from the history meanwhile;
    - `failed`: the compactor or the store failed, with `error`.
    """

    outcome: Outcome
    items: list[Item] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    """The usage of the compactor, also if its items were not taken."""
    replaced_items: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: str | None = None

    @property
    def is_replaced(self) -> bool:
        return self.outcome == "replaced"

    def events(self) -> Iterator[tuple[str, Any]]:
        """The kinds and the data of the events of a run: its new items, and what came of it."""
        for item in self.items:
            yield "item", item
        names = ("outcome", "replaced_items", "bytes_before", "bytes_after", "error")
        found = {name: value for name in names if (value := getattr(self, name))}
        yield "compaction", found | {"spent": msgspec.to_builtins(self.spent)}


@dataclass(frozen=True)
class Chain:
    """A response that the model's server has stored, with the history as its input and output."""

    response_id: str
    items: int
    """How many items the history then had."""
    last: Item
    """The last of them, in the form for models."""
    model: Model | None = None
    """The model that gave it; only its server knows the response."""

    def is_of(self, items: Sequence[Item]) -> bool:
        return len(items) == self.items and for_model(items[-1:]) == [self.last]


async def compact(
    history: History | SyncHistory,
    compactor: Compactor,
    *,
    keep_last: int | None = None,
    chain: Chain | None = None,
) -> CompactionReport:
    """Replace the old items of a history by what a compactor makes of them, in one step.

    The last `keep_last` items stay. An error of the compactor or the store is raised, and has
    changed nothing.
    """
    check_history(history)
    plan = _planned(await _done(history.read()), kept_by(compactor, keep_last), chain)
    if isinstance(plan, CompactionReport):
        return plan
    report = plan.judged(await compactor.compacted(plan.old))
    if report.is_replaced:
        try:
            await _done(history.replace(plan.version, [*report.items, *plan.cut.waiting]))
        except HistoryConflict:
            return CompactionReport(outcome="conflict", spent=report.spent)
    return report


def compact_sync(
    history: SyncHistory, compactor: Compactor, *, keep_last: int | None = None
) -> CompactionReport:
    """`compact` for callers that block. The compactor gets an event loop of its own."""
    return asyncio.run(compact(history, compactor, keep_last=keep_last))


async def _done(called: Awaitable[T] | T) -> T:
    """The result of a method of a History, or of a SyncHistory."""
    return await called if isawaitable(called) else called


@dataclass(frozen=True)
class _Plan:
    cut: Cut
    old: OldItems
    version: Version
    """The version of the items that are replaced, and of no others."""

    def judged(self, reply: ModelReply | None) -> CompactionReport:
        """Whether what the compactor made goes in the place of the old items."""
        if reply is None:
            return CompactionReport(outcome="waiting")
        made = for_history(reply.items)
        if not any(map(is_compaction, made)):
            reason = "a compactor made no summary_message and no `compaction` item"
            raise CompactionFailed(reason)
        if has_halves(made):
            raise CompactionFailed("a compactor made a call without its output, or half of that")
        before, after = size_of(self.cut.old), size_of(made)
        is_smaller = after < before
        return CompactionReport(
            outcome="replaced" if is_smaller else "not_smaller",
            items=made if is_smaller else [],
            spent=reply.spent,
            replaced_items=len(self.cut.old) if is_smaller else 0,
            bytes_before=before,
            bytes_after=after,
        )


def _planned(snapshot: Snapshot, keep_last: int, chain: Chain | None) -> _Plan | CompactionReport:
    items = snapshot.items
    if is_waiting(items):
        return CompactionReport(outcome="waiting")
    found = cut(items, keep_last)
    if found is None:
        return CompactionReport(outcome="nothing")
    is_whole = found.stop == len(items) and not found.waiting
    known = chain if chain is not None and is_whole and chain.is_of(items) else None
    old = OldItems(
        for_model(without_orphans(found.old)),
        response_id=known.response_id if known else None,
        model=known.model if known else None,
    )
    return _Plan(found, old, _version_until(snapshot, found.stop))


def _version_until(snapshot: Snapshot, stop: int) -> Version:
    """The version of the first items only, with the unreadable records among them."""
    version = snapshot.version
    if stop == len(snapshot.items):
        return version
    corrupt = set(version.corrupt)
    readable = [at for at in range(version.start, version.stop) if at not in corrupt]
    end = readable[stop]
    return version._replace(stop=end, corrupt=tuple(at for at in version.corrupt if at < end))


def kept_by(compactor: Compactor, keep_last: int | None) -> int:
    check_value("keep_last", keep_last, Count | None)
    return compactor.keep_last if keep_last is None else keep_last


def check_history(history: History | SyncHistory) -> None:
    """Refuse a subclass with items of its own form, which reading and replacing would bypass."""
    for kind in (History, SyncHistory):
        if isinstance(history, kind):
            same = (type(history).get_items, type(history).add_items)
            if same == (kind.get_items, kind.add_items):
                return
    must = (
        "a History (compact) or SyncHistory (compact_sync) with the get_items and add_items of it"
    )
    raise InvalidSetting("history", history, must)
