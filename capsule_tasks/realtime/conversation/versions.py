"""Versions of an item: how they are merged, cut to what was heard, and made ready to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from capsule_tasks.runs.items import kind_of
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
        for at in range(len(items) - 1, -1, -1):
            if items[at] == self.stored:
                items[at : at + 1] = [] if self.now is None else [self.now]
                return True
        return False


class Cut(msgspec.Struct, frozen=True):
    """A text of which the user has heard only the beginning."""

    full: str
    share: float
    """How much of the audio was played."""
    length: int | None = None
    """The length of the text that was heard; None if no text was known at the interruption."""

    @classmethod
    def of(cls, full: str, share: float) -> Cut:
        return cls(full, share, len(whole_words(full, share)) if full else None)

    @property
    def heard(self) -> str:
        if self.length is None:
            return whole_words(self.full, self.share)
        return self.full[: self.length]

    def later(self, text: str) -> Cut:
        """The cut of a later version of the text: what came since was not heard.

        A shorter text than the one before was cut by the server, which knows better.
        """
        if len(text) < len(self.full):
            return Cut(text, self.share, len(text))
        return Cut.of(text, self.share) if self.length is None else Cut(text, 1.0, self.length)

    def grown(self, delta: str) -> Cut:
        return Cut(self.full + delta, self.share, self.length)


def whole_words(text: str, share: float) -> str:
    """The words in about this share of a text, from its beginning on."""
    length = min(len(text), int(len(text) * share))
    if length == len(text) or text[length].isspace():
        return text[:length].rstrip()
    end = max(text.rfind(" ", 0, length), text.rfind("\n", 0, length), 0)
    return text[: length if length - end > LONGEST_WORD else end].rstrip()


def text_field(part: Mapping[str, Any]) -> str:
    """The name of the field that has the text of a part."""
    return "transcript" if "audio" in str(part.get("type")) else "text"


def merged(old: Item, new: Item, cuts: dict[int, Cut]) -> Item:
    """The later version of an item, with what only the earlier one says.

    `cuts` are those of the item's parts, and are changed to those of the later version.
    """
    if (kind_of(old), old.get("role")) != (kind_of(new), new.get("role")):
        return dict(new)
    item = {**old, **{name: value for name, value in new.items() if value not in (None, "")}}
    before, after = old.get("content"), new.get("content")
    if isinstance(before, list) and isinstance(after, list):
        item["content"] = _merged_parts(before, after, cuts) if after else before
    return item


def _merged_parts(old: list[Item], new: list[Item], cuts: dict[int, Cut]) -> list[Item]:
    parts = list(new)
    urls = {part.get("image_url") for part in new}
    for at, part in enumerate(old):
        # A server may repeat a message without its images.
        is_image = part.get("type") == "input_image" and part.get("image_url") not in urls
        if is_image and not (at < len(parts) and parts[at].get("type") == "input_image"):
            parts.insert(at, part)
    return [
        _merged_part(old[at] if at < len(old) else {}, part, at, cuts)
        for at, part in enumerate(parts)
    ]


def _merged_part(old: Item, new: Item, at: int, cuts: dict[int, Cut]) -> Item:
    if old.get("type", new.get("type")) != new.get("type"):
        return new
    part = {**old, **{name: value for name, value in new.items() if value not in (None, "")}}
    name = text_field(part)
    if at in cuts and new.get(name):
        cuts[at] = cuts[at].later(new[name])
        part[name] = cuts[at].heard
    return part


def stored(item: Item, cuts: Mapping[int, Cut]) -> Item | None:
    """The item as it is stored: in the words of runs, with text in place of audio.

    None for a message without any content, such as an answer of which nothing was heard: models
    refuse such messages.
    """
    kept = {name: value for name, value in item.items() if name not in _NOT_STORED}
    is_answer = item.get("role") == "assistant"
    if item.get("status") in ("incomplete", "in_progress") and item.get("role") != "user":
        kept["status"] = "incomplete"
    if kind_of(item) != "message" or not isinstance(item.get("content"), list):
        return kept
    kept["content"] = []
    for at, part in enumerate(item["content"]):
        if "audio" not in (kind := str(part.get("type"))) and "text" not in kind:
            given = {name: value for name, value in part.items() if value is not None}
            kept["content"].append(given)
            continue
        text, cut = part.get(text_field(part)), cuts.get(at)
        is_unheard = cut is not None and (cut.full or not cut.share)
        if not text and "audio" in kind and not is_unheard:
            text = WITHOUT_TRANSCRIPT
        if text:
            kind = "output_text" if is_answer else "input_text"
            kept["content"].append({"type": kind, "text": text})
    return kept if kept["content"] else None
