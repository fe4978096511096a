"""Checks of what callers give to the store of runs, before any of it is written.

Redis turns numbers into text, and Lua takes any text for true: a value of a wrong type could become
another id, or make a call happen twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, PlannedCall

LARGEST = 2**53
"""Numbers up to here are exact in Lua."""
MAX_CALLS = 1000
"""Calls that may wait, start or end in one script, which blocks the server meanwhile."""


def check_text(name: str, *values: Any) -> None:
    for value in values:
        if not isinstance(value, str) or not value or not _is_utf8(value):
            raise InvalidSetting(name, value, "text, not empty, that UTF-8 can write")


def check_string(name: str, value: Any) -> None:
    """A text that may be empty; characters that UTF-8 cannot encode are escaped."""
    if value is not None and not isinstance(value, str):
        raise InvalidSetting(name, value, f"text, and is of type {type(value).__name__}")


def check_names(name: str, values: Any) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
        raise InvalidSetting(name, values, "several names, not one text")
    check_text(name, *values)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidSetting(name, value, "True or False")


def check_count(name: str, value: Any, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidSetting(name, value, f"a whole number from {minimum} to {maximum}")


def check_claim(claim: Any) -> None:
    """A claim that a caller has stored and loaded may have changed its types."""
    if not isinstance(claim, Claim):
        raise InvalidSetting("claim", type(claim).__name__, "the Claim that claim or commit gave")
    check_count("claim.token", claim.token, 1, LARGEST)
    check_count("claim.revision", claim.revision, 1, LARGEST)


def check_items(items: Any) -> None:
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise InvalidSetting("items", type(items).__name__, "several items, as in a list")


def check_outputs(outputs: Any) -> None:
    if not isinstance(outputs, Mapping):
        raise InvalidSetting("outputs", type(outputs).__name__, "a mapping of call ids to bytes")
    check_number("outputs", len(outputs))
    for call_id, output in outputs.items():
        escaped("call id", call_id)
        if not isinstance(output, bytes):
            kind = type(output).__name__
            raise InvalidSetting(f"the output of call {call_id!r:.100}", kind, "bytes")


def check_requests(requests: Sequence[ApprovalRequest]) -> None:
    """Refuse requests that could not be stored or decided, and duplicates."""
    _check_sequence("approval_requests", requests)
    for request in requests:
        if not isinstance(request, ApprovalRequest):
            raise InvalidSetting("approval_requests", request, "several of ApprovalRequest")
        _check_request(request)
    _check_once("approval_requests", [request.call_id for request in requests])


def check_calls(calls: Sequence[PlannedCall]) -> None:
    """Refuse duplicates: each of the two calls would be answered `go`."""
    _check_sequence("calls", calls)
    for call in calls:
        if not isinstance(call, PlannedCall):
            raise InvalidSetting("calls", call, "several of PlannedCall")
        escaped("call id", call.call_id)
        check_text("fingerprint", call.fingerprint)
        check_flag("retry", call.retry)
    _check_once("calls", [call.call_id for call in calls])


def check_number(name: str, count: int) -> None:
    if count > MAX_CALLS:
        raise InvalidSetting(name, f"{count} calls", f"at most {MAX_CALLS} at once")


def _check_sequence(name: str, values: Any) -> None:
    """Refuse iterators: the values are read more than once."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidSetting(name, type(values).__name__, "a list or a tuple")
    check_number(name, len(values))


def _check_request(request: ApprovalRequest) -> None:
    escaped("call id", request.call_id)
    for name in ("tool", "agent", "fingerprint"):
        check_text(name, getattr(request, name))
    check_string("arguments", request.arguments)
    if request.arguments is None:
        raise InvalidSetting("arguments", None, "text")
    if request.on_expiry not in ("reject", "approve", "cancel"):
        raise InvalidSetting("on_expiry", request.on_expiry, "'reject', 'approve' or 'cancel'")
    if request.expires_in_s is not None and not _is_time(request.expires_in_s):
        raise InvalidSetting("expires_in", request.expires_in_s, "a number of seconds over 0")
    if request.may_decide is not None:
        check_names("may_decide", request.may_decide)
        if not request.may_decide:
            raise InvalidSetting("may_decide", request.may_decide, "None, or at minimum one name")


def _check_once(name: str, call_ids: list[str]) -> None:
    (call_id, count), *_ = Counter(call_ids).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidSetting(name, call_id, "calls of different ids; this one is there twice")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 10**9


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
