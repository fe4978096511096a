"""HistoryWriter: stores the items of a realtime session in its history, in the background."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from msgspec.structs import replace

from capsule_tasks.errors import InvalidSetting, ItemNotStorable, ItemTooLarge
from capsule_tasks.realtime.conversation.versions import Correction
from capsule_tasks.runs.conversation import Conversation, View, conversation_of
from capsule_tasks.runs.items import digest
from capsule_tasks.runs.preparing import prepare_input_with_session
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage.awaiting import to_the_end

CORRECTABLE = 50
"""How many of the latest items an interruption may correct."""
OPERATION_KNOWN_S = 300.0
"""How long a repeat of a write is surely known to Redis, which remembers for ten minutes."""


class _Batch(NamedTuple):
    """Items that are written in one step, maybe repeatedly."""

    items: list[Item]
    operation_id: str
    began_at: float
    is_repeat: bool = False


class HistoryWriter:
    """Stores items in order, a batch at a time; without a history, it keeps them for the state.

    A write that fails is reported once, and made again with the next items, or by `flush`. Its
    items are stored once, even if it had been done and only the answer was lost.
    """

    def __init__(
        self, history: Any | None, state: RunState | None, report: Callable[[Exception], None]
    ) -> None:
        self._history = None if history is None else _Awaited(history)
        self._state = state
        self._report = report
        self._conversation = Conversation(seen=View([]), has_history=history is not None)
        """What is stored of the conversation, without the items."""
        self._held: list[Item] = []
        """Items that are not stored."""
        self._corrections: list[Correction] = []
        self._recent: list[Item] = []
        """The latest items that were stored, among which an item can be corrected."""
        self._refused: list[Item] = []
        """Items that the history does not take; others are stored without them."""
        self._refusal: Exception | None = None
        self._batch: _Batch | None = None
        """The first of the held items, while they are written, or if that has failed."""
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    async def begin(self) -> tuple[Item, ...]:
        """Read the history: the items that the model is to be told."""
        if self._state is None:
            prepared = await prepare_input_with_session([], self._history)
            return tuple(prepared.input)
        if self._state.conversation is not None:
            must = "that of a run whose items are in its history, or in the state"
            raise InvalidSetting("state", self._state.run_id, must)
        begun = await conversation_of(self._state, self._history, refuse_made=True)
        items = tuple(begun.view)
        self._conversation = replace(begun, seen=View([]), new=())
        self.add(begun.new)
        return items

    def add(self, items: Sequence[Item]) -> None:
        """Store items after those that were added before, soon."""
        if items:
            self._held += items
            self._start()

    def correct(self, corrections: Sequence[Correction]) -> None:
        """Put corrected items in the place of stored ones, soon.

        Histories that cannot replace items keep what they have.
        """
        self._corrections += corrections
        self._start()

    async def flush(self) -> None:
        """Wait until all items are stored. Raises the error if that fails; it may be repeated.

        A cancel waits for the end of the write.
        """
        if self._history is not None:
            await to_the_end(self._flush(self._history))

    def in_state(self, state: RunState) -> RunState:
        """The state with the place of the session's items in the history, or with the items.

        It is to be called after `flush`: items that are not stored are in the state, from where
        they are stored by whoever goes on.
        """
        held = (*self._held, *self._refused)
        after = replace(self._conversation, new=held).in_state(state)
        has_items = held or after.stored_items
        return replace(after, turn=max(1, after.turn)) if has_items else after

    # --- writing ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._history is None:
            for correction in self._corrections:
                _replace(self._held, correction)
            self._corrections.clear()
        elif self._task is None and (self._held or self._corrections):
            self._task = asyncio.ensure_future(self._write_in_background(self._history))

    async def _write_in_background(self, history: _Awaited) -> None:
        refused_before = len(self._refused)
        try:
            await self._write(history)
        except Exception as error:  # noqa: BLE001  reported, and raised by `flush` if it stays
            if not self._is_failing:
                self._is_failing = True
                self._report(error)
        finally:
            self._task = None
        if self._refusal is not None and len(self._refused) > refused_before:
            self._report(self._refusal)

    async def _flush(self, history: _Awaited) -> None:
        while self._task is not None:
            await asyncio.wait({self._task})
        self._held, self._refused = [*self._held, *self._refused], []
        self._refusal = None
        while self._held or self._corrections:
            self._task = asyncio.ensure_future(self._write(history))
            try:
                await self._task
            finally:
                self._task = None
        if self._refusal is not None:
            raise self._refusal

    async def _write(self, history: _Awaited) -> None:
        """Write the held items, and those that are added meanwhile; then correct stored ones."""
        while self._held or self._corrections:
            if not self._held:
                await self._correct(history)
                continue
            if self._batch is None:
                self._batch = _Batch(list(self._held), uuid4().hex, time.monotonic())
            batch = self._batch
            self._batch = batch._replace(is_repeat=True)
            try:
                await history.add(batch)
            except (ItemNotStorable, ItemTooLarge) as error:
                # Nothing of the batch was stored, and the item would be refused again.
                self._batch = None
                self._refused.append(self._held.pop(error.index))
                self._refusal = error
                continue
            self._batch, self._is_failing = None, False
            del self._held[: len(batch.items)]
            self._recent = [*self._recent, *batch.items][-CORRECTABLE:]
            self._conversation = replace(self._conversation, new=tuple(batch.items)).stored()

    async def _correct(self, history: _Awaited) -> None:
        correction, recent = self._corrections[0], list(self._recent)
        if _replace(recent, correction) and await history.correct(correction):
            before = self._conversation
            count = before.stored_items + len(recent) - len(self._recent)
            first = digest(recent[0]) if recent else None
            self._recent = recent
            self._conversation = replace(
                before,
                stored_items=count,
                first_item=first if count == len(recent) else before.first_item,
                last_item=digest(recent[-1]) if recent else None,
            )
        self._is_failing = False
        del self._corrections[0]


def _replace(items: list[Item], correction: Correction) -> bool:
    """Correct the latest such item, if there is one."""
    for at in range(len(items) - 1, -1, -1):
        if items[at] == correction.stored:
            items[at : at + 1] = [] if correction.now is None else [correction.now]
            return True
    return False


class _Awaited:
    """A history that is awaited, whichever kind it is: one that blocks is called in a thread."""

    def __init__(self, history: Any) -> None:
        self._history = history
        self.session_settings = getattr(history, "session_settings", None)
        parameters = inspect.signature(history.add_items).parameters
        self._has_operations = "operation_id" in parameters

    async def get_items(self, limit: int | None = None) -> list[Item]:
        items: list[Item] = await _called(self._history.get_items, limit)
        return items

    async def add(self, batch: _Batch) -> None:
        """Add the items of a batch, unless they were added by an earlier attempt."""
        is_known = time.monotonic() - batch.began_at < OPERATION_KNOWN_S
        if (
            batch.is_repeat
            and not (self._has_operations and is_known)
            and await self.get_items(len(batch.items)) == batch.items
        ):
            return
        if self._has_operations:
            await _called(self._history.add_items, batch.items, operation_id=batch.operation_id)
        else:
            await _called(self._history.add_items, batch.items)

    async def correct(self, correction: Correction) -> bool:
        """Replace an item in one step, if it is still there; whether the history can do that."""
        if not (hasattr(self._history, "read") and hasattr(self._history, "replace")):
            return False
        for limit in (2, 2 * CORRECTABLE):
            snapshot = await _called(self._history.read, limit)
            items = list(snapshot.items)
            if _replace(items, correction):
                await _called(self._history.replace, snapshot.version, items)
                break
        return True


async def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    answer = await asyncio.to_thread(method, *args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer
