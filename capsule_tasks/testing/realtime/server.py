"""A local WebSocket server that speaks OpenAI's Realtime protocol, for tests."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from capsule_tasks.testing.realtime.checks import Refused
from capsule_tasks.testing.realtime.connection import Message, RealtimeConnection
from capsule_tasks.testing.realtime.script import Scripted

HOST = "127.0.0.1"
WAIT_S = 5.0
_MAX_MESSAGE_BYTES = 32 * 1024 * 1024

Wanted = str | Callable[[Message], bool]
"""Messages of clients: a type, or a function that says whether a message is meant."""
Script = Iterable[Scripted] | Callable[[int], Iterable[Scripted]]
_T = TypeVar("_T")


@dataclass
class Rule:
    """A way to treat some messages, in place of the server's regular answer."""

    is_meant: Callable[[Message], bool]
    refusal: Refused | None
    until: asyncio.Event | None
    times: int | None


class RealtimeServer:
    """A server of OpenAI's Realtime protocol on loopback, which answers as a test has scripted.

        async with RealtimeServer(["Hello.", [calls("look")], speaks("It is a cat.")]) as server:
            config = RealtimeModelConfig(url=server.url, api_key="a key")

    Each `response.create` takes the next reply of the script, whichever connection it comes from;
    with a function, each connection has the script that the function returns for its number, which
    counts from 0. `add` appends replies later. The server refuses with an `error` event what
    OpenAI's server refuses. Such an error, unless `expect_errors` named its code, and a response
    that the script has no reply for are an `AssertionError` when the block ends.

    `transcripts` are those of audio that a client commits, in order: texts, and exceptions for
    audio that cannot be transcribed. After the last one there is no transcript until the test calls
    `RealtimeConnection.transcribe`. The server reads at most `receive_buffer_bytes` ahead in the
    kernel, if that is given.
    """

    def __init__(
        self,
        replies: Script = (),
        *,
        transcripts: Iterable[str | Exception | None] = (),
        receive_buffer_bytes: int | None = None,
    ) -> None:
        self._script: Callable[[int], Iterable[Scripted]] | None = None
        self._replies: deque[Scripted] = deque()
        if callable(replies):
            self._script = replies
        else:
            self._replies.extend(replies)
        self._transcripts = deque(transcripts)
        self._receive_buffer_bytes = receive_buffer_bytes
        self._rules: list[Rule] = []
        self._refused_handshakes: deque[HTTPStatus] = deque()
        self._handshake_gate: asyncio.Event | None = None
        self._expected: set[str | None] = set()
        self._failures: list[Exception] = []
        self._server: Server | None = None
        self._change: asyncio.Future[None] | None = None
        self._count = 0
        self.connections: list[RealtimeConnection] = []
        """All connections since the start, in the order in which they came."""
        self.received: list[Message] = []
        """The messages of all connections, in the order in which they came."""
        self.errors: list[dict[str, Any]] = []
        """The errors that the server has sent without being told to."""
        self.handshakes = 0
        """Attempts to connect, the refused ones included."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.stop()
        if self._failures and (error is None or isinstance(error, Exception)):
            raise AssertionError("\n".join(map(str, self._failures))) from self._failures[0]

    async def start(self) -> None:
        if self._server is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if self._receive_buffer_bytes is not None:  # its connections inherit the size
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
        listener.bind((HOST, 0))
        self._server = await serve(
            self._connected,
            sock=listener,
            compression=None,
            ping_interval=None,
            max_size=_MAX_MESSAGE_BYTES,
            process_request=self._handshake,
        )

    async def stop(self) -> None:
        """Reset the open connections, and end. It may be repeated."""
        if self._server is None:
            return
        if self._handshake_gate is not None:
            self._handshake_gate.set()
        server, self._server = self._server, None
        server.close(close_connections=False)
        for connection in self.open_connections:
            connection.abort()
        await server.wait_closed()

    @property
    def url(self) -> str:
        return f"ws://{HOST}:{self.port}/v1/realtime"

    @property
    def port(self) -> int:
        if self._server is None:
            raise AssertionError("this server does not run; start it first")
        port: int = next(iter(self._server.sockets)).getsockname()[1]
        return port

    # --- the script ---

    def add(self, *replies: Scripted) -> None:
        """Append replies to the script that all connections share."""
        self._replies.extend(replies)

    def refuse(
        self,
        wanted: Wanted,
        message: str = "refused by the script",
        code: str | None = "invalid_value",
        *,
        times: int | None = 1,
    ) -> None:
        """Answer the next `times` such messages with an error; None: all of them."""
        self._rule(wanted, times, refusal=Refused(message, code))

    def ignore(self, wanted: Wanted, *, times: int | None = 1) -> None:
        """Leave the next `times` such messages without any effect or answer; None: all of them."""
        self._rule(wanted, times)

    def delay(self, wanted: Wanted, until: asyncio.Event, *, times: int | None = 1) -> None:
        """Take the next `times` such messages only once the event is set; others go on."""
        self._rule(wanted, times, until=until)

    def expect_errors(self, *codes: str | None) -> None:
        """Errors with these codes do not fail the test."""
        self._expected.update(codes)

    def refuse_handshakes(self, status: int = 401, times: int = 1) -> None:
        self._refused_handshakes.extend([HTTPStatus(status)] * times)

    def delay_handshakes(self, until: asyncio.Event) -> None:
        """Answer no handshake until the event is set."""
        self._handshake_gate = until

    # --- the connections ---

    @property
    def open_connections(self) -> list[RealtimeConnection]:
        return [connection for connection in self.connections if connection.is_open]

    @property
    def connection(self) -> RealtimeConnection:
        """The connection that came last."""
        if not self.connections:
            raise AssertionError("no client has connected to the realtime server")
        return self.connections[-1]

    async def send(self, event: dict[str, Any] | bytes) -> None:
        """Send an event over the connection that came last."""
        await self.connection.send(event)

    async def user_speaks(self, transcript: str | None = None, audio_ms: int = 1000) -> str:
        """The user speaks on the connection that came last; returns the id of the item."""
        return await self.connection.user_speaks(transcript, audio_ms)

    def forget(self) -> None:
        """Forget what was received, and the connections that have ended: a long test grows."""
        self.received.clear()
        self.connections = self.open_connections

    # --- waits ---

    def count(self, wanted: Wanted) -> int:
        """How many such messages were received."""
        return len(self.find(wanted))

    def find(self, wanted: Wanted) -> list[Message]:
        """Such messages, in the order in which they came."""
        is_meant = _test_of(wanted)
        return [message for message in self.received if is_meant(message)]

    async def wait_for(
        self, wanted: Wanted, count: int = 1, *, timeout_s: float = WAIT_S
    ) -> Message:
        """Wait until so many such messages were received since the start; returns the last."""

        def found() -> Message | None:
            messages = self.find(wanted)
            return messages[count - 1] if len(messages) >= count else None

        return await self.wait_until(found, f"{count} x {wanted}", timeout_s=timeout_s)

    async def wait_for_connection(self, count: int = 1) -> RealtimeConnection:
        """Wait until so many clients have connected since the start; returns the last of them."""

        def found() -> RealtimeConnection | None:
            return self.connections[count - 1] if len(self.connections) >= count else None

        return await self.wait_until(found, f"{count} connections")

    async def wait_for_open(self, count: int) -> None:
        """Wait until so many connections are open."""

        def found() -> bool:
            return len(self.open_connections) == count

        await self.wait_until(found, f"{count} open connections")

    async def wait_until(
        self, condition: Callable[[], _T | None], what: str, *, timeout_s: float = WAIT_S
    ) -> _T:
        """Wait until the condition holds, which is asked for whenever something has happened."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := condition()):
                    if self._failures:
                        raise self._failures[0]
                    if self._change is None:
                        self._change = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._change)
                return found
        except TimeoutError:
            kinds = [message.get("type") for message in self.received]
            raise AssertionError(
                f"the realtime server has waited {timeout_s:g} s for {what}; "
                f"{len(self.open_connections)} connections are open; received: {kinds}"
            ) from None

    # --- for the connections ---

    def took(self, message: Message) -> None:
        self.received.append(message)
        self.changed()

    def changed(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        self._change = None

    def rule_for(self, message: Message) -> Rule | None:
        for rule in self._rules:
            if rule.is_meant(message):
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times == 0:
                        self._rules.remove(rule)
                return rule
        return None

    def refused(self, error: dict[str, Any], message: Message | None) -> None:
        self.errors.append(error)
        if error["code"] not in self._expected:
            text = f"the realtime server refused {message!r}: {error['message']} ({error['code']})"
            self._failures.append(AssertionError(text))
        self.changed()

    def failed(self, error: Exception) -> None:
        self._failures.append(error)
        self.changed()

    def next_transcript(self) -> str | Exception | None:
        return self._transcripts.popleft() if self._transcripts else None

    # --- the socket ---

    async def _handshake(self, connection: ServerConnection, _: Request) -> Response | None:
        self.handshakes += 1
        self.changed()
        if self._handshake_gate is not None:
            await self._handshake_gate.wait()
        if self._refused_handshakes:
            status = self._refused_handshakes.popleft()
            return connection.respond(status, '{"error": {"message": "refused by the script"}}')
        return None

    async def _connected(self, websocket: ServerConnection) -> None:
        number, self._count = self._count, self._count + 1
        take = (
            self._replies.popleft if self._script is None else iter(self._script(number)).__next__
        )
        asked = urlsplit("" if websocket.request is None else websocket.request.path)
        (model,) = parse_qs(asked.query).get("model", ["gpt-realtime"])[:1]
        connection = RealtimeConnection(self, websocket, number, take, model)
        self.connections.append(connection)
        self.changed()
        await connection.serve()

    def _rule(
        self,
        wanted: Wanted,
        times: int | None,
        *,
        refusal: Refused | None = None,
        until: asyncio.Event | None = None,
    ) -> None:
        self._rules.append(Rule(_test_of(wanted), refusal, until, times))


def _test_of(wanted: Wanted) -> Callable[[Message], bool]:
    if isinstance(wanted, str):
        return lambda message: message.get("type") == wanted
    return wanted
