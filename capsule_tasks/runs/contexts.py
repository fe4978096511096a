"""What of a caller's context goes into a snapshot, and how it comes back.

A mapping of JSON values is stored and comes back. Anything else needs a serializer of the caller's;
without one only its type and a warning are stored. No type is ever looked up by a name that stands
in a snapshot. What looks like a secret stays out unless the caller keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from capsule_tasks.errors import ContextNotRestorable, ContextNotStorable
from capsule_tasks.runs.jsonable import problem_in
from capsule_tasks.runs.redaction import SECRET_NAMES, is_secret_name, redacted, without_secrets

__all__ = [
    "SECRET_NAMES",
    "SavedContext",
    "is_secret_name",
    "restored_context",
    "saved_context",
    "type_name",
]


class SavedContext(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A context as a snapshot holds it; `type` is for people and leads to no import."""

    kind: Literal["none", "mapping", "custom", "omitted"] = "none"
    type: str | None = None
    value: dict[str, Any] | None = None
    left_out: tuple[str, ...] = ()
    """Where values were left out because their names look like secrets."""
    warning: str | None = None


Serializer = Callable[[Any], Mapping[str, Any]]
Deserializer = Callable[[dict[str, Any]], Any]


def saved_context(
    context: Any,
    *,
    serializer: Serializer | None = None,
    strict: bool = False,
    keep_secrets: bool = False,
) -> SavedContext:
    """The part of a context that a snapshot may hold.

    `strict` refuses a context that would not come back whole. `keep_secrets` is the caller's word
    that what looks like a secret may be stored.
    """
    if context is None:
        return SavedContext()
    kind = type_name(context)
    value, why = _as_mapping(context, serializer)
    if value is None:
        if strict or serializer is not None:
            raise ContextNotStorable(kind, why)
        return SavedContext(kind="omitted", type=kind, warning=f"not stored: {why}")
    value, left_out = (value, ()) if keep_secrets else without_secrets(value)
    if left_out and strict:
        raise ContextNotStorable(kind, f"{', '.join(left_out)} look like secrets")
    warning = f"left out, as they look like secrets: {', '.join(left_out)}" if left_out else None
    return SavedContext(
        kind="custom" if serializer else "mapping",
        type=kind,
        value=value,
        left_out=left_out,
        warning=warning,
    )


def restored_context(
    saved: SavedContext, *, deserializer: Deserializer | None = None, override: Any = None
) -> Any:
    """The context that a snapshot holds, or the one that the caller gives in its place."""
    if override is not None or saved.kind == "none":
        return override
    if saved.kind == "omitted" or saved.value is None:
        why = f"{saved.warning or 'not stored'}; give one when the run is resumed"
        raise ContextNotRestorable(saved.type or "unknown", why)
    if deserializer is not None:
        return _deserialized(saved, deserializer)
    if saved.kind == "custom":
        raise ContextNotRestorable(saved.type or "unknown", "it needs its deserializer")
    return copy.deepcopy(saved.value)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _deserialized(saved: SavedContext, deserializer: Deserializer) -> Any:
    try:
        return deserializer(copy.deepcopy(saved.value or {}))
    except Exception as error:  # noqa: BLE001  the caller's code may raise anything
        why = f"its deserializer raised {type(error).__qualname__}"
    # Outside of the clause, so that nothing links to an error whose text may hold the values.
    raise ContextNotRestorable(saved.type or "unknown", why)


def _as_mapping(context: Any, serializer: Serializer | None) -> tuple[dict[str, Any] | None, str]:
    if serializer is not None:
        context = serializer(context)
        if not isinstance(context, Mapping):
            return None, f"its serializer returned {type_name(context)}, not a mapping"
    elif not isinstance(context, Mapping):
        return None, "it is no mapping, and no serializer was given"
    value = dict(context)
    found = problem_in(value)
    return (None, f"{redacted(found)}, which is not JSON") if found else (copy.deepcopy(value), "")
