"""HistoryWriter: stores the items of a realtime session in its history, in the background."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from capsule_tasks.errors import HistoryNoAnswer, InvalidSetting, ItemNotStorable, ItemTooLarge
from capsule_tasks.realtime.conversation.versions import Correction
from capsule_tasks.runs.conversation import Conversation, View, conversation_of
from capsule_tasks.runs.engine.waiting import is_ended_by
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState

CORRECTABLE = 50
"""How many of the history's latest items an interruption may correct."""


class HistoryWriter:
    """Stores items in order, a batch at a time; without a history, it keeps them for the state.

    A write that fails is reported once, and made again with the next items, or by `flush`. The
    repeat has the same operation id: a `History` stores nothing twice, even if the first write was
    done and only the answer was lost.
    """

    def __init__(
        self, history: Any | None, state: RunState, report: Callable[[Exception], None]
    ) -> None:
        self._history: Any = history
        self._state = state
        self._report = report
        self._before = Conversation(seen=View([]), has_history=history is not None)
        """The stored part of the conversation that the session goes on with, without its items."""
        self._stored: list[Item] = []
        """The items that this session has stored."""
        self._held: list[Item] = []
        """Items that are not stored yet."""
        self._corrections: list[Correction] = []
        """Those of items that are stored, or will be."""
        self._batch: tuple[list[Item], str] | None = None
        """The first of the held items, and the id of the operation that stores them; kept until it
        is known to be done."""
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """Why the latest write has failed."""
        self._refused: list[Item] = []
        """Items that the history does not take; others are stored without them."""
        self._refusal: Exception | None = None

    async def begin(self) -> tuple[Item, ...]:
        """Read the history: the items that the model is to be told."""
        if self._state.conversation is not None:
            must = "that of a run whose items are in its history, or in the state"
            raise InvalidSetting("state", self._state.run_id, must)
        history = None if self._history is None else _Readable(self._history)
        begun = await conversation_of(self._state, history, refuse_made=True)
        self._before = replace(begun, seen=View([]), new=())
        self.add(begun.new)
        return tuple(begun.view)

    def add(self, items: Sequence[Item | Correction]) -> None:
        """Store items after those that were added before, soon; and correct stored ones.

        Histories that cannot replace items keep what they have.
        """
        for each in items:
            if not isinstance(each, Correction):
                self._held.append(each)
            elif self._history is None:
                each.apply(self._held)
            else:
                self._corrections.append(each)
        if items:
            self._start()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all items are stored. Raises the error if that fails; it may be repeated.

        Neither a cancel nor the timeout stops the write: a repeat waits for the same one.
        """
        self._start()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=timeout_s)
            if late and timeout_s is not None:
                name = getattr(self._history, "session_id", None) or type(self._history).__name__
                raise HistoryNoAnswer(str(name), timeout_s)
        if error := self._failure or self._refusal:
            raise error

    def in_state(self, state: RunState) -> RunState:
        """The state with the place of the session's items in the history, or with the items.

        It is to be called after `flush`: items that are not stored are in the state, from where
        they are stored by whoever goes on.
        """
        stored = replace(self._before, new=tuple(self._stored)).stored()
        held = (*self._held, *self._refused)
        after = replace(stored, new=held).in_state(state)
        return replace(after, turn=max(1, after.turn)) if held or after.stored_items else after

    # --- writing ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._history is not None and self._task is None and (self._held or self._corrections):
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Write the held items, and those that are added meanwhile; then correct stored ones."""
        task = asyncio.current_task()
        try:
            while self._held or self._corrections:
                if self._held:
                    await self._store()
                else:
                    await self._correct(self._corrections[0])
                    del self._corrections[0]
                self._failure = None
        except BaseException as error:  # reported, and raised by `flush` if it stays
            if isinstance(error, KeyboardInterrupt) or is_ended_by(error, task):
                raise
            if not isinstance(error, Exception):
                error = RuntimeError(f"the history raised {error!r}")
            if self._failure is None:
                self._report(error)
            self._failure = error
        finally:
            self._task = None

    async def _store(self) -> None:
        if self._batch is None:
            self._batch = list(self._held), uuid4().hex
        items, operation_id = self._batch
        add_items = self._history.add_items
        knows_operations = "operation_id" in inspect.signature(add_items).parameters
        options = {"operation_id": operation_id} if knows_operations else {}
        try:
            await _called(add_items, items, **options)
        except (ItemNotStorable, ItemTooLarge) as error:
            # Nothing of the batch was stored, and the item would be refused again.
            self._refused.append(self._held.pop(error.index))
            self._refusal = error
            self._report(error)
        else:
            del self._held[: len(items)]
            self._stored += items
        self._batch = None

    async def _correct(self, correction: Correction) -> None:
        """Replace an item in one step, if it is still there."""
        can_replace = hasattr(self._history, "read") and hasattr(self._history, "replace")
        stored = list(self._stored)
        if not (can_replace and correction.apply(stored)):
            return
        snapshot = await _called(self._history.read, CORRECTABLE)
        items = list(snapshot.items)
        if correction.apply(items):
            await _called(self._history.replace, snapshot.version, items)
        self._stored = stored


class _Readable:
    """A history whose items are awaited, whichever kind it is."""

    def __init__(self, history: Any) -> None:
        self._history = history
        self.session_settings = getattr(history, "session_settings", None)

    async def get_items(self, limit: int | None = None) -> list[Item]:
        items: list[Item] = await _called(self._history.get_items, limit)
        return items


async def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a method of a history; one that blocks is called in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    answer = await asyncio.to_thread(method, *args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer
