"""What the text streams of a session have in common, whichever way their text goes."""

from __future__ import annotations

import io


class SessionStream(io.TextIOBase):
    """`sys.stdin`, `sys.stdout` or `sys.stderr` of a session; there is no terminal behind it."""

    def isatty(self) -> bool:
        return False

    def reconfigure(
        self,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        line_buffering: bool | None = None,
        write_through: bool | None = None,
    ) -> None:
        """Accepted, as programs begin with it; text stays text on its way."""

    def close(self) -> None:
        """A session's streams outlive whoever closes them (`quit()` closes its input)."""
