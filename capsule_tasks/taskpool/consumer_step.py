"""The pool's step in Celery's consumer: attaches the pool to each consumer and its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps

from capsule_tasks.taskpool.prefetch import count_coroutines_apart
from capsule_tasks.taskpool.reporting.requests import add_to_tasks
from capsule_tasks.taskpool.stock_redis.failover import Failover
from capsule_tasks.taskpool.stock_redis.kept_revokes import Revokes
from capsule_tasks.taskpool.stock_redis.visibility import VisibilityRenewal


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
        self._failover = Failover()
        self._failover.watch(parent.blueprint)
        parent.ensure_connected = self._prepared(parent.ensure_connected)
        parent.cancel_active_requests = _reporting_shutdown(pool, parent.cancel_active_requests)

    def start(self, parent: Any) -> None:
        count_coroutines_apart(parent)
        parent.pool.attach_consumer(parent)
        self._revokes.start()
        self._renewal.start()

    def _prepared(self, connect: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Each connection of the consumer is prepared before it is made."""

        def ensure_connected(connection: Any) -> Any:
            self._renewal.prepare(connection)
            close_wholly(connection)
            self._failover.watch_connection(connection)
            return connect(connection)

        return ensure_connected

    def shutdown(self, _parent: Any) -> None:
        """After the pool has ended: until then its last tasks have unacknowledged messages."""
        self._revokes.stop()
        self._renewal.stop()


def _reporting_shutdown(pool: Any, cancel: Callable[[], object]) -> Callable[[], object]:
    """Start the shutdown's deadline before a cold shutdown cancels its requests.

    Celery stores the end of each request first. A result backend that does not answer blocks the
    main thread there for minutes, before Celery announces the shutdown.
    """

    def cancel_active_requests() -> object:
        pool.on_close()
        return cancel()

    return cancel_active_requests


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
