"""The broker of the app: one connection for a command, and how many messages wait in its queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from celery.exceptions import OperationalError

from capsule_tasks.taskpool.holding import spare_others


@contextlib.contextmanager
def connected(app: Any) -> Iterator[Any]:
    """A connection to the broker; OperationalError, at once, if it cannot be reached."""
    with app.connection_for_write() as connection:
        spare_others(connection)
        try:
            connection.connect()
            yield connection
        except (*connection.connection_errors, OSError, OperationalError) as error:
            where = connection.as_uri()
            raise OperationalError(f"the broker {where} cannot be reached: {error}") from error


def queue_lengths(app: Any, names: Iterable[str] = ()) -> dict[str, int | None]:
    """The messages that no worker has taken yet, by queue: of the app's queues, or of these.

    None where the broker does not say. Messages that a worker has prefetched, or holds for their
    countdown, are not counted: they have left the queue.
    """
    wanted = list(dict.fromkeys(names)) or sorted(app.amqp.queues)
    with connected(app) as connection:
        return {name: _length(connection, name) for name in wanted}


def _length(connection: Any, name: str) -> int | None:
    """The transport adds up the lists of priorities, where it keeps one for each."""
    channel = connection.channel()
    try:
        count = channel.queue_declare(name, passive=True).message_count
    except connection.channel_errors as error:
        # Redis has no list of a queue that is empty, and AMQP no queue that nobody has declared.
        return 0 if str(getattr(error, "reply_code", "")) == "404" else None
    finally:
        with contextlib.suppress(*connection.channel_errors):
            channel.close()
    return None if count is None else int(count)
