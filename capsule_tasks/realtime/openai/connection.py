"""One connection to the server: its handshake, a reader task, writes, and the end.

The reader never waits for a write: what a message causes is written at once, into a buffer that may
grow by it. Everybody else waits, after the write, until the buffer has room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import broadcast
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedOK,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from capsule_tasks.errors import InvalidSetting, RealtimeLost, RealtimeNoAnswer, RealtimeRefused
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.model import AgentSettings, Command, ConnectionEnded, UpdateSettings
from capsule_tasks.realtime.openai.listeners import Listeners
from capsule_tasks.realtime.openai.protocol import Protocol
from capsule_tasks.realtime.openai.response_gate import Message

if TYPE_CHECKING:
    from capsule_tasks.realtime.openai.websocket import OpenAIRealtime

_log = logging.getLogger(__name__)


async def handshake(
    url: str, headers: Mapping[str, str], limits: OpenAIRealtime
) -> ClientConnection:
    """Open a WebSocket. Raises RealtimeRefused, RealtimeNoAnswer or RealtimeLost."""
    for name, value in headers.items():
        if "\n" in value or "\r" in value:  # as at the end of a key that was read from a file
            must = "a text of one line"
            raise InvalidSetting(f"the header {name!r} of a realtime model", "(secret)", must)
    try:
        return await connect(
            url,
            additional_headers=dict(headers),
            # Base64 of audio shrinks by a quarter, and that would be most of the work.
            compression=None,
            open_timeout=limits.open_timeout_s,
            close_timeout=limits.close_timeout_s,
            ping_interval=None,  # Connection._keep_alive takes pauses into account
            max_size=limits.max_message_bytes,
        )
    except (InvalidURI, ValueError) as error:
        must = "the URL of a WebSocket, ws://… or wss://…"
        raise InvalidSetting("RealtimeModelConfig.url", url, must) from error
    except InvalidStatus as error:
        raise _refused(error.response.status_code, error.response.body) from error
    except TimeoutError as error:
        raise RealtimeNoAnswer("the connection", limits.open_timeout_s) from error
    except (OSError, InvalidHandshake, ConnectionClosed) as error:
        raise RealtimeLost(f"{type(error).__name__}: {error}") from error


def _refused(status: int, body: bytes | bytearray | None) -> RealtimeRefused | RealtimeLost:
    """The error for an answer to the handshake that is no WebSocket."""
    text = (body or b"").decode(errors="replace").strip()
    reason = f"HTTP {status}: {text[:300]}" if text else f"HTTP {status}"
    if status in {408, 409, 429} or status >= 500:
        return RealtimeLost(reason)
    return RealtimeRefused("the connection", reason, str(status))


class Connection:
    """A connection that is open until it is closed or lost."""

    def __init__(
        self,
        websocket: ClientConnection,
        protocol: Protocol,
        listeners: Listeners,
        limits: OpenAIRealtime,
    ) -> None:
        self._websocket = websocket
        self._protocol = protocol
        self._listeners = listeners
        self._limits = limits
        self._messages_read = 0
        self._closing: asyncio.Task[None] | None = None
        self.lost: RealtimeLost | None = None
        """Why nothing can be sent any more."""
        self._is_open = False
        """Whether listeners are told when the connection is lost."""
        self._reader = asyncio.create_task(self._read(), name="realtime reader")
        self._keepalive = asyncio.create_task(self._keep_alive(), name="realtime keepalive")

    async def open(self, settings: AgentSettings) -> None:
        """Apply the first settings. From then on listeners are told when the connection is lost."""
        await self._update(settings)
        self._check()
        self._is_open = True

    # --- writing ---------------------------------------------------------------------------------

    async def send(self, command: Command, condition: Callable[[], bool]) -> bool:
        """Write what a command means, if the condition holds."""
        self._check()
        if not condition():
            return False
        if isinstance(command, UpdateSettings):
            await self._update(command.settings)
        else:
            await self._write(self._protocol.command(command))
        return True

    async def _update(self, settings: AgentSettings) -> None:
        """Apply settings, and wait until the server has accepted them."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timeout_s = self._limits.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._write([self._protocol.update(settings, answer)])
                await answer
        except TimeoutError:
            raise RealtimeNoAnswer("the settings", timeout_s) from None
        finally:
            answer.cancel()  # nobody waits for it any more

    def _check(self) -> None:
        if self.lost is not None:
            raise RealtimeLost(self.lost.reason)

    async def _write(self, messages: list[Message]) -> None:
        """Write the messages at once, and wait until the buffer has room.

        `send` of websockets writes before it waits for anything, as no message of ours has
        fragments. So nothing comes between a condition and the first message, or between two
        messages; and if the caller is cancelled here, everything has been written.
        """
        if not messages:
            return
        *first, last = [msgspec.json.encode(message) for message in messages]
        self._write_now(first)
        try:
            await self._websocket.send(last, text=True)
        except ConnectionClosed as closed:
            raise RealtimeLost(str(closed)) from closed
        if self._websocket.close_code is not None:  # since the buffer was full
            raise RealtimeLost("it ended while a message was sent")

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
                self._messages_read += 1
                if self._closing is None:
                    self._listeners.tell_message(raw)
                    answers = self._protocol.received(raw)
                    # A session that closes does not listen. No response that was to follow another
                    # one is asked for then, while its tools end and it is not closed yet.
                    if self._listeners.has_any:
                        self._write_now([msgspec.json.encode(answer) for answer in answers])
                    if self._listeners.pauses:
                        await self._listeners.pause()
        except ConnectionClosedOK:
            pass
        except ConnectionClosed as closed:
            error = RealtimeLost(str(closed))
        except Exception as unexpected:  # noqa: BLE001 - nobody awaits this task: listeners are told
            error = RealtimeLost(reason_of(unexpected))
            error.__cause__ = unexpected
        finally:
            # After an unexpected error or a cancel the socket is open still, but nobody reads it:
            # the answer to a regular close could not be read either.
            self._websocket.transport.abort()
            self._keepalive.cancel()
            if self.lost is None:
                self._lose(error or RealtimeLost("the server has closed it"))
                if self._is_open:
                    self._listeners.tell(ConnectionEnded(error))
            self._listeners.end_pauses()

    async def _keep_alive(self) -> None:
        """Ping the server, and end a connection of which nothing more can be read.

        The keepalive of websockets would end a connection whose listeners want a pause: the answer
        to its ping waits behind messages that are not read.
        """
        interval_s, timeout_s = self._limits.ping_interval_s, self._limits.ping_timeout_s
        try:
            while interval_s is not None:
                await asyncio.sleep(interval_s)
                messages_read = self._messages_read
                pong = asyncio.ensure_future(await self._websocket.ping())
                if timeout_s is None:
                    continue
                await asyncio.wait([pong], timeout=timeout_s)
                is_paused = bool(self._listeners.pauses)
                if not (pong.done() or is_paused or self._messages_read > messages_read):
                    await self._websocket.close(1011, "keepalive ping timeout")
        except ConnectionClosed:
            pass
        except Exception:  # noqa: BLE001 - nobody awaits this task
            _log.exception("Pinging a realtime server failed")

    # --- the end ---------------------------------------------------------------------------------

    def _lose(self, why: RealtimeLost) -> None:
        """Nothing can be sent any more, and no answer comes."""
        self.lost = why
        self._protocol.updates.lost(why)

    async def close(self) -> None:
        """Close the connection, and end its tasks; it may be repeated."""
        if self._closing is None or self._closing.cancelled():
            if self.lost is None:
                self._lose(RealtimeLost("it was closed"))
            self._closing = asyncio.create_task(self._close(), name="realtime close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._listeners.end_pauses()  # the other side's answer must be read
        try:
            async with asyncio.timeout(self._limits.close_timeout_s):
                await self._websocket.close()
        except Exception as error:  # noqa: BLE001 - whatever it is: there is no connection then
            _log.debug("A realtime connection was not closed in the regular way: %r", error)
        finally:
            self._websocket.transport.abort()
            await asyncio.wait([self._reader, self._keepalive])
