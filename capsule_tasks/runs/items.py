"""Items in one shape, for the model's input and for the history alike.

An item is a dict of JSON values in the words of OpenAI's Responses: a message, a call and its
output, reasoning. The same helpers make a model's input and what is stored; after that, each
boundary leaves out what must not cross it (`for_model`, `for_history`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.contexts import problem_in
from capsule_tasks.runs.records import Item

OUTPUT_OF = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
    "mcp_approval_request": "mcp_approval_response",
    "program": "program_output",
}
"""For each type of call, the type of its output. A model refuses one without the other."""
OUTPUTS = frozenset(OUTPUT_OF.values())
_PAIRED = OUTPUTS | OUTPUT_OF.keys()
_PROGRAM_OUTPUT = OUTPUT_OF["program"]
Pair = tuple[str, str]
"""A call and its output: the type of the output, and the id of the call."""

_CALL_ID_FIELDS = {"mcp_approval_request": "id", "mcp_approval_response": "approval_request_id"}
"""Where a type of item has the id of its call, if not in `call_id`."""

_KEPT_AT_FIRST_PLACE = frozenset((*OUTPUT_OF, "reasoning"))
"""Items of these types stay before the items that follow from them."""

_PLACEHOLDER_ID = "__fake_id__"
"""The id that openai-agents gives to items of models without ids."""

_FIELDS_OF_AGENTS_SDK = frozenset(
    f"_agents_{field}" for field in ("tool_description", "tool_title")
)
"""Fields of items, not names of its modules."""
_NEVER_STORED = _FIELDS_OF_AGENTS_SDK | {"created_by", "provider_data"}
"""Metadata of providers' servers and of openai-agents. No model accepts it."""
_MAYBE_LEFT_OUT = _NEVER_STORED | {"id", "status"}

_SENT_WITHOUT_STATUS = frozenset(
    (
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
    )
)
"""The status of these items says that they are complete, as all items of an input are. Servers
that know no status refuse it; items of other types need theirs."""

_SENT_WITH_ID = frozenset(
    ("mcp_approval_request", "mcp_approval_response", "item_reference", "local_shell_call_output")
)
"""Items of these types mean nothing without their ids."""

_encode = msgspec.json.Encoder(order="sorted").encode
_encode_lines = msgspec.json.Encoder(order="sorted").encode_lines
_encode_as_given = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[dict[str, Any]]).decode


def normalized(given: str | Iterable[Any], *, name: str = "input") -> list[Item]:
    """Items as plain dicts. A text is a message of the user.

    Mappings and objects of pydantic become dicts. Raises InvalidSetting, which names the place, for
    what is no item: one that has neither a type nor a role, or that is not JSON.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise InvalidSetting(name, given, "a text or a list of items")
    items = list(given)
    if _are_plain(items) and all(map(_is_item, items)):
        return items
    return [_item(each, f"{name}[{index}]") for index, each in enumerate(items)]


def items_of_reply(given: Any) -> list[Item]:
    """The items that a model has made, so that they can be stored and sent again.

    Text that UTF-8 lacks is escaped: with it in a history, no model could be asked again. Raises
    InvalidSetting for what is no item.
    """
    name = "the items of a reply"
    if not isinstance(given, list):
        raise InvalidSetting(name, given, "a list of items")
    if _are_plain(given) and all(map(_is_item, given)):
        return given
    items = [_escaped(_item(each, f"{name}[{index}]")) for index, each in enumerate(given)]
    if not _are_plain(items):
        raise InvalidSetting(name, given, "JSON")
    return items


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return value


def _item(given: Any, name: str) -> Item:
    if not _are_plain([given]):
        given = _plain(given)
        if not isinstance(given, dict):
            must = "an item: a mapping such as {'role': 'user', 'content': 'Hello'}"
            raise InvalidSetting(name, given, must)
        if (problem := problem_in(given)) is not None:
            raise InvalidSetting(name, given, f"JSON, and {problem}")
    if not _is_item(given):
        raise InvalidSetting(name, given, "an item, which has a `type` or a `role`")
    return cast("Item", given)


def _is_item(given: Item) -> bool:
    names = (given.get("type"), given.get("role"))
    return any(isinstance(name, str) and name for name in names)


def _are_plain(items: list[Any]) -> bool:
    """Whether these are dicts that would come back from a history as they are."""
    if not all(type(item) is dict for item in items):
        return False
    try:
        return bool(_decode(_encode_as_given(items)) == items)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


def _plain(value: Any) -> Any:
    """The value with plain dicts and lists in place of mappings, tuples and objects of pydantic."""
    if callable(dump := getattr(value, "model_dump", None)):
        value = dump(mode="json", exclude_unset=True, warnings=False)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def digest(item: Item) -> str:
    """A digest of an item. Equal items have equal ones, whatever the order of their fields."""
    return hashlib.sha256(_canonical(item)).hexdigest()[:32]


class RunningDigest:
    """A digest of a list that grows: each item is encoded once, and not when the list is longer."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._sha256 = hashlib.sha256()
        self.count = 0
        self.update(items)

    def update(self, items: Iterable[Item]) -> None:
        items = list(items)
        try:
            lines = _encode_lines(items)
        except (TypeError, ValueError, OverflowError):
            lines = b"".join(_canonical(item) + b"\n" for item in items)
        self._sha256.update(lines)
        self.count += len(items)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()[:32]


def _canonical(item: Item) -> bytes:
    try:
        return _encode(item)
    except (TypeError, ValueError, OverflowError):
        # A very large number, or half of a surrogate pair: JSON that msgspec does not write.
        return json.dumps(item, sort_keys=True, separators=(",", ":")).encode()


def kind_of(item: Item) -> str:
    """The type of an item. An item without one is a message."""
    kind = item.get("type")
    return kind if type(kind) is str and kind else "message"


def call_id_of(item: Item) -> str | None:
    """The id that a call and its output share; None for other items."""
    kind = kind_of(item)
    return _call_id_of(item, kind) if kind in _PAIRED else None


def _call_id_of(item: Item, kind: str) -> str | None:
    found = item.get(_CALL_ID_FIELDS.get(kind, "call_id")) or item.get("id")
    return found if isinstance(found, str) and found else None


def identity(item: Item) -> str | None:
    """A text that two versions of one item share: its type with the id of its call, or its own id.

    None for an item without an id, which is never a duplicate. A message is identified by its
    content too, since many servers give the same id to every message.
    """
    key = _key(item)
    return f"{key} {digest(item)}" if key and key.startswith("message ") else key


def _key(item: Item) -> str | None:
    """The beginning of an item's identity; items with different ones are no duplicates."""
    found = item.get("id")
    if found is None and "role" in item:
        return None  # as most messages; histories are long
    kind = kind_of(item)
    if kind in _PAIRED:
        found = _call_id_of(item, kind)
    return f"{kind} {found}" if isinstance(found, str) and found != _PLACEHOLDER_ID else None


def deduplicated(items: Sequence[Item]) -> list[Item]:
    """The items without older versions of the same item.

    A call and reasoning keep their first place, so that they stay before what follows from them;
    any other item is where its latest version is.
    """
    quick_keys = [key for item in items if (key := _key(item)) is not None]
    if len(set(quick_keys)) == len(quick_keys):
        return list(items)
    keys = [identity(item) for item in items]
    latest: dict[str, Item] = {}
    place: dict[str, int] = {}
    for index, (key, item) in enumerate(zip(keys, items, strict=True)):
        if key is None:
            continue
        latest[key] = item
        if key not in place or kind_of(item) not in _KEPT_AT_FIRST_PLACE:
            place[key] = index
    return [
        item if key is None else latest[key]
        for index, (key, item) in enumerate(zip(keys, items, strict=True))
        if key is None or place[key] == index
    ]


def without_orphans(
    items: Sequence[Item], *, pending: Collection[str] = (), keep: Collection[int] = ()
) -> list[Item]:
    """The items that a model accepts: no call without its output, no output without its call.

    Reasoning goes with the call that it led to, and so does reasoning that led to nothing. Calls
    with an id in `pending` have no output yet, and stay; so do items at the indexes `keep`.
    """
    kinds = [kind_of(item) for item in items]
    dropped: set[int] = set()
    if not _PAIRED.isdisjoint(kinds):
        dropped = _orphans(items, pending, keep)
    if "reasoning" in kinds:
        _drop_reasoning(items, kinds, dropped, keep)
    if not dropped:
        return list(items)
    return [item for index, item in enumerate(items) if index not in dropped]


def pairs_of(items: Sequence[Item]) -> tuple[dict[int, Pair], dict[int, Pair]]:
    """The calls and the outputs by their indexes; a call is the same pair as its output.

    Searches for tools that the model's server makes may have no ids. An output without an id is
    that of the latest such call before it that has no output yet; both get an id here.
    """
    calls: dict[int, Pair] = {}
    outputs: dict[int, Pair] = {}
    unanswered = defaultdict[str, list[int]](list)
    for at, item in enumerate(items):
        if (kind := kind_of(item)) not in _PAIRED:
            continue
        is_call, owner = kind in OUTPUT_OF, at
        kind_of_output = OUTPUT_OF.get(kind, kind)
        if (call_id := _call_id_of(item, kind)) is None:
            if is_call:
                unanswered[kind_of_output].append(at)
            elif unanswered[kind]:
                owner = unanswered[kind].pop()
            call_id = f"without an id, at {owner}"
        (calls if is_call else outputs)[at] = (kind_of_output, call_id)
    return calls, outputs


def _orphans(items: Sequence[Item], pending: Collection[str], keep: Collection[int]) -> set[int]:
    """The indexes of calls without output, and of outputs without call."""
    calls, outputs = pairs_of(items)
    called, answered = set(calls.values()), set(outputs.values())
    if called == answered:
        return set()
    # A program whose own calls have outputs waits for nothing but the model.
    working = {(_PROGRAM_OUTPUT, _program_of(items[at])) for at in outputs}
    dropped = {at for at, pair in outputs.items() if pair not in called}
    for at, pair in calls.items():
        if not (pair in answered or pair[1] in pending or pair in working):
            dropped.add(at)
    dropped.difference_update(keep)
    if programs := {calls[at][1] for at in dropped if items[at].get("type") == "program"}:
        parts = {at for at, item in enumerate(items) if _program_of(item) in programs}
        dropped |= parts.difference(keep)
    return dropped


def _program_of(item: Item) -> str | None:
    """The id of the program that made this call."""
    caller = item.get("caller")
    if not isinstance(caller, dict) or caller.get("type") != "program":
        return None
    return caller.get("caller_id")


def _drop_reasoning(
    items: Sequence[Item], kinds: list[str], dropped: set[int], keep: Collection[int]
) -> None:
    """Drop reasoning that is not followed by something that the model made, or no longer is."""
    leads_to_item = False
    for at in range(len(items) - 1, -1, -1):
        if kinds[at] != "reasoning":
            by_others = kinds[at] in OUTPUTS or items[at].get("role", "assistant") != "assistant"
            leads_to_item = not by_others and at not in dropped
        elif not leads_to_item and at not in keep:
            dropped.add(at)


def for_model(items: Iterable[Item], *, keep_ids: bool = True) -> list[Item]:
    """The items as a model may be sent them: without metadata of servers and placeholders for ids.

    The given items are not changed. With `keep_ids=False`, for items that another provider made,
    ids go too, and with them reasoning that only its provider could look up.
    """
    if keep_ids:
        return [each if _MAYBE_LEFT_OUT.isdisjoint(each) else _for_model(each) for each in items]
    return [
        _without_id(_for_model(each))
        for each in items
        if each.get("type") != "reasoning" or each.get("encrypted_content")
    ]


def _for_model(item: Item) -> Item:
    item = _for_history(item)
    return _without(item, {"status"}) if kind_of(item) in _SENT_WITHOUT_STATUS else item


def _without_id(item: Item) -> Item:
    return item if kind_of(item) in _SENT_WITH_ID else _without(item, {"id"})


def for_history(items: Iterable[Item]) -> list[Item]:
    """The items as they are stored: without metadata that would never be sent to a model again.

    The given items are not changed. `for_model` makes the same of an item before and after this.
    """
    return [each if _MAYBE_LEFT_OUT.isdisjoint(each) else _for_history(each) for each in items]


def _for_history(item: Item) -> Item:
    left_out = set(_NEVER_STORED)
    if item.get("id") == _PLACEHOLDER_ID:
        left_out.add("id")
    if item.get("status") is None:
        left_out.add("status")
    return _without(item, left_out)


def _without(item: Item, names: Collection[str]) -> Item:
    return {key: value for key, value in item.items() if key not in names}
