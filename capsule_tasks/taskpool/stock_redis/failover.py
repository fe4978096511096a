"""A broker that answers and does not serve: Celery reconnects, with growing pauses.

A primary that is demoted first answers the worker that waits for messages with `UNBLOCKED …`, and
from then on every write with `READONLY …`; others load, or lack replicas. To Celery such replies
are no lost connection but unrecoverable errors, for which a worker exits: all of them, in a
failover. Here each becomes a connection error, whichever of the consumer's steps it ends.
"""

from __future__ import annotations

import contextlib
import random
from queue import Empty, SimpleQueue
from typing import Any

from celery import signals
from celery.worker.state import maybe_shutdown

from capsule_tasks.storage.connections.faults import is_temporary

_MIN_PAUSE_S = 0.25
_MAX_PAUSE_S = 5.0
_random = random.Random()  # noqa: S311  spreads load, and leaves the program's own generator alone


class BrokerNotReadyError(ConnectionError):
    """The broker cannot serve now; Celery closes the connection and reconnects after a pause."""


class Failover:
    """Pauses between the starts of one consumer; on Celery's main thread."""

    def __init__(self) -> None:
        self._pauses = 0
        self._pause_s = 0.0
        self._leaves: SimpleQueue[None] = SimpleQueue()
        self._made: Any = None
        """The consumer's latest connection; Celery forgets one whose first commands are refused."""
        signals.worker_shutting_down.connect(self._on_shutting_down)

    def watch(self, blueprint: Any) -> None:
        """Have the consumer start its steps, of which the last is its loop, with these pauses."""
        start = blueprint.start

        def start_after_pause(consumer: Any) -> None:
            self._pause()
            try:
                start(consumer)
            except Exception as error:
                if not is_temporary(error):
                    raise
                self._forget_connection(consumer)
                self._plan_pause(did_serve=blueprint.started == len(consumer.steps))
                # Celery logs this, and closes the connection.
                why = f"{error}; next try in {self._pause_s:.1f} s"
                raise BrokerNotReadyError(why) from error

        blueprint.start = start_after_pause

    def watch_connection(self, connection: Any) -> None:
        """The connection is about to be made."""
        self._made = connection

    def _forget_connection(self, consumer: Any) -> None:
        made, self._made = self._made, None
        if consumer.connection is None and made is not None:
            with contextlib.suppress(Exception):  # the broker may refuse again
                made.close()

    def _plan_pause(self, *, did_serve: bool) -> None:
        """Begin with short pauses again once the loop has run: earlier steps write, too."""
        self._pauses = 0 if did_serve else self._pauses + 1
        longest_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** min(self._pauses, 10))
        self._pause_s = longest_s * _random.uniform(0.5, 1)

    def _pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        if pause_s:
            with contextlib.suppress(Empty):
                self._leaves.get(timeout=pause_s)
            maybe_shutdown()

    def _on_shutting_down(self, **_: Any) -> None:
        """In a signal's handler, which may interrupt the very `get`: this queue allows for that."""
        self._leaves.put(None)
