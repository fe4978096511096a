"""Doorbells: Redis says that a key has changed, over one connection for all that is watched.

A ring is only a hint. Who is rung reads the key; who was deaf for a while (the connection was lost,
the server changed) is rung for everything it listens to, and reads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from redis.asyncio.connection import AbstractConnection

from capsule_tasks.errors import StorageUnavailable, reason_of
from capsule_tasks.settings import ConnectionSettings, RetrySettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint
from capsule_tasks.storage.connections.faults import FAULTS
from capsule_tasks.storage.operations import closed, delay_s

log = logging.getLogger("capsule_tasks.storage")

Ring = Callable[[bytes | None], object]
"""Called with what was said, or with None after a time in which rings may have been missed."""

_SILENCE_S = 15.0
_RETRY = RetrySettings(first_delay_s=0.1, max_delay_s=1.0)
_SLICE = 500


class Doorbells:
    """Listens on channels, on the loop that it was made on; the connection is made when needed."""

    def __init__(
        self,
        url: str,
        settings: ConnectionSettings | None = None,
        *,
        patience_s: float | None = None,
    ) -> None:
        """`patience_s` is how long `listen` waits for a Redis that is away; None: for ever."""
        self._patience_s = patience_s
        self._fault: BaseException | None = None
        self._settings = settings or ConnectionSettings()
        # To any node of a cluster, which passes on what is said on another.
        self._endpoint = AsyncEndpoint(targets.parsed(url, self._settings))
        self._rings: dict[bytes, list[Ring]] = {}
        self._asked: dict[bytes, asyncio.Future[None]] = {}
        self._heard: set[bytes] = set()
        self._missed: set[bytes] = set()
        """Channels that somebody no longer waits to hear: rung once they are heard."""
        self._connection: AbstractConnection | None = None
        self._server: asyncio.Task[None] | None = None
        self._changed: list[tuple[str, bytes]] = []
        self._writer: asyncio.Task[None] | None = None
        self._is_closed = False

    async def listen(self, channel: str, ring: Ring) -> None:
        """Have `ring` called from now on; returns once nothing that is said can be missed.

        StorageUnavailable if Redis stays away for longer than the patience. Until `leave`, `ring`
        is called all the same once the channel is heard. StorageClosed after, or upon, `close`.
        """
        if self._is_closed:
            raise closed()
        name = channel.encode()
        self._rings.setdefault(name, []).append(ring)
        if self._server is None:
            self._server = asyncio.get_running_loop().create_task(self._serve())
        if name in self._heard:
            return
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = asyncio.get_running_loop().create_future()
            self._send("SUBSCRIBE", name)
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(asked)
            if self._is_closed:
                raise closed()
        except TimeoutError:
            self._missed.add(name)
            fault = reason_of(self._fault) if self._fault is not None else "no answer"
            why = f"{fault} (for {self._patience_s:g} s)"
            raise StorageUnavailable(f"Redis: {why}") from self._fault

    def leave(self, channel: str, ring: Ring) -> None:
        """Stop calling `ring`; safe if it never was."""
        name = channel.encode()
        rings = self._rings.get(name, [])
        if ring in rings:
            rings.remove(ring)
        if not rings and self._rings.pop(name, None) is not None:
            self._heard.discard(name)
            self._missed.discard(name)
            if (asked := self._asked.pop(name, None)) is not None:
                asked.cancel()
            self._send("UNSUBSCRIBE", name)

    async def close(self) -> None:
        """Stop listening; safe twice, and before anything was heard."""
        self._is_closed = True
        for task in (self._server, self._writer):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for asked in self._asked.values():  # whoever waits for one learns that this is closed
            asked.set_result(None)
        self._asked.clear()
        await self._endpoint.close()

    # --- the connection ------------------------------------------------------------------------

    async def _serve(self) -> None:
        attempt = 0
        while not self._is_closed:
            connection: AbstractConnection | None = None
            try:
                connection = await self._endpoint.open_connection()
                await self._subscribe_all(connection)
                attempt = 0
                self._fault = None
                await self._hear(connection)
            except Exception as error:  # noqa: BLE001 - without this task nobody is rung again
                self._note_fault(error)
            finally:
                self._connection = None
                self._heard.clear()
                if connection is not None:
                    with contextlib.suppress(*FAULTS):
                        await connection.disconnect(nowait=True)
            attempt += 1
            await asyncio.sleep(delay_s(attempt, _RETRY))

    def _note_fault(self, error: Exception) -> None:
        before, self._fault = self._fault, error
        if isinstance(error, FAULTS):
            log.info("the doorbell connection was lost: %s", reason_of(error))
        elif repr(error) != repr(before):  # a defect: told once, not with each new try
            log.error("doorbells cannot be heard, and are tried again", exc_info=error)

    async def _subscribe_all(self, connection: AbstractConnection) -> None:
        self._changed.clear()
        names = list(self._rings)
        self._connection = connection
        for first in range(0, len(names), _SLICE):
            await self._write(connection, "SUBSCRIBE", names[first : first + _SLICE])

    async def _write(
        self, connection: AbstractConnection, command: str, names: Iterable[bytes]
    ) -> None:
        packed = connection.pack_command(command, *names)
        await connection.send_packed_command(packed, check_health=False)

    async def _hear(self, connection: AbstractConnection) -> None:
        is_waiting_for_pong = False
        while True:
            try:
                async with asyncio.timeout(
                    self._settings.reply_timeout_s if is_waiting_for_pong else _SILENCE_S
                ):
                    message = await connection.read_response(
                        disable_decoding=True, disconnect_on_error=False
                    )
            except TimeoutError:
                if is_waiting_for_pong:
                    raise
                is_waiting_for_pong = True
                await self._write(connection, "PING", ())
                continue
            is_waiting_for_pong = False
            self._take(message)

    def _take(self, message: Any) -> None:
        kind = message[0] if isinstance(message, list) and len(message) > 2 else b""
        if kind == b"message":
            for ring in tuple(self._rings.get(message[1], ())):
                self._ring(ring, message[2])
        elif kind == b"subscribe":
            name = message[1]
            if name not in self._rings:
                return
            self._heard.add(name)
            asked = self._asked.pop(name, None)
            if asked is not None and not asked.done():
                asked.set_result(None)
            # Else it was heard before the connection was lost.
            if asked is None or name in self._missed:
                self._missed.discard(name)
                for ring in tuple(self._rings[name]):
                    self._ring(ring, None)

    def _ring(self, ring: Ring, data: bytes | None) -> None:
        try:
            ring(data)
        except Exception:
            log.exception("a doorbell could not be answered")

    def _send(self, command: str, name: bytes) -> None:
        """With all that is asked for in this turn of the loop."""
        if self._connection is None:
            return  # it will be asked for when there is a connection
        self._changed.append((command, name))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._send_changes())

    async def _send_changes(self) -> None:
        try:
            while self._changed and self._connection is not None:
                changed, self._changed = self._changed, []
                for command, names in _runs(changed):
                    await self._write(self._connection, command, names)
        except FAULTS as error:
            log.debug(
                "channels could not be changed: %s", reason_of(error)
            )  # the listener sees it too
        finally:
            self._writer = None


def _runs(changed: list[tuple[str, bytes]]) -> Iterable[tuple[str, list[bytes]]]:
    """Neighbours with the same command together, in order."""
    first = 0
    for place in range(1, len(changed) + 1):
        is_end = place == len(changed) or changed[place][0] != changed[first][0]
        if is_end or place - first == _SLICE:
            yield changed[first][0], [name for _, name in changed[first:place]]
            first = place
