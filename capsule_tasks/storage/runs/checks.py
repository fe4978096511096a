"""Checks of what callers give to the store of runs, before any of it is written.

Redis turns numbers into text, and Lua takes any text for true: a value of a wrong type could become
another id, or make a call happen twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import Text, check_value
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, PlannedCall

Turn = Annotated[int, Meta(ge=0, le=2**53)]
"""Numbers up to here are exact in Lua."""
PageSize = Annotated[int, Meta(ge=1, le=10_000)]
OptionalText = str | None
"""May be empty; characters that UTF-8 cannot encode are escaped."""
MAX_CALLS = 1000
"""Calls that may wait, start or end in one script, which blocks the server meanwhile."""

_Exact = Annotated[int, Meta(ge=1, le=2**53)]


def check_names(name: str, values: Any) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
        raise InvalidSetting(name, values, "several names, not one text")
    for value in values:
        check_value(name, value, Text)


def check_claim(claim: Any) -> None:
    """Refuse what is no claim; one that a caller has stored and loaded may have other types."""
    if not isinstance(claim, Claim):
        raise InvalidSetting("claim", type(claim).__name__, "the Claim that claim or commit gave")
    check_value("claim.token", claim.token, _Exact)
    check_value("claim.revision", claim.revision, _Exact)


def check_outputs(outputs: Any) -> None:
    if not isinstance(outputs, Mapping):
        raise InvalidSetting("outputs", type(outputs).__name__, "a mapping of call ids to bytes")
    _check_number("outputs", len(outputs))
    for call_id, output in outputs.items():
        escaped("call id", call_id)
        if not isinstance(output, bytes):
            kind = type(output).__name__
            raise InvalidSetting(f"the output of call {call_id!r:.100}", kind, "bytes")


def check_calls(name: str, calls: Any, kind: type[ApprovalRequest | PlannedCall]) -> None:
    """Refuse an iterator, as the calls are read more than once, and two calls with one id."""
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise InvalidSetting(name, type(calls).__name__, "a list or a tuple")
    _check_number(name, len(calls))
    known = set[str]()
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidSetting(name, call, f"several of {kind.__name__}")
        escaped("call id", call.call_id)
        if call.call_id in known:
            must = "calls of different ids; this one is there twice"
            raise InvalidSetting(name, call.call_id, must)
        known.add(call.call_id)


def _check_number(name: str, count: int) -> None:
    if count > MAX_CALLS:
        raise InvalidSetting(name, f"{count} calls", f"at most {MAX_CALLS} at once")
