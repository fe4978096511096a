"""Versions of an item: how they are merged, cut to what was heard, and made ready to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from capsule_tasks.runs.items import items_of_reply, kind_of
from capsule_tasks.runs.records import Item

WITHOUT_TRANSCRIPT = "[audio without a transcript]"
"""The text of audio that has no transcript."""
LONGEST_WORD = 30
"""Text that has no space for longer than this is cut anywhere: not all languages have spaces."""
_NOT_STORED = frozenset(("id", "object", "status"))
"""Servers of other APIs refuse the ids of a realtime server. A status is stored only if the item is
incomplete."""


class Correction(NamedTuple):
    """An item that was stored, and what it says now; None if nothing of it was heard."""

    stored: Item
    now: Item | None

    def apply(self, items: list[Item]) -> bool:
        """Correct the latest such item, if there is one; whether there is."""
        for at in reversed(range(len(items))):
            if items[at] == self.stored:
                items[at : at + 1] = [] if self.now is None else [self.now]
                return True
        return False


class Cut(NamedTuple):
    """Where an answer was interrupted; text that comes later was not heard either."""

    part: int
    """The index of the part that was being played."""
    share: float
    """How much of its audio was played."""
    length: int | None
    """The length of its text that was heard; None if no text was known at the interruption."""

    @classmethod
    def of(cls, item: Item, part: int, share: float) -> Cut:
        text = text_at(item, part)
        return cls(part, share, len(whole_words(text, share)) if text else None)

    def heard(self, item: Item) -> Item:
        """The item without text, and parts, of which nothing was heard."""
        text = text_at(item, self.part)
        heard = whole_words(text, self.share) if self.length is None else text[: self.length]
        is_heard = heard or (self.share and not text)  # of audio without a transcript, too
        parts = parts_of(with_text(item, self.part, heard, kind="output_audio"))
        count = self.part + 1 if is_heard else self.part
        return {**item, "content": parts[:count], "status": "incomplete"}


def whole_words(text: str, share: float) -> str:
    """The words in about this share of a text, from its beginning on."""
    length = min(len(text), int(len(text) * share))
    if length == len(text) or text[length].isspace():
        return text[:length].rstrip()
    end = max(text.rfind(" ", 0, length), text.rfind("\n", 0, length), 0)
    return text[: length if length - end > LONGEST_WORD else end].rstrip()


def parts_of(item: Item) -> list[Item]:
    """The parts of a message, in a new list."""
    content = item.get("content")
    return list(content) if isinstance(content, list) else []


def text_field(part: Mapping[str, Any]) -> str:
    """The name of the field that has the text of a part."""
    return "transcript" if "audio" in str(part.get("type")) else "text"


def text_at(item: Item, at: int) -> str:
    """The text of a part; empty if there is none."""
    parts = parts_of(item)
    return parts[at].get(text_field(parts[at])) or "" if at < len(parts) else ""


def with_text(item: Item, at: int, text: str, *, kind: str) -> Item:
    """The item with the text of a part. One that there is not yet is made, of this type."""
    parts = parts_of(item)
    while len(parts) <= at:
        parts.append({"type": kind})
    parts[at] = {**parts[at], text_field(parts[at]): text}
    return {**item, "content": parts}


def merged(old: Item, new: Item) -> Item:
    """The later version of an item, with what only the earlier one says."""
    item, before = _with_fields(old, new), parts_of(old)
    if not before:
        return item
    parts = parts_of(new) or before
    for at, part in enumerate(before):
        if at < len(parts) and part.get("type") == parts[at].get("type"):
            parts[at] = _with_fields(part, parts[at])
        elif part.get("type") == "input_image":
            # A server may repeat a message without its images.
            parts.insert(at, part)
    return {**item, "content": parts}


def _with_fields(old: Item, new: Item) -> Item:
    return {**old, **{name: value for name, value in new.items() if value not in (None, "")}}


def stored(item: Item) -> Item | None:
    """The item as it is stored: in the words of runs, with text in place of audio.

    None for a message without any content, such as an answer of which nothing was heard: models
    refuse such messages.
    """
    kept = {name: value for name, value in item.items() if name not in _NOT_STORED}
    role = item.get("role")
    if item.get("status") in ("incomplete", "in_progress") and role != "user":
        kept["status"] = "incomplete"
    if kind_of(item) == "message" and isinstance(item.get("content"), list):
        kind = "output_text" if role == "assistant" else "input_text"
        kept["content"] = [part for each in item["content"] if (part := _stored_part(each, kind))]
        if not kept["content"]:
            return None
    return items_of_reply([kept])[0]


def _stored_part(part: Item, text_kind: str) -> Item | None:
    kind = str(part.get("type"))
    if "audio" not in kind and "text" not in kind:
        return {name: value for name, value in part.items() if value is not None}
    text = part.get(text_field(part)) or (WITHOUT_TRANSCRIPT if "audio" in kind else "")
    return {"type": text_kind, "text": text} if text else None
