"""The broker of the app: connections to it, and how many messages wait in its queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from celery.exceptions import OperationalError

from capsule_tasks.taskpool.stock_redis.visibility import protect_other_workers


@contextlib.contextmanager
def connected(app: Any) -> Iterator[Any]:
    """A connection to the broker; OperationalError, at once, if it cannot be reached."""
    with _connection(app) as connection, translated_faults(connection):
        _connect(connection)
        yield connection


class Queues:
    """The messages that no worker has taken yet, by queue: of the app's queues, or of these.

    They are counted over one connection for as long as that lives. Messages that a worker has
    prefetched, or holds for their countdown, are not counted: they have left the queue.
    """

    def __init__(self, app: Any, names: Iterable[str] = ()) -> None:
        self._app = app
        self.names = list(dict.fromkeys(names)) or sorted(app.amqp.queues)
        self._connection: Any = None

    def lengths(self) -> dict[str, int | None]:
        """None where the broker does not say; OperationalError if it cannot be reached."""
        if self._connection is None:
            self._connection = _connection(self._app)
        try:
            with translated_faults(self._connection):
                _connect(self._connection)
                return {name: _length(self._connection, name) for name in self.names}
        except OperationalError:
            self.close()
            raise

    def close(self) -> None:
        """Safe twice; another look connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


def _connection(app: Any) -> Any:
    connection = app.connection_for_write()
    protect_other_workers(connection)
    return connection


def _connect(connection: Any) -> None:
    """As `connect` does, which sleeps before it tries once more."""
    connection.ensure_connection(
        max_retries=1, interval_start=0, interval_step=0, reraise_as_library_errors=False
    )


@contextlib.contextmanager
def translated_faults(connection: Any) -> Iterator[None]:
    try:
        yield
    except (*connection.connection_errors, OSError, OperationalError) as error:
        where = connection.as_uri()
        raise OperationalError(f"the broker {where} cannot be reached: {error}") from error


def _length(connection: Any, name: str) -> int | None:
    """The transport adds up the lists of priorities, where it keeps one for each."""
    try:
        # A channel that AMQP closes for a missing queue opens itself again.
        count = connection.default_channel.queue_declare(name, passive=True).message_count
    except connection.channel_errors as error:
        # Redis has no list of a queue that is empty, and AMQP no queue that nobody has declared.
        return 0 if str(getattr(error, "reply_code", "")) == "404" else None
    return None if count is None else int(count)
