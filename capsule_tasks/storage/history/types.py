"""Values that a history returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.storage.codec import Item


class Version(NamedTuple):
    """Identifies what was read, for a replacement of exactly that."""

    generation: str
    """Changes whenever items are removed, not when they are appended; 0 for no history."""
    start: int
    stop: int
    corrupt: tuple[int, ...] = ()
    """Indexes of records in between that could not be read."""
    pruned: int = 0
    """How many of the oldest records, all before `start`, are removed in the same step."""


def limit_of(session_settings: Any) -> Any:
    """The `limit` of a mapping or an object; refuses settings that have none."""
    if isinstance(session_settings, Mapping):
        unknown = sorted(repr(key) for key in session_settings.keys() - {"limit"})
        if not unknown:
            return session_settings.get("limit")
        must = f"without {', '.join(unknown)}: `limit` is the only setting there is"
        raise InvalidSetting("session_settings", session_settings, must)
    if session_settings is None or hasattr(session_settings, "limit"):
        return getattr(session_settings, "limit", None)
    must = "None, a mapping such as {'limit': 20}, or an object with the attribute `limit`"
    raise InvalidSetting("session_settings", session_settings, must)


class SessionLimit(dict[str, Any]):
    """The limit of some settings in the shapes in which openai-agents reads `session_settings`.

    Its Runner asks for `limit` and calls `resolve`; its EncryptedSession takes a dict.
    """

    def __init__(self, given: Any) -> None:
        super().__init__(limit=limit_of(given))
        self._given = given

    @property
    def limit(self) -> Any:
        return self["limit"]

    @limit.setter
    def limit(self, value: Any) -> None:
        self["limit"] = value
        if isinstance(self._given, Mapping):
            self._given["limit"] = value  # type: ignore[index]  # raises as the mapping does
        else:
            self._given.limit = value

    def resolve(self, override: Any) -> SessionLimit:
        """These settings under those of a run, whose limit goes first if it has one."""
        return self if limit_of(override) is None else SessionLimit(override)


@dataclass(frozen=True)
class Snapshot:
    """A history, or its end, at one moment."""

    items: list[Any]
    version: Version

    @property
    def corrupt(self) -> int:
        """How many records among them could not be read, and were skipped."""
        return len(self.version.corrupt)

    @property
    def is_whole(self) -> bool:
        """Whether nothing lies before what was read."""
        return self.version.start == 0


@dataclass(frozen=True)
class PoppedSuffix:
    """Whether the expected end was removed; if not, nothing was, and `found` is the end."""

    removed: bool
    found: list[Any]
    """The readable items at the end, at most as many as were expected."""

    def __bool__(self) -> bool:
        return self.removed


@dataclass(frozen=True)
class HistoryInfo:
    """A history without its items. The times of a history that does not exist are None."""

    session_id: str
    items: int
    bytes: int
    created_at: datetime | None
    updated_at: datetime | None
    expires_in_s: float | None
    quarantined: int

    @property
    def exists(self) -> bool:
        return self.created_at is not None


@dataclass(frozen=True)
class CompactionSnapshot:
    """The end of a history, and a way to replace it from one of its items on.

    `replace_suffix(start, items)` answers whether it did; what was appended since stays behind.
    """

    items: list[Item]
    complete: bool
    replace_suffix: Callable[[int, list[Item]], Awaitable[bool]]
