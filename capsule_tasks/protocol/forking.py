"""Messages between parent and template, one MessagePack struct in each packet."""

from __future__ import annotations

import msgspec

MARKER_ROOM = 64
"""Bytes that a template reserves in its environment for the marker of a fork."""


class Fork(msgspec.Struct, kw_only=True):
    """Asks for a child. The child's descriptors are sent along."""

    id: int
    marker: str
    parent_pid: int
    cwd: str | None = None
    env: dict[str, str] | None = None


class Forked(msgspec.Struct, kw_only=True):
    """The answer to `Fork`: a pid, or why there is none.

    The template's first message, with the id 0, says that it can be forked, or why it cannot.
    """

    id: int = 0
    pid: int = 0
    error: str = ""
