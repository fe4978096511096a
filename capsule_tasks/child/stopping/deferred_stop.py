"""A stop that arrives while code of this package has the main thread.

Raised there, it could leave a lock held or a frame half written. So it is deferred, and raised when
that code returns to the user code that called it.
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


class DeferredStop:
    """Functions that user code calls, and that may take long, check `is_pending` at their end."""

    __slots__ = ("_main", "_raise_in", "is_pending")

    def __init__(self) -> None:
        self.is_pending = False
        self._main: int | None = None
        self._raise_in: Callable[[FrameType], None] = lambda _: None

    def connect(self, raise_in: Callable[[FrameType], None]) -> None:
        """Called on the main thread; `raise_in` raises what is due in a frame, if anything is."""
        self._main = threading.get_ident()
        self._raise_in = raise_in

    def raise_pending(self) -> None:
        """Raise the deferred stop in the caller, if the caller is on the main thread."""
        if threading.get_ident() == self._main:
            self.is_pending = False
            self._raise_in(sys._getframe(1))  # noqa: SLF001 - made for this


deferred_stop = DeferredStop()
