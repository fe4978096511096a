"""Threads that leave signals to others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

DEFERRED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""What a turn of the runtime's loop puts off until it is over."""
set_mask: Callable[[int, Any], Any] = getattr(signal, "_signal", signal).pthread_sigmask
"""The function itself: its wrapper makes enumerations of the old mask, which takes far longer."""


class SignalFreeThread(threading.Thread):
    """Takes no signal that a turn puts off: else its handler would run in the middle of the turn.

    The system gives a signal to any thread that does not block it.
    """

    def start(self) -> None:
        old_mask = set_mask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        try:
            super().start()
        finally:
            set_mask(signal.SIG_SETMASK, old_mask)
