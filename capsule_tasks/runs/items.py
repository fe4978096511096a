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
from typing import Any

import msgspec

from capsule_tasks.errors import InvalidSetting
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
_OUTPUTS = frozenset(OUTPUT_OF.values())
_PAIRED = _OUTPUTS | OUTPUT_OF.keys()

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
_encode_as_given = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def normalized(given: str | Iterable[Any], *, name: str = "input") -> list[Item]:
    """Items as plain dicts. A text is a message of the user.

    Mappings and objects of pydantic become dicts. Raises InvalidSetting, which names the place, for
    what is no item: one that has neither a type nor a role, or that is not JSON.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise InvalidSetting(name, given, "a text or a list of items")
    return [_item(each, f"{name}[{index}]") for index, each in enumerate(given)]


def _item(given: Any, name: str) -> Item:
    if not (type(given) is dict and _is_plain(given)):
        given = _plain(given)
        if not isinstance(given, dict):
            must = "an item: a mapping such as {'role': 'user', 'content': 'Hello'}"
            raise InvalidSetting(name, given, must)
        if (problem := problem_in(given)) is not None:
            raise InvalidSetting(name, given, f"JSON, and {problem}")
    for key in ("type", "role"):
        if isinstance(given.get(key), str) and given[key]:
            return given
    raise InvalidSetting(name, given, "an item, which has a `type` or a `role`")


def _is_plain(item: Item) -> bool:
    """Whether an item would come back from the history as it is."""
    try:
        return bool(_decode(_encode_as_given(item)) == item)
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
        for item in items:
            self._sha256.update(_canonical(item) + b"\n")
            self.count += 1

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
    if kind == "mcp_approval_request":
        found = item.get("id")
    elif kind == "mcp_approval_response":
        found = item.get("approval_request_id")
    elif kind in OUTPUT_OF or kind in _OUTPUTS:
        found = item.get("call_id") or item.get("id")
    else:
        return None
    return found if isinstance(found, str) and found else None


def identity(item: Item) -> str | None:
    """A text that two versions of one item share: its type with the id of its call, or its own id.

    None for an item without an id, which is never a duplicate. A message is identified by its
    content too, since many servers give the same id to every message.
    """
    key = _key(item)
    return f"{key} {digest(item)}" if key and key.startswith("message ") else key


def _key(item: Item) -> str | None:
    """What the identity of an item begins with; items with different ones are no duplicates."""
    kind = kind_of(item)
    found = call_id_of(item) if kind in _PAIRED else item.get("id")
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
    dropped = _orphans(items, pending, keep)
    _drop_reasoning(items, dropped, keep)
    if not dropped:
        return list(items)
    return [item for index, item in enumerate(items) if index not in dropped]


def _orphans(items: Sequence[Item], pending: Collection[str], keep: Collection[int]) -> set[int]:
    """The indexes of calls without output, and of outputs without call."""
    pairs = _pairs(items)
    calls = {(OUTPUT_OF[kind], of) for kind, of in pairs.values() if kind in OUTPUT_OF}
    outputs = {(kind, of) for kind, of in pairs.values() if kind in _OUTPUTS}
    if calls == outputs:
        return set()
    working = _programs_with_outputs(items)
    dropped: set[int] = set()
    for at, (kind, call_id) in pairs.items():
        if kind in _OUTPUTS:
            is_orphan = (kind, call_id) not in calls
        else:
            waits = call_id in pending or (kind == "program" and call_id in working)
            is_orphan = not waits and (OUTPUT_OF[kind], call_id) not in outputs
        if is_orphan and at not in keep:
            dropped.add(at)
    _drop_parts_of_programs(items, dropped, keep)
    return dropped


def _pairs(items: Sequence[Item]) -> dict[int, tuple[str, str]]:
    """The type and call id of each call and each output, by its index.

    Searches for tools that the model's server makes may have no ids. An output without an id is
    that of the latest such call before it that has no output yet; both get an id here.
    """
    pairs: dict[int, tuple[str, str]] = {}
    unanswered = defaultdict[str, list[int]](list)
    for at, item in enumerate(items):
        kind = kind_of(item)
        if kind not in _PAIRED:
            continue
        if (call_id := call_id_of(item)) is None:
            owner = at
            if kind in OUTPUT_OF:
                unanswered[OUTPUT_OF[kind]].append(at)
            elif unanswered[kind]:
                owner = unanswered[kind].pop()
            call_id = f"without an id, at {owner}"
        pairs[at] = (kind, call_id)
    return pairs


def _programs_with_outputs(items: Sequence[Item]) -> set[str]:
    """The ids of programs that wait for nothing but the model: their own calls have outputs."""
    owners = (_program_of(item) for item in items if kind_of(item) in _OUTPUTS)
    return {owner for owner in owners if owner is not None}


def _drop_parts_of_programs(
    items: Sequence[Item], dropped: set[int], keep: Collection[int]
) -> None:
    """Drop what belongs to a dropped program."""
    programs = {call_id_of(items[at]) for at in dropped if items[at].get("type") == "program"}
    if programs:
        parts = (index for index, item in enumerate(items) if _program_of(item) in programs)
        dropped.update(index for index in parts if index not in keep)


def _program_of(item: Item) -> str | None:
    """The id of the program that made this call."""
    caller = item.get("caller")
    if not isinstance(caller, dict) or caller.get("type") != "program":
        return None
    return caller.get("caller_id")


def _drop_reasoning(items: Sequence[Item], dropped: set[int], keep: Collection[int]) -> None:
    """Drop reasoning that is not followed by something that the model made, or no longer is."""
    leads_to_item = False
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        kind = kind_of(item)
        if kind != "reasoning":
            by_others = kind in _OUTPUTS or item.get("role", "assistant") != "assistant"
            leads_to_item = not by_others and index not in dropped
        elif not leads_to_item and index not in keep:
            dropped.add(index)


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
    kind = kind_of(item)
    item = _for_history(item)
    if "status" in item and kind in _SENT_WITHOUT_STATUS:
        item = {key: value for key, value in item.items() if key != "status"}
    return item


def _without_id(item: Item) -> Item:
    if "id" not in item or kind_of(item) in _SENT_WITH_ID:
        return item
    return {key: value for key, value in item.items() if key != "id"}


def for_history(items: Iterable[Item]) -> list[Item]:
    """The items as they are stored: without metadata that would never be sent to a model again.

    The given items are not changed. `for_model` makes the same of an item before and after this.
    """
    return [each if _MAYBE_LEFT_OUT.isdisjoint(each) else _for_history(each) for each in items]


def _for_history(item: Item) -> Item:
    has_placeholder = item.get("id") == _PLACEHOLDER_ID
    has_no_status = "status" in item and item["status"] is None
    if _NEVER_STORED.isdisjoint(item) and not has_placeholder and not has_no_status:
        return item
    return {
        key: value
        for key, value in item.items()
        if not (
            key in _NEVER_STORED
            or (has_placeholder and key == "id")
            or (has_no_status and key == "status")
        )
    }
