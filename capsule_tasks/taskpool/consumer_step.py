"""The pool's step in Celery's consumer: attaches the pool to each consumer and its connections."""

from __future__ import annotations

import contextlib
import random
from queue import Empty, SimpleQueue
from typing import Any

from celery import bootsteps, signals
from celery.worker.state import maybe_shutdown

from capsule_tasks.storage.connections.faults import is_temporary
from capsule_tasks.taskpool.prefetch import count_coroutines_apart
from capsule_tasks.taskpool.reporting.requests import add_to_tasks
from capsule_tasks.taskpool.stock_redis.kept_revokes import Revokes
from capsule_tasks.taskpool.stock_redis.visibility import VisibilityRenewal

_MIN_PAUSE_S = 0.25
_MAX_PAUSE_S = 5.0
_random = random.Random()  # noqa: S311  spreads load, and leaves the program's own generator alone


class ConsumerStep(bootsteps.StartStopStep):
    """Attaches the consumer to the pool, and extends its prefetch counter by running coroutines."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def include_if(self, parent: Any) -> bool:
        """Not with another pool, which a later worker of this process may have."""
        return hasattr(parent.pool, "attach_consumer")

    def create(self, parent: Any) -> None:
        pool = parent.pool
        self._renewal = VisibilityRenewal(parent)
        self._revokes = parent.capsule_revokes = Revokes(parent.app, parent.hub, pool.listen)
        # Now, since each task's strategy keeps both when the consumer starts.
        add_to_tasks(parent.app)
        parent.on_task_request = pool.without_slots(parent.on_task_request)
        failover = Failover()
        failover.watch(parent.blueprint)
        connect, cancel = parent.ensure_connected, parent.cancel_active_requests

        def ensure_connected(connection: Any) -> Any:
            """Each connection of the consumer is prepared before it is made."""
            self._renewal.prepare(connection)
            close_wholly(connection)
            failover.connection = connection
            return connect(connection)

        def cancel_active_requests() -> object:
            """Start the shutdown's deadline before a cold shutdown cancels its requests.

            Celery stores the end of each request first. A result backend that does not answer
            blocks the main thread there for minutes, before Celery announces the shutdown.
            """
            pool.on_close()
            return cancel()

        parent.ensure_connected = ensure_connected
        parent.cancel_active_requests = cancel_active_requests

    def start(self, parent: Any) -> None:
        count_coroutines_apart(parent)
        parent.pool.attach_consumer(parent)
        self._revokes.start()
        self._renewal.start()

    def shutdown(self, _parent: Any) -> None:
        """After the pool has ended: until then its last tasks have unacknowledged messages."""
        self._revokes.stop()
        self._renewal.stop()


def close_wholly(connection: Any) -> None:
    """Have the connection close its channel at the first call, also if the broker is unavailable.

    Kombu first reads the answer to a BRPOP that is on its way, and when that fails it leaves the
    channel open, but without an address. Celery closes the connection once more, the channel asks
    for the address, and its AttributeError ends the worker.
    """
    close = connection.maybe_close_channel

    def maybe_close_channel(channel: Any) -> None:
        close(channel)
        if not getattr(channel, "closed", True):
            close(channel)  # no answer is on its way any more

    connection.maybe_close_channel = maybe_close_channel


class BrokerNotReadyError(ConnectionError):
    """The broker cannot serve now; Celery closes the connection and reconnects after a pause."""


class Failover:
    """A broker that answers and does not serve: Celery reconnects, with growing pauses.

    A primary that is demoted first answers the worker that waits for messages with `UNBLOCKED …`,
    and from then on every write with `READONLY …`; others load, or lack replicas. To Celery such
    replies are no lost connection but unrecoverable errors, for which a worker exits: all of them,
    in a failover. Here each becomes a connection error, whichever of the consumer's steps it ends.
    """

    def __init__(self) -> None:
        self._pauses = 0
        self._pause_s = 0.0
        self._leaves: SimpleQueue[None] = SimpleQueue()
        self.connection: Any = None
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

    def _forget_connection(self, consumer: Any) -> None:
        made, self.connection = self.connection, None
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
