"""ConversationLog: the items of a realtime conversation, as they are now and as they are stored.

The server tells of an item in pieces and out of order: the item is announced, its text grows, its
transcript comes after the answer to it, an interruption takes back what nobody heard. The log keeps
the latest version of each item in the order of the conversation. An item is handed out for the
history once, when it and all items before it are final. An answer is final when it is made, long
before it is played: if it is interrupted later, a correction is handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Literal
from uuid import uuid4

from capsule_tasks.realtime.conversation.versions import Correction, Cut, merged, stored, text_field
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
from capsule_tasks.runs.items import call_id_of, items_of_reply, kind_of
from capsule_tasks.runs.records import Item

Change = Literal["added", "updated"] | None

UNHEARD_LIMIT = 2
"""How many items wait for transcripts. When there are more, the server does not seem to transcribe,
and no item waits until a transcript has come."""


class _Entry:
    """An item of the conversation, and what is known of it besides."""

    __slots__ = ("cuts", "grown", "item", "number", "response_id", "stage", "transcribed")

    def __init__(self, item: Item, number: int) -> None:
        self.item = item
        self.number = number
        """Counts the items in the order in which they became known."""
        self.stage: Literal["server", "response", "transcript", "final", "loaded"] = "server"
        """Whose event the item waits for, before it is final: the server's that it is done, the
        end of the response, or the transcript. An item of an earlier session was `loaded`."""
        self.response_id: str | None = None
        """The response that was being made when the item was added, or that its text is of."""
        self.transcribed: set[int] = set()
        """Indexes of parts whose transcript came, or could not be made."""
        self.grown: dict[tuple[int, bool], list[str]] = {}
        """Text that is not in the item yet, by content index, and whether it is a transcript."""
        self.cuts: dict[int, Cut] = {}

    @property
    def is_answer(self) -> bool:
        return self.item.get("role") == "assistant"

    @property
    def lacks_transcript(self) -> bool:
        return self.item.get("role") == "user" and any(
            part.get("type") == "input_audio"
            and not part.get("transcript")
            and at not in self.transcribed
            for at, part in enumerate(self.parts())
        )

    def parts(self) -> list[Item]:
        content = self.item.get("content")
        return list(content) if isinstance(content, list) else []

    def whole(self) -> Item:
        """The item with all of its text. The item is not to be changed."""
        if self.grown:
            parts = self.parts()
            for (at, is_transcript), pieces in sorted(self.grown.items()):
                while len(parts) <= at:
                    parts.append({"type": "output_audio" if is_transcript else "output_text"})
                name = text_field(parts[at])
                text = (parts[at].get(name) or "") + "".join(pieces)
                parts[at] = {**parts[at], name: text}
            self.item = {**self.item, "content": parts}
            self.grown.clear()
        return self.item

    def merge(self, version: Item) -> bool:
        """Take a later version of the item; whether that says anything new."""
        old = self.whole()
        self.item = merged(old, version, self.cuts)
        if self.cuts or (self.stage != "server" and version.get("status") == "in_progress"):
            self.item["status"] = old.get("status")
        return self.item != old

    def cut(self, at: int, played_ms: int, total_ms: int | None) -> bool:
        """Leave the text that was heard; whether that changes anything."""
        if not self.is_answer or (total_ms and played_ms >= total_ms):
            return False
        old, parts = self.whole(), self.parts()
        if total_ms:
            part = parts[at] if at < len(parts) else {"type": "output_audio"}
            full = self.cuts[at].full if at in self.cuts else part.get(text_field(part)) or ""
            self.set_cut(at, Cut.of(full, played_ms / total_ms))
        self.item = {**self.item, "status": "incomplete"}
        return self.item != old

    def set_cut(self, at: int, cut: Cut) -> None:
        self.cuts[at] = cut
        parts = self.parts()
        while len(parts) <= at:
            parts.append({"type": "output_audio"})
        parts[at] = {**parts[at], text_field(parts[at]): cut.heard}
        self.item = {**self.item, "content": parts}


class ConversationLog:
    """The items of one session's conversation. Events of the model change it, without any I/O.

    An event costs the same however long the conversation is, but for an item that is put between
    others, which costs as much as there are items behind it.
    """

    def __init__(self) -> None:
        self._order = OrderedDict[_Entry, None]()
        """In the order of the conversation."""
        self._waiting = OrderedDict[_Entry, None]()
        """Those that were not handed out yet, in the same order."""
        self._by_id: dict[str, _Entry] = {}
        self._outputs: dict[str, _Entry] = {}
        """Outputs of calls by the ids of the calls."""
        self._called: set[str] = set()
        """Ids of calls of this session."""
        self._deleted: set[str] = set()
        self._running: dict[str, None] = {}
        """Responses that are being made, the latest one last."""
        self._unfinished: dict[_Entry, None] = {}
        """Those that wait for the server, or for the end of a response."""
        self._unheard: dict[_Entry, None] = {}
        """Those that wait for a transcript."""
        self._is_transcribed = True
        self._corrections: list[Correction] = []
        self._count = 0
        self.last_added: Item = {}
        """The item that was added last."""

    def load(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Begin with items of an earlier conversation, which are stored already.

        Returns them with ids of this session, by which the server's echo of them is known.
        """
        prefix = f"kept_{uuid4().hex[:12]}"
        with_ids = [{**item, "id": f"{prefix}_{number}"} for number, item in enumerate(items)]
        for item in with_ids:
            self._insert(item, None, item["id"]).stage = "loaded"
        self._waiting.clear()
        self._unfinished.clear()
        self._called.clear()
        return tuple(with_ids)

    def items(self) -> list[Item]:
        """The conversation as it is now, in a new list. The items are not to be changed."""
        return [entry.whole() for entry in self._order]

    def apply(self, event: ModelEvent) -> Change:
        """Take an event: whether an item was added, or the items say something new.

        Text that grows is no news; the item is whole when the server is done with it.
        """
        handler = self._handlers.get(type(event))
        return None if handler is None else handler(self, event)

    def add(self, item: Item) -> None:
        """Add an item that was made here, as outputs of tools are.

        A second output of the same call is ignored; so is what the server repeats of it.
        """
        if kind_of(item) == "function_call_output" and call_id_of(item) in self._outputs:
            return
        self._finish(self._insert(item, None, item.get("id")))

    def take_final(self, *, at_end: bool = False) -> list[Item]:
        """The items to store now, in order, in the words of runs; each is handed out once.

        `at_end` hands out all that is left, as it is.
        """
        found = []
        while self._waiting:
            entry = next(iter(self._waiting))
            if entry.stage != "final" and not at_end:
                break
            del self._waiting[entry]
            if (item := stored(entry.whole(), entry.cuts)) is not None:
                found.append(item)
        return items_of_reply(found)

    def take_corrections(self) -> list[Correction]:
        """What the history has otherwise, of items that were handed out; each handed out once."""
        found, self._corrections = self._corrections, []
        return found

    # --- events -----------------------------------------------------------------------------------

    def _changed(self, event: ItemChanged) -> Change:
        item = event.item
        change: Change = None
        entry = self._entry_of(item)
        if entry is None:
            if kind_of(item) == "function_call" and call_id_of(item) in self._called:
                # It is not made again; and if it says something else, the output is not of it.
                return None
            entry = self._insert(item, event.after, item.get("id"))
            change = "added"
        elif entry.stage == "loaded":
            return None
        elif entry.merge(item):
            change = "updated"
        if event.is_final and entry.stage == "server":
            self._done(entry)
        elif entry.stage == "transcript" and not entry.lacks_transcript:
            self._finish(entry)
        return change

    def _text_grown(self, event: TextDelta) -> Change:
        change: Change = None
        entry = self._by_id.get(event.item_id)
        if entry is None:
            if event.item_id in self._deleted:
                return None
            message = {"id": event.item_id, "type": "message", "role": "assistant"}
            entry = self._insert({**message, "status": "in_progress"}, None, event.item_id)
            change = "added"
        # After the server is done with an item, its text is whole.
        if entry.stage == "server" and entry.is_answer:
            entry.response_id = event.response_id
            at = event.content_index
            if at in entry.cuts:
                entry.set_cut(at, entry.cuts[at].grown(event.delta))
            else:
                entry.grown.setdefault((at, event.is_transcript), []).append(event.delta)
        if change == "added":
            self.last_added = entry.whole()
        return change

    def _transcribed(self, event: InputTranscribed) -> Change:
        change: Change = "updated"
        entry = self._by_id.get(event.item_id)
        if entry is None:
            if event.item_id in self._deleted:
                return None
            message = {"id": event.item_id, "type": "message", "role": "user"}
            entry = self._insert({**message, "content": []}, None, event.item_id)
            change = "added"
        parts, at = entry.parts(), event.content_index
        if at >= len(parts) or parts[at].get("type") != "input_audio":
            audio = (n for n, part in enumerate(parts) if part.get("type") == "input_audio")
            at = next(audio, len(parts))
            if at == len(parts):
                parts.append({"type": "input_audio"})
        entry.transcribed.add(at)
        self._is_transcribed = True
        if event.transcript is not None:
            parts[at] = {**parts[at], "transcript": event.transcript}
        elif change == "updated":
            change = None
        entry.item = {**entry.item, "content": parts}
        if change == "added":
            self.last_added = entry.item
        if (change == "added" or entry.stage == "transcript") and not entry.lacks_transcript:
            self._finish(entry)
        return change

    def _interrupted(self, event: AudioInterrupted | ItemTruncated) -> Change:
        entry = self._by_id.get(event.item_id)
        if entry is None or event.played_ms is None:
            return None
        before = stored(entry.whole(), entry.cuts)
        if not entry.cut(event.content_index, event.played_ms, event.total_ms):
            return None
        is_handed_out = entry not in self._waiting and entry.stage != "loaded"
        if is_handed_out and before is not None:
            self._corrections.append(Correction(before, stored(entry.whole(), entry.cuts)))
        return "updated"

    def _item_deleted(self, event: ItemDeleted) -> Change:
        self._deleted.add(event.item_id)
        entry = self._by_id.pop(event.item_id, None)
        if entry is None:
            return None
        for entries in (self._order, self._waiting, self._unfinished, self._unheard):
            entries.pop(entry, None)
        return "updated"

    def _response_started(self, event: ResponseStarted) -> Change:
        self._running[event.response_id] = None
        return None

    def _response_ended(self, event: ResponseEnded) -> Change:
        """Wait no longer for items of the response, and for those of no response that is known."""
        self._running.pop(event.response_id, None)
        change: Change = None
        for entry in list(self._unfinished):
            if entry.response_id in self._running:
                continue
            if entry.stage == "server" and entry.item.get("status") == "in_progress":
                status = "completed" if event.status == "completed" else "incomplete"
                entry.item = {**entry.whole(), "status": status}
                change = "updated"
            if entry.is_answer:
                self._finish(entry)
            else:
                self._done(entry)
        return change

    _handlers: ClassVar[dict[type, Callable[[ConversationLog, Any], Change]]] = {
        ItemChanged: _changed,
        TextDelta: _text_grown,
        InputTranscribed: _transcribed,
        AudioInterrupted: _interrupted,
        ItemTruncated: _interrupted,
        ItemDeleted: _item_deleted,
        ResponseStarted: _response_started,
        ResponseEnded: _response_ended,
    }

    # --- stages -----------------------------------------------------------------------------------

    def _done(self, entry: _Entry) -> None:
        """The server is done with the item, but maybe not with its response, or transcript."""
        self._unfinished.pop(entry, None)
        if entry.is_answer and self._running:
            entry.stage = "response"
            self._unfinished[entry] = None
        elif entry.lacks_transcript and self._is_transcribed:
            entry.stage = "transcript"
            self._unheard[entry] = None
            if len(self._unheard) > UNHEARD_LIMIT:
                self._is_transcribed = False
                self._finish(entry)  # and those before it
        else:
            self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        entry.stage = "final"
        self._unfinished.pop(entry, None)
        self._unheard.pop(entry, None)
        if entry.item.get("role") == "user":
            # The conversation has gone on: a transcript of what was said before may never come.
            for earlier in [each for each in self._unheard if each.number < entry.number]:
                self._finish(earlier)

    def _insert(self, item: Item, after: str | None, item_id: str | None) -> _Entry:
        self._count += 1
        entry = _Entry(item, self._count)
        entry.response_id = next(reversed(self._running), None)
        if item_id is not None:
            self._by_id[item_id] = entry
            self._deleted.discard(item_id)
        if (call_id := call_id_of(item)) is not None:
            if kind_of(item) == "function_call_output":
                self._outputs[call_id] = entry
            else:
                self._outputs.pop(call_id, None)
                self._called.add(call_id)
        place = None if after is None else self._by_id.get(after)
        behind: list[_Entry] = []
        if place is not None:
            behind = list(takewhile(lambda each: each is not place, reversed(self._order)))
        self._order[entry] = self._waiting[entry] = self._unfinished[entry] = None
        for each in reversed(behind):
            self._order.move_to_end(each)
            if each in self._waiting:
                self._waiting.move_to_end(each)
        self.last_added = item
        return entry

    def _entry_of(self, item: Item) -> _Entry | None:
        """The entry that this item is a version of."""
        item_id = item.get("id")
        entry = self._by_id.get(item_id) if item_id is not None else None
        if entry is None and kind_of(item) == "function_call_output":
            entry = self._outputs.get(call_id_of(item) or "")
            if entry is not None and item_id is not None:
                self._by_id[item_id] = entry
        return entry
