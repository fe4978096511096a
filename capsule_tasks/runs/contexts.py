"""What of a caller's context goes into a snapshot, and how it comes back.

A mapping of JSON values is stored and comes back. Anything else needs a serializer of the caller's;
without one only its type and a warning are stored. No type is ever looked up by a name that stands
in a snapshot. Values under names that look like secrets stay out unless the caller keeps them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from capsule_tasks.errors import ContextNotRestorable, ContextNotStorable
from capsule_tasks.runs.jsonable import flaw

SECRET_NAMES = (
    "*access_key*",
    "*accesskey*",
    "*api_key*",
    "*apikey*",
    "auth",
    "*_auth",
    "*authorization*",
    "*bearer*",
    "*connection_string*",
    "*cookie*",
    "*credential*",
    "*encryption_key*",
    "*headers*",
    "*jwt",
    "*passphrase*",
    "*passwd*",
    "*password*",
    "*private_key*",
    "*privatekey*",
    "pwd",
    "*_pwd",
    "*secret*",
    "*session_key*",
    "*signing_key*",
    "*token",
    "*tokens",
)
"""Shell patterns of the names, in lower case and with `_` for `-`, `.` and blanks, whose values are
left out. Under those of tokens a number is kept: it counts them."""

_URL_WITH_PASSWORD = re.compile(r"://[^/?#\s:@]*:[^/?#\s@]+@")


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
    value, left_out = (value, ()) if keep_secrets else _without_secrets(value)
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
    found = flaw(value)
    return (None, f"{found}, which is not JSON") if found else (copy.deepcopy(value), "")


def _without_secrets(value: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    left_out: list[str] = []

    def kept(part: Any, at: str) -> Any:
        if isinstance(part, list):
            return [kept(each, f"{at}[{index}]") for index, each in enumerate(part)]
        if not isinstance(part, dict):
            return part
        shown = {}
        for key, each in part.items():
            if _is_secret(key, each):
                left_out.append(f"{at}.{key}")
            else:
                shown[key] = kept(each, f"{at}.{key}")
        return shown

    shown: dict[str, Any] = kept(value, "$")
    return shown, tuple(left_out)


def is_secret_name(name: str) -> bool:
    return any(fnmatchcase(_spelled(name), pattern) for pattern in SECRET_NAMES)


def _is_secret(name: str, value: Any) -> bool:
    if isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
        return True
    is_count = isinstance(value, (int, float)) and _spelled(name).endswith(("token", "tokens"))
    return is_secret_name(name) and not is_count


def _spelled(name: str) -> str:
    return re.sub(r"[-. ]", "_", name.lower())
