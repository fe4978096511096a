"""OpenAI's Realtime API as a realtime model."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import TYPE_CHECKING
from urllib.parse import quote

from capsule_tasks.errors import (
    InvalidSetting,
    RealtimeInUse,
    RealtimeLost,
    RealtimeNoAnswer,
    RealtimeRefused,
)
from capsule_tasks.realtime.model import (
    AgentSettings,
    Command,
    Listener,
    ModelEvent,
    ServerEvent,
)
from capsule_tasks.realtime.playback import UnplayedAudio
from capsule_tasks.realtime.settings import RealtimeModelConfig

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from capsule_tasks.realtime.openai.connection import Connection

_log = logging.getLogger(__name__)

_URL = "wss://api.openai.com/v1/realtime?model="


class OpenAIRealtime:
    """A model of OpenAI, or of any server of its Realtime protocol, over a WebSocket.

    It needs the extra `realtime`.
    """

    def __init__(
        self,
        model: str = "gpt-realtime",
        *,
        open_timeout_s: float = 10.0,
        answer_timeout_s: float = 10.0,
        close_timeout_s: float = 5.0,
        ping_interval_s: float | None = 20.0,
        ping_timeout_s: float | None = 20.0,
        max_message_bytes: int | None = 8 * 1024 * 1024,
    ) -> None:
        """`model` may be overridden by settings. A server that does not answer a ping in time, and
        one that sends a longer message, loses the connection. None switches a limit off.
        """
        limits: dict[str, float | None] = {
            "open_timeout_s": open_timeout_s,
            "answer_timeout_s": answer_timeout_s,
            "close_timeout_s": close_timeout_s,
            "ping_interval_s": ping_interval_s,
            "ping_timeout_s": ping_timeout_s,
            "max_message_bytes": max_message_bytes,
        }
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise InvalidSetting(f"OpenAIRealtime.{name}", value, "more than 0")
        self.name = model
        self._open_timeout_s = open_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._close_timeout_s = close_timeout_s
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self._max_message_bytes = max_message_bytes
        self._listeners: tuple[Listener, ...] = ()
        self._watchers: tuple[Listener, ...] = ()
        """The listeners that want the server's messages."""
        self._opening: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    def __repr__(self) -> str:
        return f"OpenAIRealtime({self.name!r})"

    # --- listeners -------------------------------------------------------------------------------

    def add_listener(self, listener: Listener, *, server_events: bool = False) -> None:
        self.remove_listener(listener)
        self._listeners = (*self._listeners, listener)
        if server_events:
            self._watchers = (*self._watchers, listener)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._watchers = tuple(each for each in self._watchers if each is not listener)

    def _emit(self, event: ModelEvent) -> list[Awaitable[None]]:
        """Tell the listeners an event; what they want to be waited for."""
        # A message of a type that is not known has been told to those who want each message.
        told = self._watchers if type(event) is ServerEvent else ()
        return _tell([each for each in self._listeners if each not in told], event)

    def _watch(self, raw: bytes) -> list[Awaitable[None]]:
        return _tell(self._watchers, ServerEvent(raw)) if self._watchers else []

    # --- the connection --------------------------------------------------------------------------

    async def connect(self, config: RealtimeModelConfig, settings: AgentSettings) -> None:
        """Connect, and apply the settings.

        Raises RealtimeRefused, RealtimeNoAnswer or RealtimeLost, and releases everything.
        """
        connection = self._connection
        if self._opening is not None or (connection is not None and connection.lost is None):
            raise RealtimeInUse(repr(self))
        opening = self._opening = asyncio.create_task(
            self._open(config, settings), name="realtime open"
        )
        try:
            await opening
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RealtimeLost("the model was closed while it connected") from None
        finally:
            self._opening = None

    async def _open(self, config: RealtimeModelConfig, settings: AgentSettings) -> None:
        if self._connection is not None:
            await self._connection.close()  # it was lost, and has nothing left but its name
        connection = None
        try:
            connection = self._connection = await self._connected(config, settings)
            await connection.open(settings)
        except BaseException:
            if connection is not None:
                await connection.close()
                self._connection = None
            raise

    async def _connected(self, config: RealtimeModelConfig, settings: AgentSettings) -> Connection:
        try:
            from capsule_tasks.realtime.openai.connection import (  # noqa: PLC0415 - an extra
                Connection,
            )
        except ImportError as error:
            text = "OpenAIRealtime needs: pip install 'capsule-tasks[realtime]'"
            raise ImportError(text) from error
        model = settings.settings.model or self.name
        audio = UnplayedAudio(config.playback_tracker)
        audio.set_format(settings.settings.output_format or "pcm16")
        return Connection(
            await self._websocket(config, model),
            model=model,
            emit=self._emit,
            watch=self._watch,
            audio=audio,
            answer_timeout_s=self._answer_timeout_s,
            close_timeout_s=self._close_timeout_s,
        )

    async def _websocket(self, config: RealtimeModelConfig, model: str) -> ClientConnection:
        from websockets.asyncio.client import connect  # noqa: PLC0415 - it is there
        from websockets.exceptions import (  # noqa: PLC0415
            ConnectionClosed,
            InvalidHandshake,
            InvalidStatus,
            InvalidURI,
        )

        headers = config.headers
        if headers is None:
            headers = {"Authorization": f"Bearer {await _api_key(config)}"}
        for name, value in headers.items():
            if "\n" in value or "\r" in value:  # as at the end of a key that was read from a file
                must = "a text of one line"
                raise InvalidSetting(f"the header {name!r} of a realtime model", "(secret)", must)
        url = _URL + quote(model, safe="") if config.url is None else config.url
        try:
            return await connect(
                url,
                additional_headers=dict(headers),
                # Base64 of audio shrinks by a quarter, and that would be most of the work.
                compression=None,
                open_timeout=self._open_timeout_s,
                close_timeout=self._close_timeout_s,
                ping_interval=self._ping_interval_s,
                ping_timeout=self._ping_timeout_s,
                max_size=self._max_message_bytes,
            )
        except (InvalidURI, ValueError) as error:
            must = "the URL of a WebSocket, ws://… or wss://…"
            raise InvalidSetting("RealtimeModelConfig.url", url, must) from error
        except InvalidStatus as error:
            raise _refused(error.response.status_code, error.response.body) from error
        except TimeoutError as error:
            raise RealtimeNoAnswer("the connection", self._open_timeout_s) from error
        except (OSError, InvalidHandshake, ConnectionClosed) as error:
            raise RealtimeLost(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Release the connection and its tasks. It may be repeated, and called at any time."""
        if (opening := self._opening) is not None:
            opening.cancel()
            await asyncio.wait({opening})
        if (connection := self._connection) is not None:
            await connection.close()
            if self._connection is connection:
                self._connection = None

    # --- commands --------------------------------------------------------------------------------

    async def send_event(self, command: Command) -> None:
        await self.send_event_if(command, lambda: True)

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        if (connection := self._connection) is None or self._opening is not None:
            raise RealtimeLost("it is not open")
        return await connection.send(command, condition)


def _tell(listeners: Iterable[Listener], event: ModelEvent) -> list[Awaitable[None]]:
    pauses = []
    for listener in listeners:
        try:
            pause = listener.on_event(event)
        except Exception:  # noqa: BLE001 - it must not end the conversation, nor keep others from the event
            _log.exception("A listener of a realtime model failed at %s", event.type)
        else:
            if pause is not None:
                pauses.append(pause)
    return pauses


async def _api_key(config: RealtimeModelConfig) -> str:
    key = config.api_key
    if callable(key):
        made = key()
        key = await made if isawaitable(made) else made
    elif key is None:
        key = os.environ.get("OPENAI_API_KEY")
    if not key:
        must = "a key, or a function that gives one, unless OPENAI_API_KEY or headers have it"
        raise InvalidSetting("RealtimeModelConfig.api_key", key, must)
    return key


def _refused(status: int, body: bytes | bytearray | None) -> RealtimeRefused | RealtimeLost:
    """The error for an answer to the handshake that is no WebSocket."""
    text = (body or b"").decode(errors="replace").strip()
    reason = f"HTTP {status}: {text[:300]}" if text else f"HTTP {status}"
    if status in {408, 409, 429} or status >= 500:
        return RealtimeLost(reason)
    return RealtimeRefused("the connection", reason, str(status))
