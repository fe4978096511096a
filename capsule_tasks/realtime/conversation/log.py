"""ConversationLog: the items of a realtime conversation, as they are now and as they are stored.

The server tells of an item in pieces and out of order: the item is announced, its text grows, its
transcript comes after the answer to it, an interruption takes back what nobody heard. The log keeps
the latest version of each item in the order of the conversation. An item is handed out for the
history once, when it and all items before it are final. An answer is final when it is made, long
before it is played: if it is interrupted later, a correction is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal
from uuid import uuid4

from capsule_tasks.realtime.conversation.versions import (
    Correction,
    Cut,
    merged,
    parts_of,
    stored,
    text_at,
    with_text,
)
from capsule_tasks.realtime.model import (
    AudioInterrupted,
    InputTranscribed,
    ItemChanged,
    ItemDeleted,
    ItemTruncated,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    TextDelta,
)
from capsule_tasks.runs.items import call_id_of, kind_of
from capsule_tasks.runs.records import Item

Change = Literal["added", "updated"] | None

UNHEARD_LIMIT = 2
"""How many items wait for transcripts. When there are more, the server does not seem to transcribe,
and no item waits until a transcript has come."""


class _Entry:
    """An item of the conversation, and what is known of it besides."""

    __slots__ = ("cut", "in_history", "is_done", "is_transcribed", "item", "response_id")

    def __init__(self, item: Item, response_id: str | None) -> None:
        self.item = item
        """The latest version, whether or not its text was heard."""
        self.in_history: Literal["no", "stored", "loaded"] = "no"
        """Whether it was handed out to be stored, or is of an earlier session."""
        self.is_done = False
        """Whether the server is done with it, but for the transcript of audio of the user."""
        self.is_transcribed = False
        """Whether that transcript came, or could not be made."""
        self.response_id = response_id
        """The response that was being made when the item was added, or that its text is of."""
        self.cut: Cut | None = None

    @property
    def is_answer(self) -> bool:
        return self.item.get("role") == "assistant"

    @property
    def lacks_transcript(self) -> bool:
        audio = [part for part in parts_of(self.item) if part.get("type") == "input_audio"]
        return not self.is_transcribed and not all(part.get("transcript") for part in audio)

    def now(self) -> Item:
        """The item without what was not heard. It is not to be changed."""
        return self.item if self.cut is None else self.cut.heard(self.item)


class ConversationLog:
    """The items of one session's conversation. Events of the model change it, without any I/O.

    An event costs the same however long the conversation is, but for an item that is put between
    others, which costs as much as there are items behind it.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        """In the order of the conversation."""
        self._first_unstored = 0
        """All entries before this place were handed out."""
        self._by_id: dict[str, _Entry] = {}
        self._outputs: dict[str, _Entry] = {}
        """Outputs of calls by the ids of the calls."""
        self._called: set[str] = set()
        """Ids of calls of this session."""
        self._deleted: set[str] = set()
        self._running: dict[str, None] = {}
        """Responses that are being made, the latest one last."""
        self._is_transcribed = True
        """Whether the server seems to make transcripts."""
        self._corrections: list[Correction] = []
        self._newest: _Entry

    @property
    def last_added(self) -> Item:
        """The item that was added last."""
        return self._newest.now()

    def load(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Begin with items of an earlier conversation, which are stored already.

        Returns them with ids of this session, by which the server's echo of them is known.
        """
        prefix = f"kept_{uuid4().hex[:12]}"
        with_ids = [{**item, "id": f"{prefix}_{number}"} for number, item in enumerate(items)]
        for item in with_ids:
            self._insert(item).in_history = "loaded"
        self._called.clear()
        return tuple(with_ids)

    def items(self) -> list[Item]:
        """The conversation as it is now, in a new list. The items are not to be changed."""
        return [entry.now() for entry in self._entries]

    def apply(self, event: ModelEvent) -> Change:
        """Take an event: whether an item was added, or the items say something new.

        Text that grows is no news; the item is whole when the server is done with it.
        """
        if (handler := self._handlers.get(type(event))) is None:
            return None
        count = len(self._entries)
        is_updated = handler(self, event)
        if len(self._entries) > count:
            return "added"
        return "updated" if is_updated else None

    def add(self, item: Item) -> None:
        """Add an item that was made here, as outputs of tools are.

        A second output of the same call is ignored; so is what the server repeats of it.
        """
        if kind_of(item) != "function_call_output" or call_id_of(item) not in self._outputs:
            self._insert(item).is_done = True

    def take_final(self, *, at_end: bool = False) -> list[Item | Correction]:
        """The items to store now, in order, in the words of runs; each is handed out once.

        Before them come corrections of items that were handed out. `at_end` hands out all that is
        left, as it is.
        """
        found: list[Item | Correction] = [*self._corrections]
        self._corrections.clear()
        for entry in self._entries[self._first_unstored :]:
            if entry.in_history == "no":
                if not (at_end or self._is_final(entry)):
                    break
                entry.in_history = "stored"
                if (item := stored(entry.now())) is not None:
                    found.append(item)
            self._first_unstored += 1
        return found

    def _is_final(self, entry: _Entry) -> bool:
        """Whether the first entry that is not stored has all that is to be stored of it."""
        if not entry.is_done or (entry.is_answer and entry.response_id in self._running):
            return False
        if not entry.lacks_transcript:
            return True
        waiting = self._entries[self._first_unstored :]
        said = [each for each in waiting if each.is_done and each.item.get("role") == "user"]
        unheard = [each for each in said if each.lacks_transcript]
        if len(unheard) > UNHEARD_LIMIT:
            self._is_transcribed = False
        # Once the next item of the user is whole, the transcript of this one may never come.
        return not self._is_transcribed or len(unheard) < len(said)

    # --- events: whether they update an item ------------------------------------------------------

    def _changed(self, event: ItemChanged) -> bool:
        entry, is_updated = self._entry_of(event.item), False
        if entry is None:
            if kind_of(event.item) == "function_call" and call_id_of(event.item) in self._called:
                # The call is not made again. If it has other arguments, the output is not its own.
                return False
            entry = self._insert(event.item, event.after)
        elif entry.in_history != "loaded":
            before = entry.now()
            entry.item = merged(entry.item, event.item)
            is_updated = entry.now() != before
        entry.is_done |= event.is_final
        return is_updated

    def _text_grown(self, event: TextDelta) -> bool:
        entry = self._message(event.item_id, role="assistant", status="in_progress")
        # After the server is done with an item, its text is whole.
        if entry is not None and entry.is_answer and not entry.is_done:
            entry.response_id = event.response_id
            text = text_at(entry.item, event.content_index) + event.delta
            kind = "output_audio" if event.is_transcript else "output_text"
            entry.item = with_text(entry.item, event.content_index, text, kind=kind)
        return False

    def _transcribed(self, event: InputTranscribed) -> bool:
        entry = self._message(event.item_id, role="user")
        if entry is None:
            return False
        entry.is_done = entry.is_transcribed = self._is_transcribed = True
        if event.transcript is not None:
            parts, at = parts_of(entry.item), event.content_index
            audio = [n for n, part in enumerate(parts) if part.get("type") == "input_audio"]
            if at not in audio:
                at = audio[0] if audio else len(parts)
            entry.item = with_text(entry.item, at, event.transcript, kind="input_audio")
        return event.transcript is not None

    def _interrupted(self, event: AudioInterrupted | ItemTruncated) -> bool:
        entry = self._by_id.get(event.item_id)
        if entry is None or not entry.is_answer or event.played_ms is None:
            return False
        is_whole = event.total_ms and event.played_ms >= event.total_ms
        if is_whole or entry.cut is not None:
            return False
        before = stored(entry.now())
        if event.total_ms:
            share = event.played_ms / event.total_ms
            entry.cut = Cut.of(entry.item, event.content_index, share)
        else:
            # The length of the audio is unknown: all of it counts as heard.
            entry.cut = Cut(event.content_index, 1.0, None)
        if entry.in_history == "stored" and before is not None:
            self._corrections.append(Correction(before, stored(entry.now())))
        return True

    def _item_deleted(self, event: ItemDeleted) -> bool:
        self._deleted.add(event.item_id)
        entry = self._by_id.pop(event.item_id, None)
        if entry is None:
            return False
        self._entries.remove(entry)
        self._first_unstored = 0  # or later: the next look at the items finds it
        return True

    def _response_started(self, event: ResponseStarted) -> bool:
        self._running[event.response_id] = None
        return False

    def _response_ended(self, event: ResponseEnded) -> bool:
        """Wait no longer for items of the response, and for those of no response that is known."""
        self._running.pop(event.response_id, None)
        is_updated = False
        for entry in self._entries[self._first_unstored :]:
            if entry.is_done or entry.response_id in self._running:
                continue
            entry.is_done = True
            if entry.item.get("status") == "in_progress":
                status = "completed" if event.status == "completed" else "incomplete"
                entry.item = {**entry.item, "status": status}
                is_updated = True
        return is_updated

    _handlers: ClassVar[dict[type, Callable[[ConversationLog, Any], bool]]] = {
        ItemChanged: _changed,
        TextDelta: _text_grown,
        InputTranscribed: _transcribed,
        AudioInterrupted: _interrupted,
        ItemTruncated: _interrupted,
        ItemDeleted: _item_deleted,
        ResponseStarted: _response_started,
        ResponseEnded: _response_ended,
    }

    # --- entries ----------------------------------------------------------------------------------

    def _insert(self, item: Item, after: str | None = None) -> _Entry:
        entry = _Entry(item, next(reversed(self._running), None))
        place = len(self._entries)
        if after is not None and (before := self._by_id.get(after)) is not None:
            # From the end, where most are.
            while self._entries[place - 1] is not before:
                place -= 1
        self._entries.insert(place, entry)
        self._first_unstored = min(self._first_unstored, place)
        if (item_id := item.get("id")) is not None:
            self._by_id[item_id] = entry
            self._deleted.discard(item_id)
        if kind_of(item) == "function_call_output":
            self._outputs[call_id_of(item) or ""] = entry
        elif (call_id := call_id_of(item)) is not None:
            self._outputs.pop(call_id, None)
            self._called.add(call_id)
        self._newest = entry
        return entry

    def _message(self, item_id: str, **fields: str) -> _Entry | None:
        """The message, which is added if nothing was told of it before; None if it was deleted."""
        if item_id in self._deleted:
            return None
        message = {"id": item_id, "type": "message", **fields}
        return self._by_id.get(item_id) or self._insert(message)

    def _entry_of(self, item: Item) -> _Entry | None:
        """The entry that this item is a version of."""
        item_id = item.get("id")
        entry = self._by_id.get(item_id) if item_id is not None else None
        if entry is None and kind_of(item) == "function_call_output":
            entry = self._outputs.get(call_id_of(item) or "")
            if entry is not None and item_id is not None:
                self._by_id[item_id] = entry
        return entry
