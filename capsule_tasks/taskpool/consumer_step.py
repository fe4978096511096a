"""The pool's step in Celery's consumer: attaches the pool to each consumer and its connections."""

from __future__ import annotations

import contextlib
import random
from queue import Empty, SimpleQueue
from types import MethodType
from typing import Any

from celery import bootsteps, signals
from celery.worker import state
from celery.worker.autoscale import Autoscaler
from kombu.common import QoS

from capsule_tasks.client.task import mixed
from capsule_tasks.storage.connections.faults import is_temporary
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
                # Begin with short pauses again once the loop has run: earlier steps write, too.
                did_serve = blueprint.started == len(consumer.steps)
                self._pauses = 0 if did_serve else self._pauses + 1
                longest_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** min(self._pauses, 10))
                self._pause_s = longest_s * _random.uniform(0.5, 1)
                # Celery logs this, and closes the connection.
                why = f"{error}; next try in {self._pause_s:.1f} s"
                raise BrokerNotReadyError(why) from error

        blueprint.start = start_after_pause

    def _forget_connection(self, consumer: Any) -> None:
        made, self.connection = self.connection, None
        if consumer.connection is None and made is not None:
            with contextlib.suppress(Exception):  # the broker may refuse again
                made.close()

    def _pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        if pause_s:
            with contextlib.suppress(Empty):
                self._leaves.get(timeout=pause_s)
            state.maybe_shutdown()

    def _on_shutting_down(self, **_: Any) -> None:
        """In a signal's handler, which may interrupt the very `get`: this queue allows for that."""
        self._leaves.put(None)


class Prefetch(QoS):
    """Celery's prefetch counter, with room beyond its limit: for messages of coroutines.

    Celery counts up for each message with an ETA or a countdown, and down when its time has come.
    It counts up to `worker_eta_task_limit` only, but always down: after more such messages than the
    limit, the worker would prefetch a single message. Here a message that was not counted up is not
    counted down.
    """

    def __init__(self, counter: Any) -> None:
        """Go on where `counter` is."""
        super().__init__(counter.callback, counter.value, counter.max_prefetch)
        self.prev = counter.prev
        self._not_counted = 0

    def increment_eventually(self, n: int = 1) -> int:
        with self._mutex:
            before = self.value
            super().increment_eventually(n)
            if before:
                self._not_counted += max(n, 0) - (self.value - before)
            return int(self.value)

    def decrement_eventually(self, n: int = 1) -> int:
        with self._mutex:
            forgiven = min(n, self._not_counted)
            self._not_counted -= forgiven
            return int(super().decrement_eventually(n - forgiven))

    def add_one(self) -> None:
        """Make room for one more message, without an ETA."""
        with self._mutex:
            if self.value:
                self.value += 1
                self._move_limit(1)

    def remove_one(self) -> None:
        """Undo one `add_one`."""
        with self._mutex:
            if self.value:
                self.value = max(1, self.value - 1)
                self._move_limit(-1)

    def _move_limit(self, n: int) -> None:
        if self.max_prefetch is not None:
            self.max_prefetch += n


class SlotScaler:
    """Mixed into the autoscaler: coroutines take no slot."""

    @property
    def qty(self: Any) -> int:
        return int(super().qty) - int(self.pool.coroutines)  # type: ignore[misc]


def count_coroutines_apart(consumer: Any) -> None:
    """Have a consumer that has just connected count coroutines apart."""
    consumer.qos = Prefetch(consumer.qos)
    channel_qos: Any = getattr(consumer.task_consumer.channel, "qos", None)
    if "can_consume" in getattr(channel_qos, "__dict__", {}):
        channel_qos.can_consume = MethodType(_within_slots(consumer), channel_qos)
    scaler: Any = getattr(consumer.controller, "autoscaler", None)
    if isinstance(scaler, Autoscaler):
        scaler.__class__ = mixed(SlotScaler, scaler.__class__)


def _within_slots(consumer: Any) -> Any:
    """Celery's check for `worker_disable_prefetch`: no more messages than free children."""

    def can_consume(qos: Any) -> bool:
        limit = getattr(consumer.controller, "max_concurrency", None) or consumer.pool.num_processes
        if len(state.reserved_requests) - consumer.pool.coroutines >= limit:
            return False
        return bool(type(qos).can_consume(qos))

    return can_consume
