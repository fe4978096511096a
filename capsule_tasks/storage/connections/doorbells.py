"""Doorbells: Redis announces that a key has changed, over one connection for all channels.

A ring is only a hint to read the key. After the connection was lost, every channel is rung once it
is subscribed again, because rings may have been missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from redis.asyncio.connection import AbstractConnection

from capsule_tasks.errors import StorageUnavailable, reason_of
from capsule_tasks.settings import ConnectionSettings, RetrySettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint
from capsule_tasks.storage.connections.faults import FAULTS
from capsule_tasks.storage.connections.targets import Target
from capsule_tasks.storage.operations import closed, delay_s

log = logging.getLogger("capsule_tasks.storage")

OnRing = Callable[[bytes | None], object]
"""Called with the message, or with None after a time in which rings may have been missed."""

_PING_AFTER_S = 15.0
_RETRY = RetrySettings(first_delay_s=0.1, max_delay_s=1.0)
_BATCH_SIZE = 500


@dataclass
class _Channel:
    """The listeners of one channel."""

    rings: list[OnRing] = field(default_factory=list)
    is_subscribed: asyncio.Event = field(default_factory=asyncio.Event)
    has_missed: bool = False
    """Rung once it is subscribed: it was subscribed before, or a `listen` timed out."""

    def ring(self, data: bytes | None) -> None:
        for ring in tuple(self.rings):
            try:
                ring(data)
            except Exception:
                log.exception("doorbell callback failed")


class Doorbells:
    """Listens on channels, on the event loop it was made on; connects when needed."""

    def __init__(
        self,
        url: str | Target,
        settings: ConnectionSettings | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s` is how long `listen` waits while Redis is unavailable; None: for ever.

        A URL that was parsed before has the settings with which it was.
        """
        self._timeout_s = timeout_s
        self._fault: BaseException | None = None
        target = (
            targets.parsed(url, settings or ConnectionSettings()) if isinstance(url, str) else url
        )
        self._settings = target.settings
        # To any node of a cluster: nodes pass messages on to each other.
        self._endpoint = AsyncEndpoint(target)
        self._channels: dict[bytes, _Channel] = {}
        self._connection: AbstractConnection | None = None
        self._server: asyncio.Task[None] | None = None
        self._changed: set[bytes] = set()
        """Channels to subscribe, or to unsubscribe if no one listens any more."""
        self._writer: asyncio.Task[None] | None = None
        self._is_closed = False

    async def listen(self, channel: str, ring: OnRing) -> None:
        """Call `ring` from now on; returns once the channel is subscribed.

        Raises StorageUnavailable after the timeout; until `leave`, `ring` is called anyway once
        the channel is subscribed. Raises StorageClosed after, or upon, `close`.
        """
        if self._is_closed:
            raise closed()
        name = channel.encode()
        if name not in self._channels:
            self._channels[name] = _Channel()
            self._send_soon(name)
        doorbell = self._channels[name]
        doorbell.rings.append(ring)
        if self._server is None:
            self._server = asyncio.get_running_loop().create_task(self._serve())
        try:
            async with asyncio.timeout(self._timeout_s):
                await doorbell.is_subscribed.wait()
        except TimeoutError:
            doorbell.has_missed = True
            fault = reason_of(self._fault) if self._fault is not None else "no answer"
            why = f"{fault} (for {self._timeout_s:g} s)"
            raise StorageUnavailable(f"Redis: {why}") from self._fault
        if self._is_closed:
            raise closed()

    def leave(self, channel: str, ring: OnRing) -> None:
        """Stop calling `ring`; safe if it never was."""
        name = channel.encode()
        doorbell = self._channels.get(name)
        if doorbell is not None and ring in doorbell.rings:
            doorbell.rings.remove(ring)
            if not doorbell.rings:
                del self._channels[name]
                doorbell.is_subscribed.set()  # a `listen` that waits returns
                self._send_soon(name)

    async def close(self) -> None:
        """Stop listening; safe twice, and before any `listen`."""
        self._is_closed = True
        for task in (self._server, self._writer):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for doorbell in self._channels.values():
            doorbell.is_subscribed.set()  # a `listen` that waits raises StorageClosed
        await self._endpoint.close()

    # --- the connection ------------------------------------------------------------------------

    async def _serve(self) -> None:
        attempt = 0
        while not self._is_closed:
            connection: AbstractConnection | None = None
            try:
                connection = await self._endpoint.open_connection()
                self._connection, self._changed = connection, set(self._channels)
                await self._send_changes()
                attempt = 0
                self._fault = None
                await self._receive(connection)
            except Exception as error:  # noqa: BLE001 - without this task no doorbell rings again
                self._note_fault(error)
            finally:
                self._connection = None
                for doorbell in self._channels.values():
                    doorbell.has_missed |= doorbell.is_subscribed.is_set()
                    doorbell.is_subscribed.clear()
                if connection is not None:
                    with contextlib.suppress(*FAULTS):
                        await connection.disconnect(nowait=True)
            attempt += 1
            await asyncio.sleep(delay_s(attempt, _RETRY))

    def _note_fault(self, error: Exception) -> None:
        before, self._fault = self._fault, error
        if isinstance(error, FAULTS):
            log.info("the doorbell connection was lost: %s", reason_of(error))
        elif repr(error) != repr(before):  # a defect: logged once, not at each retry
            log.error("doorbell subscription failed, retrying", exc_info=error)

    async def _receive(self, connection: AbstractConnection) -> None:
        is_waiting_for_pong = False
        while True:
            try:
                async with asyncio.timeout(
                    self._settings.reply_timeout_s if is_waiting_for_pong else _PING_AFTER_S
                ):
                    message = await connection.read_response(
                        disable_decoding=True, disconnect_on_error=False
                    )
            except TimeoutError:
                if is_waiting_for_pong:
                    raise
                is_waiting_for_pong = True
                await connection.send_command("PING", check_health=False)
                continue
            is_waiting_for_pong = False
            self._on_message(message)

    def _on_message(self, message: Any) -> None:
        kind = message[0] if isinstance(message, list) and len(message) > 2 else b""
        doorbell = self._channels.get(message[1]) if kind in (b"message", b"subscribe") else None
        if doorbell is None:
            return
        if kind == b"message":
            doorbell.ring(message[2])
            return
        doorbell.is_subscribed.set()
        if doorbell.has_missed:
            doorbell.has_missed = False
            doorbell.ring(None)

    def _send_soon(self, name: bytes) -> None:
        """Send a change together with all others of this iteration of the loop."""
        if self._connection is None:
            return  # `_serve` subscribes to everything once there is a connection
        self._changed.add(name)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_changes())

    async def _write_changes(self) -> None:
        try:
            await self._send_changes()
        finally:
            self._writer = None

    async def _send_changes(self) -> None:
        # redis-py would open a lost connection again, which `_serve` has replaced by then.
        while self._changed and (connection := self._connection) and connection.is_connected:
            batch = set(islice(self._changed, _BATCH_SIZE))
            self._changed -= batch
            wanted = batch & self._channels.keys()
            # Written at once: a later change of a channel must not overtake this one.
            packed = connection.pack_command("SUBSCRIBE", *wanted) if wanted else []
            if unwanted := batch - wanted:
                packed += connection.pack_command("UNSUBSCRIBE", *unwanted)
            try:
                await connection.send_packed_command(packed, check_health=False)
            except FAULTS as error:  # `_receive` gets it too
                log.debug("channels could not be changed: %s", reason_of(error))
