"""Versions of the stored form of a RunState, and the migrations between them.

Writing always uses the current version; reading accepts every version listed here. A released
version is never removed, because a parked run may be months old. A change that an older reader
would misread needs a new version: a line in SCHEMA_VERSION_SUMMARIES, a step in MIGRATIONS and a
fixture in `tests/fixtures/runstate/`. The fields of the current version are those of RunState.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from capsule_tasks.errors import InvalidRunState, UnreadableSchema

VERSION_FIELD = "$schemaVersion"

SCHEMA_VERSION_SUMMARIES: dict[str, str] = {
    "1.0": "Waiting calls, decisions, tool use, usage, context, trace, nested runs, conversation.",
    "1.1": "Replies of models, results of guardrails, filtered input, code session, more usage.",
    "1.2": "Digests of a run's first and last stored items, and of where a filtered input ends.",
}
"""In the order of their introduction; writing uses the last one."""

SUPPORTED_SCHEMA_VERSIONS = tuple(SCHEMA_VERSION_SUMMARIES)
CURRENT_SCHEMA_VERSION = SUPPORTED_SCHEMA_VERSIONS[-1]

Snapshot = dict[str, Any]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a snapshot. A field that equals its default is not written."""


_FIELDS_OF_1_0 = frozenset(
    (
        *("run_id", "start_agent", "agent", "turn", "max_turns", "input", "stored_items"),
        *("held_items", "calls", "approvals", "tool_use", "usage", "context", "trace"),
        *("nested", "conversation"),
    )
)
_USAGE_OF_1_0 = frozenset(("agent", "requests", "input_tokens", "output_tokens"))
_FIELDS_OF_1_1 = _FIELDS_OF_1_0 | {"responses", "guardrails", "filtered_input", "code"}
_FILTERED_INPUT_OF_1_1 = frozenset(("items", "stands_for"))


def _from_1_0(fields: Snapshot) -> Snapshot:
    """Nothing has changed but for what 1.0 did not have."""
    _refuse_others(fields, _FIELDS_OF_1_0)
    for use in fields.get("usage", ()):
        _refuse_others(use, _USAGE_OF_1_0)
    return _with_nested(fields, _from_1_0)


def _from_1_1(fields: Snapshot) -> Snapshot:
    """Nothing has changed but for what 1.1 did not have."""
    _refuse_others(fields, _FIELDS_OF_1_1)
    _refuse_others(fields.get("filtered_input") or {}, _FILTERED_INPUT_OF_1_1)
    return _with_nested(fields, _from_1_1)


def _refuse_others(part: Snapshot, known: frozenset[str]) -> None:
    if part.keys() - known:
        raise ValueError("a field of a later version")


def _with_nested(fields: Snapshot, migration: Callable[[Snapshot], Snapshot]) -> Snapshot:
    if "nested" not in fields:
        return fields
    nested = {call_id: migration(inner) for call_id, inner in fields["nested"].items()}
    return {**fields, "nested": nested}


MIGRATIONS: dict[str, Callable[[Snapshot], Snapshot]] = {"1.0": _from_1_0, "1.1": _from_1_1}
"""By the version that each migration starts from; each leads to the next supported version. A
migration returns new fields. It raises ValueError for fields that its version did not have, since
such a snapshot has the wrong label."""


def migrated(data: Any) -> Snapshot:
    """The fields of a snapshot in the shape of the current version; `data` is not changed.

    Raises UnreadableSchema for an unsupported version, InvalidRunState for a snapshot that does
    not fit its version.
    """
    if not isinstance(data, dict):
        raise InvalidRunState("$", f"it is of type {type(data).__name__}, not an object")
    version = data.get(VERSION_FIELD)
    if not isinstance(version, str):
        raise InvalidRunState(f"$.{VERSION_FIELD}", "the schema version has to be text")
    if version not in SUPPORTED_SCHEMA_VERSIONS:
        raise UnreadableSchema(version, SUPPORTED_SCHEMA_VERSIONS)
    fields = {name: value for name, value in data.items() if name != VERSION_FIELD}
    for before in SUPPORTED_SCHEMA_VERSIONS[SUPPORTED_SCHEMA_VERSIONS.index(version) : -1]:
        try:
            fields = MIGRATIONS[before](fields)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"it does not have the shape of version {before} ({type(error).__name__})"
            raise InvalidRunState("$", why) from None
    return fields
