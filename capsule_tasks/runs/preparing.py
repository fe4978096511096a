"""The first input of a run's model, and the items of it that the history does not have yet.

The two are different lists of the same items. A callback or a limit narrows what the model sees;
the history keeps everything that a run adds to it.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.items import (
    deduplicated,
    digest,
    for_history,
    for_model,
    identity,
    normalized,
    without_orphans,
)
from capsule_tasks.runs.records import Item

SessionInputCallback = Callable[[list[Item], list[Item]], list[Any] | Awaitable[list[Any]]]
"""Makes the model's input of the items in the history and the new ones; it may change both."""

Origin = Literal["history", "new", "made"]

_CALLBACK = "session_input_callback"
_read_copies = msgspec.json.Decoder(list[Item]).decode


class ReadableHistory(Protocol):
    """The part of a `History` or a `SyncHistory` that is read here."""

    def get_items(self, limit: int | None = None) -> Awaitable[list[Item]] | list[Item]: ...


class Prepared(NamedTuple):
    """The first input of a model in a run, and the items of it that the history does not have."""

    input: list[Item]
    to_store: list[Item]


async def prepare_input_with_session(
    given: str | Iterable[Any],
    history: ReadableHistory | Sequence[Item] | None,
    callback: SessionInputCallback | None = None,
    *,
    limit: int | None = None,
) -> Prepared:
    """The model's input, and the items to store, for a run that begins with `given`.

    `history` is a history or its items, of which the latest `limit` count. Calls and outputs in it
    that have no counterpart are left out of the input.

    `callback(history, new)`, sync or async, returns the items that the model sees. It gets copies,
    which it may change, copy, order, repeat or leave out. No item of the history is stored again,
    whatever becomes of it. Of the new items those are stored that it has kept, as it has changed
    them. Items of its own making are only for the model, but for one that stands in for a new item
    of the same kind that it has left out.
    """
    found = await prepared_with_duplicates(given, history, callback, limit)
    return found._replace(input=deduplicated(found.input))


async def prepared_with_duplicates(
    given: str | Iterable[Any],
    history: ReadableHistory | Sequence[Item] | None,
    callback: SessionInputCallback | None,
    limit: int | None,
) -> Prepared:
    """The same, with older versions of items in the input, which a `View` leaves out."""
    before = await items_of(history, limit)
    new = _without_known(normalized(given), before)
    if callback is None:
        seen = [*before, *new]
        origins = cast("list[Origin]", ["history"] * len(before) + ["new"] * len(new))
    else:
        seen, origins = await _called_back(callback, before, new)
    own = [at for at, origin in enumerate(origins) if origin != "history"]
    shown = without_orphans(for_model(seen), keep=own)
    kept = [item for item, origin in zip(seen, origins, strict=True) if origin == "new"]
    return Prepared(shown, deduplicated(for_history(kept)))


async def items_of(
    history: ReadableHistory | Sequence[Item] | None, limit: int | None
) -> list[Item]:
    """The latest `limit` items of a history, or of a list of items."""
    if history is None:
        return []
    if isinstance(history, Sequence):
        return list(history) if limit is None else list(history[max(0, len(history) - limit) :])
    items = history.get_items(limit)
    return await items if inspect.isawaitable(items) else items


def _without_known(new: list[Item], before: list[Item]) -> list[Item]:
    """The new items without those that the history has under the same id, and just the same."""
    if not any(identity(item) for item in new):
        return new
    known = {key: item for item in before if (key := identity(item)) is not None}
    stored = for_history(new)
    return [
        item
        for item, as_stored in zip(new, stored, strict=True)
        if (key := identity(item)) is None or known.get(key) != as_stored
    ]


async def _called_back(
    callback: SessionInputCallback, before: list[Item], new: list[Item]
) -> tuple[list[Item], list[Origin]]:
    """The items that a callback makes of the history and the new ones, each with its origin."""
    old_copies, new_copies = _copies(before), _copies(new)
    answer: Any = callback(list(old_copies), list(new_copies))
    if inspect.isawaitable(answer):
        answer = await answer
    if not isinstance(answer, list):
        must = f"a function that returns a list of items; it returned {type(answer).__name__}"
        raise InvalidSetting(_CALLBACK, callback, must)
    seen = normalized(answer, name=f"the list of {_CALLBACK}")
    return seen, _origins(answer, seen, (before, old_copies), (new, new_copies))


def _copies(items: list[Item]) -> list[Item]:
    try:
        return _read_copies(msgspec.json.encode(items))
    except (TypeError, ValueError, OverflowError):
        return copy.deepcopy(items)


def _origins(
    answer: list[Any],
    seen: list[Item],
    history: tuple[list[Item], list[Item]],
    new: tuple[list[Item], list[Item]],
) -> list[Origin]:
    """Where each item of a callback's answer comes from; `seen` are its items, normalized.

    Of the history and the new items there are the originals and the copies that the callback got.
    An item is "made" if it is the callback's own, or if it repeats a new one. Each new item is
    looked for by its object, then by what it says, then by its kind: no new item is lost because
    it was rebuilt, or because it says the same as an item of the history.
    """
    of_history = {id(each) for each in history[1]}
    new_index = {id(each): index for index, each in enumerate(new[1])}
    missing = dict(enumerate(new[0]))
    origins: list[Origin | None] = []
    for each in answer:
        if (index := new_index.get(id(each))) is not None:
            origins.append("made" if missing.pop(index, None) is None else "new")
        else:
            origins.append("history" if id(each) in of_history else None)
    unknown = [at for at in reversed(range(len(seen))) if origins[at] is None]
    if not unknown:
        return cast("list[Origin]", origins)
    copies = _matched(unknown, missing, seen, lambda item: (digest(item),))
    rebuilt = copies | _matched(
        [at for at in unknown if at not in copies], missing, seen, _meanings
    )
    of_old = {name for item in history[0] for name in _meanings(item)}
    of_new = {name for item in new[0] for name in _meanings(item)}
    strangers = []
    for at in unknown:
        names = _meanings(seen[at])
        if at in rebuilt:
            origins[at] = "new"
        elif not of_old.isdisjoint(names):
            origins[at] = "history"
        elif of_new.isdisjoint(names):
            strangers.append(at)
    for at in _matched(strangers, missing, seen, _kind):
        origins[at] = "new"
    return [origin or "made" for origin in origins]


def _matched(
    places: list[int],
    missing: dict[int, Item],
    seen: list[Item],
    names_of: Callable[[Item], tuple[str, ...]],
) -> set[int]:
    """Those of the places whose item shares a name with a missing one, the later ones first.

    Each missing item is found once, and is taken out of `missing`.
    """
    by_name = defaultdict[str, list[int]](list)
    for index, item in missing.items():
        for name in names_of(item):
            by_name[name].append(index)
    found = set()
    for at in places:
        indexes = [i for name in names_of(seen[at]) for i in by_name[name] if i in missing]
        if indexes:
            del missing[indexes[-1]]
            found.add(at)
    return found


def _meanings(item: Item) -> tuple[str, ...]:
    """Names that an item shares with one that says the same: its identity, and its content."""
    [sent] = for_model([item], keep_ids=False) or [item]
    if sent.get("type") == "message":
        sent = {key: value for key, value in sent.items() if key != "type"}
    match sent.get("content"):
        case [{"type": "input_text" | "output_text", "text": str(text)}]:
            sent = {**sent, "content": text}
    own = identity(item)
    return (digest(sent),) if own is None else (own, digest(sent))


def _kind(item: Item) -> tuple[str, ...]:
    return (f"{item.get('type') or 'message'} {item.get('role')}",)
