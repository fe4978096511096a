"""Conversation: what a run's model sees, in the memory of the process that makes the turns.

The history keeps all items of a run. The model's view of them is kept here, so that a turn costs
what its new items cost, however long the history is. A process that takes a run over makes the same
view again of the history and the `RunState`, and sees what others have appended meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from capsule_tasks.errors import InvalidRunState, InvalidSetting
from capsule_tasks.runs.compaction.cutting import is_compaction
from capsule_tasks.runs.items import (
    RunningDigest,
    call_id_of,
    deduplicated,
    digest,
    for_history,
    for_model,
    identity,
    kind_of,
    normalized,
    without_orphans,
)
from capsule_tasks.runs.preparing import (
    ReadableHistory,
    SessionInputCallback,
    items_of,
    prepared_with_duplicates,
)
from capsule_tasks.runs.records import FilteredInput, Item
from capsule_tasks.runs.state import RunState, ServerConversation
from capsule_tasks.storage.history.types import limit_of

_MORE_THAN_ANY_HISTORY = 2**31
"""A limit of None would be that of the history's settings."""


class View:
    """A list of items of which another view may be the beginning; both share the items.

    Making a longer view costs what the new items cost. Views are not changed.
    """

    __slots__ = ("_count", "_digest", "_keys", "_shared")

    def __init__(
        self,
        items: list[Item],
        keys: set[str] | None = None,
        running_digest: RunningDigest | None = None,
    ) -> None:
        """A view of the list, which may grow; keys and digest may be of a view of its beginning.

        Without keys, older versions of the same items are left out.
        """
        if keys is None:
            found = _keys_of(items)
            if len(keys := set(found)) < len(found):
                items = deduplicated(items)
        self._shared = items
        self._count = len(items)
        self._keys = keys
        self._digest = running_digest or RunningDigest()

    @property
    def items(self) -> list[Item]:
        """The items in a new list. The items themselves are not to be changed."""
        return self._shared[: self._count]

    @property
    def digest(self) -> str:
        """A digest of the items; costs what those cost that came after the last digest."""
        if self._digest.count > self._count:
            self._digest = RunningDigest()
        self._digest.update(islice(self._shared, self._digest.count, self._count))
        return self._digest.hexdigest()

    def __len__(self) -> int:
        return self._count

    def since(self, start: int) -> list[Item]:
        """The items from this index on, in a new list; costs what they cost."""
        return self._shared[start : self._count]

    def with_items(self, items: Sequence[Item]) -> View:
        """The view with more items, each in place of an older version of itself."""
        keys = _keys_of(items)
        if len(set(keys)) < len(keys) or not self._keys.isdisjoint(keys):
            return View([*self.items, *items])
        if len(self._shared) > self._count:
            # The view of another turn has put its own items behind these.
            return View([*self.items, *items])
        self._shared.extend(items)
        self._keys.update(keys)
        return View(self._shared, self._keys, self._digest)


def _keys_of(items: Iterable[Item]) -> list[str]:
    return [key for item in items if (key := identity(item)) is not None]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The model's view of a run, and the run's items that are not stored yet."""

    seen: View
    new: tuple[Item, ...] = ()
    """The run's items that are not stored, unfiltered and in order."""
    has_history: bool = False
    """Whether a history stores the run's items; else the run's state keeps them."""
    server: ServerConversation | None = None
    """The position in a conversation that the model's server keeps, if there is one."""
    filtered: FilteredInput | None = None
    """The view that a callback or a filter has made; the run's later items follow it."""
    stored_items: int = 0
    first_item: str | None = None
    """The digests of the run's first and last stored items."""
    last_item: str | None = None

    @property
    def view(self) -> list[Item]:
        """The items that the model sees, in a new list. The items are not to be changed."""
        return self.seen.items

    @property
    def digest(self) -> str:
        """A digest of the view; costs what the items cost that came after the last digest."""
        return self.seen.digest

    def with_turn(
        self, items: Sequence[Item], *, replied: int = 0, response_id: str | None = None
    ) -> Conversation:
        """The conversation with more items of the run: replies of its model, outputs of its tools.

        Where the model's server keeps the conversation, it knows the first `replied` of the items,
        which are its reply, and all that was sent for it: the model is not sent them again.
        """
        new = (*self.new, *deduplicated(for_history(items)))
        server, seen = self.server, self.seen
        if server is not None and replied and (server.conversation_id or response_id):
            server = replace(
                server,
                previous_response_id=None if server.conversation_id else response_id,
                acknowledged_items=server.acknowledged_items + len(seen) + replied,
            )
            items, seen = items[replied:], View([])
        return replace(self, seen=seen.with_items(for_model(items)), new=new, server=server)

    def with_view(self, items: Iterable[Any]) -> Conversation:
        """The conversation in which the model sees these items in place of its view so far.

        The items to store stay the same. Calls without outputs, and the reverse, are left out.
        """
        seen = View(without_orphans(for_model(normalized(items, name="the filtered input"))))
        after = replace(self, seen=seen)
        return replace(after, filtered=after.as_filtered())

    def as_filtered(self) -> FilteredInput:
        """The view as a state keeps it, where it cannot be made again of the history."""
        return FilteredInput(
            items=self.view,
            stands_for=self.stored_items + len(self.new),
            last_item=digest(self.new[-1]) if self.new else self.last_item,
        )

    def stored(self) -> Conversation:
        """The conversation once its new items are in the history."""
        if not self.has_history or not self.new:
            return self
        return replace(
            self,
            new=(),
            stored_items=self.stored_items + len(self.new),
            first_item=self.first_item if self.stored_items else digest(self.new[0]),
            last_item=digest(self.new[-1]),
        )

    def in_state(self, state: RunState) -> RunState:
        """The state with all that another process needs to make the same view.

        To be called once the conversation is `stored`, if there is a history. Without one, the
        state holds the items of the run.
        """
        return replace(
            state,
            input="",
            stored_items=self.stored_items,
            first_item=self.first_item,
            last_item=self.last_item,
            held_items=list(self.new) if self.server is None else self.view,
            filtered_input=self.filtered,
            conversation=self.server,
        )


async def conversation_of(
    state: RunState,
    history: ReadableHistory | Sequence[Item] | None = None,
    *,
    callback: SessionInputCallback | None = None,
    limit: int | None = None,
    refuse_made: bool = False,
) -> Conversation:
    """The conversation of a run that begins, or of one that this process has not seen yet.

    `history` is that of the run's session, or its items; None for a run without a session. A run
    that begins is prepared with `callback`. `limit` is the number of items from before the run that
    the model sees; by default that of the history's settings.

    Raises InvalidSetting for a history together with a conversation that the model's server keeps.
    With `refuse_made`, raises InvalidRunState for a state that was gone on from before: the history
    has outputs of its calls.
    """
    if state.conversation is not None:
        if history is not None:
            must = "None, since the model's server keeps the items of this run's conversation"
            raise InvalidSetting("session", history, must)
        is_begun = state.turn or state.conversation.acknowledged_items
        items = state.held_items or ([] if is_begun else normalized(state.input or []))
        return Conversation(
            seen=View(for_model(items)), new=tuple(for_history(items)), server=state.conversation
        )
    if not (state.turn or state.stored_items or state.held_items):
        given = state.input or []
        prepared = await prepared_with_duplicates(given, history, callback, limit)
        begun = Conversation(
            seen=View(prepared.input),
            new=tuple(prepared.to_store),
            has_history=history is not None,
        )
        return begun if callback is None else replace(begun, filtered=begun.as_filtered())
    if history is None:
        return _resumed(state, None, None)
    if limit is None and not isinstance(history, Sequence):
        limit = limit_of(getattr(history, "session_settings", None))
    if limit is None:
        stored = await items_of(history, None)
    else:
        stored = await items_of(history, limit + state.stored_items)
        if not _ends_with_run(stored, state):
            # Others have appended items meanwhile, or the run's were compacted.
            stored = await items_of(history, _MORE_THAN_ANY_HISTORY)
    if refuse_made:
        _check_unmade(stored, state)
    return _resumed(state, stored, limit)


def _check_unmade(stored: list[Item], state: RunState) -> None:
    """Refuse a state with a call whose output came after the run's last item.

    An output that came with its call is that of another run, whose model uses the same ids.
    """
    waiting = {call.call_id for call in state.calls}
    if not waiting or state.last_item is None:
        return
    end = _behind(stored, state.last_item, state.stored_items, len(stored))
    later = [] if end is None else stored[end:]
    calls = {call_id_of(item) for item in later if kind_of(item) == "function_call"}
    for item in later:
        call_id = call_id_of(item)
        if kind_of(item) == "function_call_output" and call_id in waiting - calls:
            why = f"call {call_id!r:.100} was made since: the history has its output"
            raise InvalidRunState("$.calls", why)


def _resumed(state: RunState, stored: list[Item] | None, limit: int | None) -> Conversation:
    """The conversation of a run that has made turns; `stored` are the items of its history."""
    filtered, own = state.filtered_input, state.held_items
    first: list[Item] = [] if filtered is None else filtered.items
    if stored is None:
        later = own if filtered is None else own[filtered.stands_for :]
    elif (begin := _begin_of_view(stored, state, limit)) is not None:
        later = stored[begin:]
    else:
        # The run's items were compacted: the history is what there is to see.
        first, filtered, later = [], None, stored
    seen = without_orphans(
        for_model([*first, *later]),
        pending={call.call_id for call in state.calls},
        keep=range(len(first)),
    )
    return Conversation(
        seen=View(seen),
        new=tuple(own),
        has_history=stored is not None,
        filtered=filtered,
        stored_items=state.stored_items,
        first_item=state.first_item,
        last_item=state.last_item,
    )


def _ends_with_run(stored: list[Item], state: RunState) -> bool:
    """Whether the run's items are the last ones, so that those before them are at hand too."""
    count = state.stored_items
    if not 0 < count <= len(stored):
        return False
    return [digest(stored[-count]), digest(stored[-1])] == [state.first_item, state.last_item]


def _begin_of_view(stored: list[Item], state: RunState, limit: int | None) -> int | None:
    """The index in the history of the first item that the model sees as it is.

    None if the history no longer has the items of the run. The run's last item is looked for, and
    the last one that a filtered view stands for: others may have appended items between them.
    """
    filtered, count = state.filtered_input, state.stored_items
    end: int | None = len(stored)
    if state.last_item is not None:
        end = _behind(stored, state.last_item, count, len(stored))
    if end is None or end < count:
        return None
    if filtered is None:
        if limit is None:
            return 0
        first = state.first_item and _behind(stored, state.first_item, 1, end - count + 1)
        return max(0, (first - 1 if first else end - count) - limit)
    if any(map(is_compaction, stored[end - count : end])):
        # Items of the run were compacted, and other items are found in their place.
        return None
    begin = end - (count - filtered.stands_for)
    if filtered.last_item is None:
        return begin
    return _behind(stored, filtered.last_item, filtered.stands_for, begin)


def _behind(items: list[Item], wanted: str, at_least: int, at_most: int) -> int | None:
    """The index behind the latest item with this digest, if it is within the bounds."""
    for end in range(at_most, max(at_least, 1) - 1, -1):
        if digest(items[end - 1]) == wanted:
            return end
    return None
