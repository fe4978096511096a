"""A doorbell for a thread that blocks until it rings; see `doorbells` for those that await."""

from __future__ import annotations

import logging
import time
from typing import Any

from capsule_tasks.errors import reason_of
from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage.awaiting import without_waiting
from capsule_tasks.storage.connections.endpoints import SyncEndpoint
from capsule_tasks.storage.connections.faults import FAULTS
from capsule_tasks.storage.connections.targets import Target
from capsule_tasks.storage.operations import delay_s

log = logging.getLogger("capsule_tasks.storage")

_RETRY = RetrySettings(first_delay_s=0.1, max_delay_s=1.0)


class BlockingDoorbell:
    """Listens on one channel over a connection of its own, which is opened when it is needed."""

    def __init__(self, target: Target, channel: str) -> None:
        # To any node of a cluster: nodes pass messages on to each other.
        self._endpoint = SyncEndpoint(target)
        self._channel = channel
        self._connection: Any = None

    def wait(self, seconds: float) -> None:
        """Return once the channel has rung or is subscribed, or after so many seconds.

        A ring is only a hint to read the key. Rings are missed until the channel is subscribed, so
        each new subscription counts as one.
        """
        ends_at, attempt = time.monotonic() + seconds, 0
        while (left_s := ends_at - time.monotonic()) > 0:
            try:
                if self._connection is None:
                    self._subscribe()
                    return
                if not self._connection.can_read(timeout=left_s):
                    break
                if self._connection.read_response(disable_decoding=True)[0] == b"message":
                    return
            except FAULTS as error:
                log.info("the doorbell connection was lost: %s", reason_of(error))
                self._disconnect()
                attempt += 1
                time.sleep(min(delay_s(attempt, _RETRY), max(0, ends_at - time.monotonic())))
        # A connection over which nothing came for so long may be dead: the next call opens another.
        self._disconnect()

    def close(self) -> None:
        """Stop listening; safe twice."""
        self._disconnect()
        without_waiting(self._endpoint.close())

    def _subscribe(self) -> None:
        self._connection = without_waiting(self._endpoint.open_connection())
        self._connection.send_command("SUBSCRIBE", self._channel, check_health=False)
        self._connection.read_response(disable_decoding=True)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
