"""What parent and template say to each other, one MessagePack struct a packet."""

from __future__ import annotations

import msgspec

MARKER_ROOM = 64
"""Bytes a template keeps free in its environment, so that a fork can show its own marker there."""


class Loaded(msgspec.Struct, kw_only=True):
    """The template's first word: it can be forked, or why it cannot."""

    pid: int
    error: str = ""


class Fork(msgspec.Struct, kw_only=True):
    """Asks for a child. Its ends of the wires come along as descriptors."""

    id: int
    marker: str
    parent_pid: int
    cwd: str | None = None
    env: dict[str, str] | None = None


class Forked(msgspec.Struct, kw_only=True):
    """The answer: a pid, or why there is none."""

    id: int
    pid: int = 0
    error: str = ""
