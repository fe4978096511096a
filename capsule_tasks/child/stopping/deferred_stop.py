"""Where a stop lands that came while this package's own code had the main thread.

It is not raised there: a lock could stay held, a frame half written. It is noted, and raised as
soon as that code is done, on the way back to the user code that had called it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

INTERRUPTIBLE: set[CodeType] = set()


def interruptible(function: Function) -> Function:
    """Mark a function of this package that holds nothing: a stop may leave it at any point."""
    INTERRUPTIBLE.add(function.__code__)
    return function


class Landing:
    """`pending` is looked at last by functions that user code calls and that may take a while."""

    __slots__ = ("_main", "_raise_in", "pending")

    def __init__(self) -> None:
        self.pending = False
        self._main: int | None = None
        self._raise_in: Callable[[FrameType], None] = lambda _: None

    def connect(self, raise_in: Callable[[FrameType], None]) -> None:
        """Called on the main thread; `raise_in` raises what is due in a frame, if anything is."""
        self._main = threading.get_ident()
        self._raise_in = raise_in

    def raise_pending(self) -> None:
        """Raise in the caller what was put off, if this is the thread it was meant for."""
        if threading.get_ident() == self._main:
            self.pending = False
            self._raise_in(sys._getframe(1))  # noqa: SLF001 - made for this


landing = Landing()
