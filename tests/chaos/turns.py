"""Cancelling a task after exactly so many turns of its event loop."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class Turns:
    """Counts the turns of the running loop and cancels `victim` at those that are listed."""

    def __init__(self, *at: int) -> None:
        self.count = 0
        self.victim: asyncio.Task[Any] | None = None
        self.has_cancelled = False
        self._at = at
        self._loop: Any = asyncio.get_running_loop()
        self._original = self._loop._run_once

    def __enter__(self) -> Self:
        self._loop._run_once = self._turn
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop._run_once

    def _turn(self) -> None:
        self._original()
        if self.victim is None or self.victim.done():
            return
        if self.count in self._at:
            self.has_cancelled |= self.victim.cancel()
        self.count += 1
