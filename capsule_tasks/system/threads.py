"""Threads that block signals, which other threads handle."""

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
"""Signals that an iteration of the runtime's loop defers until it is done."""
set_mask: Callable[[int, Any], Any] = getattr(signal, "_signal", signal).pthread_sigmask
"""The C function: its wrapper makes enum members of the old mask, which takes far longer."""


class SignalFreeThread(threading.Thread):
    """Blocks the deferred signals.

    The system gives a signal to any thread that does not block it, and Python then runs the handler
    on the main thread: in the middle of the iteration that defers the signal.
    """

    def start(self) -> None:
        old_mask = set_mask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        try:
            super().start()
        finally:
            set_mask(signal.SIG_SETMASK, old_mask)
