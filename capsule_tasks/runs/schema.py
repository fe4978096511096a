"""Versions of the stored form of a RunState: what each has, and how one becomes the next.

Writing always gives the current version, reading takes every version listed here. A version that
was released is never taken out: a parked run may be months old. A change that an older reader
would get wrong needs a new version: a line in SCHEMA_VERSION_SUMMARIES, its fields in FIELDS, a
step in MIGRATIONS and a fixture in `tests/fixtures/runstate/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import InvalidRunState, UnreadableSchema

VERSION_FIELD = "$schemaVersion"

SCHEMA_VERSION_SUMMARIES: dict[str, str] = {
    "1.0": "Turn, calls that wait for a decision, decisions, tool use, usage, context and trace.",
    "1.1": "Agents are named by identity, so that equal names in one graph stay apart.",
    "1.2": "Runs inside of a tool call, and conversations that a server keeps.",
}
"""In the order in which they were introduced; the last is the one that is written."""

SUPPORTED_SCHEMA_VERSIONS = tuple(SCHEMA_VERSION_SUMMARIES)
CURRENT_SCHEMA_VERSION = SUPPORTED_SCHEMA_VERSIONS[-1]

_FIRST_FIELDS = frozenset(
    {
        "run_id",
        "start_agent",
        "agent",
        "turn",
        "max_turns",
        "input",
        "stored_items",
        "held_items",
        "calls",
        "approvals",
        "tool_use",
        "usage",
        "context",
        "trace",
    }
)
FIELDS: dict[str, frozenset[str]] = {
    "1.0": _FIRST_FIELDS,
    "1.1": _FIRST_FIELDS,
    "1.2": _FIRST_FIELDS | {"nested", "conversation"},
}
"""What a snapshot of each version may have; anything else means that its label is wrong."""
REQUIRED = frozenset({"run_id", "start_agent", "agent"})

Snapshot = dict[str, Any]


def migrated(data: Any) -> Snapshot:
    """The fields of a snapshot in the shape of the current version; the snapshot is left alone.

    Raises UnreadableSchema for a version that is not listed, InvalidRunState for a snapshot that
    is not what its label says.
    """
    version = version_of(data)
    if version not in SCHEMA_VERSION_SUMMARIES:
        raise UnreadableSchema(version, SUPPORTED_SCHEMA_VERSIONS)
    fields = {name: value for name, value in data.items() if name != VERSION_FIELD}
    if strange := sorted(map(str, fields.keys() - FIELDS[version])):
        raise InvalidRunState(f"$.{strange[0]:.60}", f"version {version} has no such field")
    if missing := sorted(REQUIRED - fields.keys()):
        raise InvalidRunState(f"$.{missing[0]}", "it is missing")
    for before in SUPPORTED_SCHEMA_VERSIONS[SUPPORTED_SCHEMA_VERSIONS.index(version) : -1]:
        try:
            fields = MIGRATIONS[before](fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"it has not the shape of version {before} ({type(error).__name__})"
            raise InvalidRunState("$", why) from None
    return fields


def version_of(data: Any) -> str:
    """The version on the label of a snapshot."""
    if not isinstance(data, dict):
        raise InvalidRunState("$", f"it is of type {type(data).__name__}, not an object")
    version = data.get(VERSION_FIELD)
    if not isinstance(version, str):
        raise InvalidRunState(f"$.{VERSION_FIELD}", "a snapshot says its version there, as text")
    return version


def _named_agents_to_identities(fields: Snapshot) -> Snapshot:
    """1.0 → 1.1: an agent was its name, and per-agent tables were objects under that name."""

    def identity(name: Any) -> dict[str, Any]:
        if not isinstance(name, str):
            raise TypeError
        return {"name": name}

    def of(parts: list[Snapshot]) -> list[Snapshot]:
        return [{**part, "agent": identity(part["agent"])} for part in parts]

    changed = {
        **fields,
        "start_agent": identity(fields["start_agent"]),
        "agent": identity(fields["agent"]),
    }
    if "calls" in fields:
        changed["calls"] = of(fields["calls"])
    if "approvals" in fields:
        changed["approvals"] = {name: of(each) for name, each in fields["approvals"].items()}
    if "tool_use" in fields:
        pairs = fields["tool_use"].items()
        changed["tool_use"] = [{"agent": identity(name), "tools": used} for name, used in pairs]
    if "usage" in fields:
        pairs = fields["usage"].items()
        changed["usage"] = [{**spent, "agent": identity(name)} for name, spent in pairs]
    return changed


def _without_nested_runs(fields: Snapshot) -> Snapshot:
    """1.1 → 1.2: there were no runs inside of calls and no conversations of a server's."""
    return fields


MIGRATIONS: dict[str, Callable[[Snapshot], Snapshot]] = {
    "1.0": _named_agents_to_identities,
    "1.1": _without_nested_runs,
}
"""By the version that each starts from; each leads to the next in SCHEMA_VERSION_SUMMARIES."""
