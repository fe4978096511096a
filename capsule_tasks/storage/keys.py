"""Every key in Redis is spelled here.

What one script touches has one hash tag, in braces, and so is in one slot of a cluster. An id is
escaped byte by byte: no two ids have the same spelling, and none can end a tag or add a part.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from capsule_tasks.errors import InvalidId, InvalidSetting

MAX_ID_BYTES = 512
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def escaped(what: str, value: Any) -> str:
    """The id as it stands in a key; refuses what is no text, empty, or over 512 bytes."""
    if not isinstance(value, str):
        raise InvalidId(what, value, f"must be text, and is of type {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidId(what, value, "cannot be written as UTF-8") from None
    if not value:
        raise InvalidId(what, value, "must not be empty")
    if size > MAX_ID_BYTES:
        raise InvalidId(what, value, f"has {size} bytes; at most {MAX_ID_BYTES} are possible")
    return quote(value, safe="@+=,/")


def checked_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        must = "1 to 128 letters, digits, or one of _ . : / -"
        raise InvalidSetting("prefix", prefix, must)
    return prefix


class SessionKeys:
    """The keys of one named session, all in one slot."""

    __slots__ = ("_root", "bad", "batches", "history", "items")

    def __init__(self, session_id: str, prefix: str = "capsule") -> None:
        self._root = f"{checked_prefix(prefix)}:{{S:{escaped('session id', session_id)}}}"
        self.items = f"{self._root}:items"
        self.history = f"{self._root}:history"
        self.batches = f"{self._root}:batches"
        self.bad = f"{self._root}:bad"

    def stage(self, operation: str) -> str:
        return f"{self._root}:stage:{escaped('operation', operation)}"
