"""Where a history may be cut, and what lies before the cut. Pure functions on items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from capsule_tasks.runs.items import OUTPUTS, Pair, pairs_of
from capsule_tasks.runs.records import Item

SUMMARY_TITLE = "Summary of the conversation so far:"
"""The first line of every summary; the message is known by it."""
_encoded = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Cut:
    """A history in two parts: `old` items, which go, and those behind them, which stay."""

    stop: int
    """How many items are replaced: `old` and `waiting`."""
    old: list[Item]
    waiting: list[Item]
    """Calls among the replaced items that have no output, with their reasoning. They may be those
    of a run that is parked, so they stay, behind the replacement."""


def is_compaction(item: Item) -> bool:
    """Whether an item stands for older ones: a summary, or a `compaction` of OpenAI's server."""
    if item.get("type") == "compaction":
        return True
    content = item.get("content")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return isinstance(content, str) and content.startswith(SUMMARY_TITLE)


def since_compaction(items: Sequence[Item]) -> int:
    """The index behind the last item that stands for older ones; 0 if there is none."""
    for index in range(len(items) - 1, -1, -1):
        if is_compaction(items[index]):
            return index + 1
    return 0


def is_waiting(items: Sequence[Item]) -> bool:
    """Whether calls of the latest reply have no output yet: those since the last user message."""
    calls, outputs = pairs_of(items)
    answered = set[Pair]()
    for at in reversed(range(len(items))):
        if at in outputs:
            answered.add(outputs[at])
        elif at in calls:
            if calls[at] not in answered:
                return True
        elif not _is_of_model(items[at]):
            return False
    return False


def cut(items: Sequence[Item], keep_last: int) -> Cut | None:
    """The cut that keeps at least the last `keep_last` items and no half of anything.

    No call is cut from its output, and no reasoning from the rest of its reply. None if nothing is
    left to compact: what is before the cut has been compacted already, or only waits.
    """
    stop = _last_allowed(items, max(0, len(items) - keep_last))
    before = items[:stop]
    waiting = _unanswered(items, stop)
    old = [item for at, item in enumerate(before) if at not in waiting]
    if since_compaction(old) == len(old):
        return None
    return Cut(stop, old, [before[at] for at in sorted(waiting)])


def has_halves(items: Sequence[Item]) -> bool:
    """Whether a call has no output among these items, or an output no call."""
    calls, outputs = pairs_of(items)
    return set(calls.values()) != set(outputs.values())


def size_of(items: Sequence[Item]) -> int:
    """The bytes of items as JSON, without what only the model's server can read.

    The length of an encrypted text says nothing about the tokens that it stands for.
    """
    return sum(len(_encoded(_readable(item))) for item in items)


def _readable(item: Item) -> Item:
    if "encrypted_content" not in item:
        return item
    return {key: value for key, value in item.items() if key != "encrypted_content"}


def _is_of_model(item: Item) -> bool:
    """Whether a model made the item: reasoning, a message, a call."""
    kind = str(item.get("type", "message"))
    if kind == "message":
        return item.get("role") == "assistant"
    return kind not in OUTPUTS and kind != "compaction"


def _last_allowed(items: Sequence[Item], most: int) -> int:
    """The last place, at most `most`, at which nothing that belongs together would be cut."""
    calls, outputs = pairs_of(items)
    pairs, answered = calls | outputs, set(outputs.values())
    last: dict[Pair | None, int] = {pairs[at]: at for at in sorted(pairs) if pairs[at] in answered}
    allowed = open_until = 0
    is_reasoned = False  # the reply that the item before belongs to has reasoning
    for at, item in enumerate(items[: most + 1]):
        is_within_reply = is_reasoned and _is_of_model(item)
        if at >= open_until and not is_within_reply:
            allowed = at
        open_until = max(open_until, last.get(pairs.get(at), -1) + 1)
        is_reasoned = _is_of_model(item) and (is_reasoned or item.get("type") == "reasoning")
    if most >= len(items) >= open_until:
        allowed = len(items)
    return allowed


def _unanswered(items: Sequence[Item], stop: int) -> set[int]:
    """The places before `stop` of calls without output, and of the reasoning of their replies."""
    calls, outputs = pairs_of(items)
    answered = set(outputs.values())
    found = set[int]()
    reasoning = list[int]()
    for at, item in enumerate(items[:stop]):
        if not _is_of_model(item):
            reasoning = []
        elif item.get("type") == "reasoning":
            reasoning.append(at)
        elif at in calls and calls[at] not in answered:
            found |= {at, *reasoning}
    return found
