"""Contexts of callers: what a snapshot stores of them, and how they are restored.

A mapping of JSON values is stored and restored. Any other context needs a serializer from the
caller; without one, only its type and a warning are stored. Nothing is imported because a snapshot
names it. Values that look like secrets are left out unless the caller keeps them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from capsule_tasks.errors import ContextNotRestorable, ContextNotStorable
from capsule_tasks.runs.redaction import redacted, without_secrets
from capsule_tasks.runs.schema import Part

MAX_DEPTH = 100
MAX_INT_BITS = 14_000
"""Python refuses to write and read the digits of a number that is much larger."""


class SavedContext(Part, frozen=True, kw_only=True):
    """A context as a snapshot contains it; `type` is for people and causes no import."""

    kind: Literal["none", "mapping", "custom", "omitted"] = "none"
    type: str | None = None
    value: dict[str, Any] | None = None
    left_out: tuple[str, ...] = ()
    """The places where values were left out because they look like secrets."""
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
    """The part of a context that a snapshot may contain.

    With `strict`, ContextNotStorable refuses a context that could not be restored as it is. With
    `keep_secrets`, values that look like secrets are stored.
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
    """The context of a snapshot, or `override` if that is given.

    Raises ContextNotRestorable for a context that was not stored, or that needs its deserializer.
    """
    if override is not None or saved.kind == "none":
        return override
    value = copy.deepcopy(saved.value)
    if saved.kind == "omitted" or value is None:
        why = f"{saved.warning or 'not stored'}; give override= when the run is resumed"
    elif deserializer is not None:
        try:
            return deserializer(value)
        except Exception as error:  # noqa: BLE001  the caller's code may raise anything
            why = f"its deserializer raised {type(error).__qualname__}"
    elif saved.kind == "custom":
        why = "it was stored by a serializer; give deserializer="
    else:
        return value
    # Raised outside of the clause, so that it has no link to an error that may contain the values.
    raise ContextNotRestorable(saved.type or "unknown", why)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _as_mapping(context: Any, serializer: Serializer | None) -> tuple[dict[str, Any] | None, str]:
    if serializer is not None:
        context = serializer(context)
        if not isinstance(context, Mapping):
            return None, f"its serializer returned {type_name(context)}, not a mapping"
    elif not isinstance(context, Mapping):
        return None, "it is not a mapping, and no serializer was given"
    value = dict(context)
    found = problem_in(value)
    return (None, f"{redacted(found)}, which is not JSON") if found else (copy.deepcopy(value), "")


def problem_in(value: Any, at: str = "$", depth: int = 0) -> str | None:
    """The place and reason why a value is not JSON, without the value itself; None if it is JSON.

    A tuple is refused, because it would come back as a list.
    """
    kind = type(value)
    if value is None or kind in (str, bool):
        return None
    if kind is int:
        return f"{at} is a number of too many digits" if value.bit_length() > MAX_INT_BITS else None
    if kind is float:
        return None if math.isfinite(value) else f"{at} is not a finite number"
    if depth >= MAX_DEPTH:
        return f"{at} is nested more than {MAX_DEPTH} deep"
    if kind is list:
        found = (problem_in(each, f"{at}[{index}]", depth + 1) for index, each in enumerate(value))
        return next(filter(None, found), None)
    if kind is not dict:
        return f"{at} is of type {kind.__qualname__}"
    for key, each in value.items():
        if type(key) is not str:
            return f"{at} has a key of type {type(key).__qualname__}"
        if problem := problem_in(each, f"{at}.{key}", depth + 1):
            return problem
    return None
