"""One connection to the server: a reader task, writes, and the end.

The reader never waits for a write: what a message causes is written at once, into a buffer that may
grow by it. Everybody else waits, after the write, until the buffer has room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from inspect import iscoroutine
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import broadcast
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

from capsule_tasks.errors import RealtimeLost, RealtimeNoAnswer
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.model import (
    AgentSettings,
    Command,
    ConnectionEnded,
    ModelEvent,
    UpdateSettings,
)
from capsule_tasks.realtime.openai.protocol import Protocol
from capsule_tasks.realtime.openai.response_gate import Message
from capsule_tasks.realtime.playback import UnplayedAudio

_log = logging.getLogger(__name__)

Pauses = list[Awaitable[None]]
"""What listeners want to be waited for."""


class Connection:
    """A connection that is open until it is closed or lost."""

    def __init__(
        self,
        websocket: ClientConnection,
        *,
        model: str,
        audio: UnplayedAudio,
        emit: Callable[[ModelEvent], Pauses],
        watch: Callable[[bytes], Pauses],
        answer_timeout_s: float,
        close_timeout_s: float,
    ) -> None:
        """`watch` is told each message of the server, before `emit` is told what it means."""
        self._websocket = websocket
        self._protocol = Protocol(model, audio, self._emit)
        self._tell = emit
        self._watch = watch
        self._answer_timeout_s = answer_timeout_s
        self._close_timeout_s = close_timeout_s
        self._pauses: Pauses = []
        self._pause_is_over: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.lost: RealtimeLost | None = None
        """Why nothing can be sent any more."""
        self._announces_end = False
        """Whether listeners are told when the connection is lost."""
        self._reader = asyncio.create_task(self._read(), name="realtime reader")

    async def open(self, settings: AgentSettings) -> None:
        """Apply the first settings. From then on listeners are told when the connection is lost."""
        await self.update(settings, is_first=True)
        self._check()
        self._announces_end = True

    # --- writing ---------------------------------------------------------------------------------

    async def send(self, command: Command, condition: Callable[[], bool]) -> bool:
        """Write what a command means, if the condition holds."""
        if isinstance(command, UpdateSettings):
            return condition() and await self.update(command.settings)
        messages = self._protocol.command(command)
        self._check()
        return condition() and await self._write(messages())

    async def update(self, settings: AgentSettings, *, is_first: bool = False) -> bool:
        """Apply settings, and wait until the server has accepted them."""
        self._check()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        event_id, message = self._protocol.update(settings, answer, is_first=is_first)
        self._end_pause()  # the answer must be read
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await self._write([message])
                await answer
        except TimeoutError:
            raise RealtimeNoAnswer("the settings", self._answer_timeout_s) from None
        finally:
            self._protocol.updates.give_up(event_id)
        return True

    def _check(self) -> None:
        if self.lost is not None:
            raise RealtimeLost(self.lost.reason)

    async def _write(self, messages: list[Message]) -> bool:
        """Write the messages at once, and wait until the buffer has room.

        `send` of websockets writes before it waits for anything, as no message of ours has
        fragments. So nothing comes between a condition and the first message, or between two
        messages; and if the caller is cancelled here, everything has been written.
        """
        if not messages:
            return True
        *first, last = [msgspec.json.encode(message) for message in messages]
        self._write_now(first)
        try:
            await self._websocket.send(last, text=True)
        except ConnectionClosed as closed:
            raise RealtimeLost(str(closed)) from closed
        if self._websocket.close_code is not None:  # since the buffer was full
            raise RealtimeLost("it ended while a message was sent")
        return True

    def _write_now(self, messages: list[bytes]) -> None:
        """Write messages without waiting for room in the buffer; a lost connection takes none."""
        for message in messages:
            broadcast((self._websocket,), message.decode())

    # --- reading ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        error: RealtimeLost | None = None
        try:
            while True:
                raw = await self._websocket.recv(decode=False)
                if self._closing is None:
                    self._pauses += self._watch(raw)
                    answers = self._protocol.received(raw)
                    self._write_now([msgspec.json.encode(answer) for answer in answers])
                    if self._pauses:
                        await self._pause()
        except ConnectionClosedOK:
            pass
        except ConnectionClosed as closed:
            error = RealtimeLost(str(closed))
        except Exception as unexpected:  # noqa: BLE001 - nobody awaits this task: listeners are told
            error = RealtimeLost(reason_of(unexpected))
            error.__cause__ = unexpected
        finally:
            self._ended(error)

    def _emit(self, event: ModelEvent) -> None:
        self._pauses += self._tell(event)

    async def _pause(self) -> None:
        """Wait for slow listeners, unless somebody waits for an answer that must be read."""
        pauses, self._pauses = self._pauses, []
        if self._protocol.updates.is_waited:
            _discard(pauses)
            return
        self._pause_is_over = asyncio.get_running_loop().create_future()
        # A future may be everybody's, and is not ours to cancel.
        own = (asyncio.shield(each) if asyncio.isfuture(each) else each for each in pauses)
        waiting = asyncio.gather(*own, return_exceptions=True)
        try:
            both: list[asyncio.Future[Any]] = [self._pause_is_over, waiting]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pause_is_over = None
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    waiting.exception()  # that it was cancelled; unread, it would be logged

    def _end_pause(self) -> None:
        if self._pause_is_over is not None and not self._pause_is_over.done():
            self._pause_is_over.set_result(None)

    # --- the end ---------------------------------------------------------------------------------

    def _ended(self, error: RealtimeLost | None) -> None:
        """The connection is gone; nothing is told of it if it was closed here."""
        # After an unexpected error or a cancel the socket is open still, but nobody reads it: the
        # answer to a regular close could not be read either.
        self._websocket.transport.abort()
        if self.lost is None:
            self.lost = error or RealtimeLost("the server has closed it")
            self._protocol.updates.lost(self.lost)
            if self._announces_end:
                self._emit(ConnectionEnded(error))
        _discard(self._pauses)

    async def close(self) -> None:
        """Close the connection, and end its task; it may be repeated."""
        if self._closing is None or self._closing.cancelled():
            if self.lost is None:
                self.lost = RealtimeLost("it was closed")
                self._protocol.updates.lost(self.lost)
            self._closing = asyncio.create_task(self._close(), name="realtime close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._end_pause()  # the other side's answer must be read
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._websocket.close()
        except Exception as error:  # noqa: BLE001 - whatever it is: there is no connection then
            _log.debug("A realtime connection was not closed in the regular way: %r", error)
        finally:
            self._websocket.transport.abort()
            await asyncio.wait([self._reader])


def _discard(pauses: Pauses) -> None:
    """Drop what is not going to be awaited."""
    for pause in pauses:
        if iscoroutine(pause):
            pause.close()
