"""Descriptions of saved namespaces for parents and stores. Only a child can read the data."""

from __future__ import annotations

import msgspec

MAX_PIECE_BYTES = 1024 * 1024


def piece_bytes(ceiling: int) -> int:
    """The size of all pieces but the last, where frames have this ceiling."""
    return min(MAX_PIECE_BYTES, ceiling // 2)


class SavedNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that a child has saved, in pieces of at most a MiB."""

    pieces: tuple[bytes, ...]
    """Opaque. To open them runs code of whoever made them, so only a child does."""
    saved: tuple[str, ...] = ()
    """The names that come back with a restore."""
    skipped: dict[str, str] = {}
    """The names that could not be saved, with the reasons."""
    python: str = ""
    """The version of Python in the child."""
    packages: dict[str, str] = {}
    """The versions of the packages that the namespace uses."""

    @property
    def size(self) -> int:
        """Bytes of all pieces together."""
        return sum(map(len, self.pieces))

    @property
    def data(self) -> bytes:
        """The pieces as one."""
        return b"".join(self.pieces)
