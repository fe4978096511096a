"""OpenAI's Realtime API as a realtime model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING
from urllib.parse import quote

from capsule_tasks.errors import InvalidSetting, RealtimeInUse, RealtimeLost
from capsule_tasks.realtime.model import AgentSettings, Command, Listener
from capsule_tasks.realtime.openai.listeners import Listeners
from capsule_tasks.realtime.openai.protocol import Protocol
from capsule_tasks.realtime.playback import UnplayedAudio
from capsule_tasks.realtime.settings import RealtimeModelConfig
from capsule_tasks.runs.agents.checking import check_fields
from capsule_tasks.settings import PositiveCount, PositiveSeconds

if TYPE_CHECKING:
    from capsule_tasks.realtime.openai.connection import Connection

_URL = "wss://api.openai.com/v1/realtime?model="


@dataclass(eq=False)
class OpenAIRealtime:
    """A model of OpenAI, or of any server of its Realtime protocol, over a WebSocket.

    It needs the extra `realtime`. None switches a limit off.
    """

    model: str = "gpt-realtime"
    """Settings may name another one."""
    _: KW_ONLY
    open_timeout_s: PositiveSeconds = 10.0
    answer_timeout_s: PositiveSeconds = 10.0
    close_timeout_s: PositiveSeconds = 5.0
    ping_interval_s: PositiveSeconds | None = 20.0
    ping_timeout_s: PositiveSeconds | None = 20.0
    """A server of which nothing is read in this time after a ping is lost."""
    max_message_bytes: PositiveCount | None = 8 * 1024 * 1024
    """A server that sends a longer message loses the connection."""

    def __post_init__(self) -> None:
        check_fields(OpenAIRealtime, self)
        self._listeners = Listeners()
        self._opening: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    def __repr__(self) -> str:
        return f"OpenAIRealtime({self.model!r})"

    def add_listener(self, listener: Listener, *, server_events: bool = False) -> None:
        self._listeners.add(listener, server_events=server_events)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners.remove(listener)

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
            self._connection = None
        connection = self._connection = await self._connected(config, settings)
        try:
            await connection.open(settings)
        except BaseException:
            await connection.close()
            self._connection = None
            raise

    async def _connected(self, config: RealtimeModelConfig, settings: AgentSettings) -> Connection:
        try:
            from capsule_tasks.realtime.openai.connection import (  # noqa: PLC0415 - an extra
                Connection,
                handshake,
            )
        except ImportError as error:
            text = "OpenAIRealtime needs: pip install 'capsule-tasks[realtime]'"
            raise ImportError(text) from error
        model = settings.settings.model or self.model
        audio = UnplayedAudio(config.playback_tracker)
        audio.set_format(settings.settings.output_format or "pcm16")
        headers = config.headers
        if headers is None:
            headers = {"Authorization": f"Bearer {await _api_key(config)}"}
        url = _URL + quote(model, safe="") if config.url is None else config.url
        websocket = await handshake(url, headers, self)
        protocol = Protocol(model, audio, self._listeners.tell)
        return Connection(websocket, protocol, self._listeners, self)

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
