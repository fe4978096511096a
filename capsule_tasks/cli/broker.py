"""Connections to the app's broker, and the number of messages that wait in its queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from celery.exceptions import OperationalError

from capsule_tasks.cli.terminal import cleaned
from capsule_tasks.taskpool.stock_redis.visibility import protect_other_workers


@contextlib.contextmanager
def connected(app: Any) -> Iterator[Any]:
    """Yield a connection to the broker; raise OperationalError at once if it is unavailable."""
    with _connection(app) as connection, _connecting(connection):
        yield connection


class Queues:
    """Counts the messages that wait in the named queues, or in all queues of the app.

    One connection is used for as long as it lives. Messages that a worker has prefetched, or delays
    until their countdown has passed, are not counted: they have left the queue.
    """

    def __init__(self, app: Any, names: str) -> None:
        """`names` are separated by commas; empty for all queues."""
        self._app = app
        stated = [name.strip() for name in names.split(",") if name.strip()]
        self.names = list(dict.fromkeys(stated)) or sorted(app.amqp.queues)
        self._connection: Any = None

    def lengths(self) -> dict[str, int | None]:
        """Length by queue, None if unknown; OperationalError if the broker is unavailable."""
        if self._connection is None:
            self._connection = _connection(self._app)
        try:
            with _connecting(self._connection):
                return {name: _length(self._connection, name) for name in self.names}
        except OperationalError:
            self.close()
            raise

    def known_lengths(self) -> tuple[dict[str, int | None], list[str]]:
        """The lengths; all unknown, with a warning, if the broker is unavailable."""
        try:
            return self.lengths(), []
        except OperationalError as error:
            return dict.fromkeys(self.names), [f"-- {cleaned(str(error))}"]

    def close(self) -> None:
        """Close the connection; safe twice. The next count opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


def _connection(app: Any) -> Any:
    connection = app.connection_for_write()
    protect_other_workers(connection)
    return connection


@contextlib.contextmanager
def _connecting(connection: Any) -> Iterator[None]:
    """Connect if need be; raise OperationalError if the broker is, or becomes, unavailable."""
    try:
        # Tries once more, without the sleep that `connection.connect` puts in between.
        connection.ensure_connection(
            max_retries=1, interval_start=0, interval_step=0, reraise_as_library_errors=False
        )
        yield
    except (*connection.connection_errors, OSError, OperationalError) as error:
        url = connection.as_uri()
        raise OperationalError(f"the broker {url} is unavailable: {error}") from error


def _length(connection: Any, name: str) -> int | None:
    """Length of a queue; the transport adds up the lists of its priorities."""
    try:
        # A channel that AMQP closes for a missing queue opens itself again.
        count = connection.default_channel.queue_declare(name, passive=True).message_count
    except connection.channel_errors as error:
        # Redis has no list for an empty queue, and AMQP no queue before its declaration.
        return 0 if str(getattr(error, "reply_code", "")) == "404" else None
    return None if count is None else int(count)
