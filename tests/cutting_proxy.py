"""A TCP proxy that loses connections at the worst moments: before a command, or before its reply.

Each connection is a thread of its own. A cut `before` the server got a command loses it; a cut
`after` it was applied loses only the reply. Whole commands are counted, not packets.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Literal, Self

Cut = Literal["pass", "before", "after"]


class CuttingProxy:
    """Forwards to a server on loopback and cuts as `plan` says, one entry for each script call."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._plan: deque[Cut] = deque()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._is_closed = False
        self.cuts = 0
        self.calls = 0
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def plan(self, cuts: Iterable[Cut]) -> None:
        """Plan what happens to the next script calls; calls after the plan's end pass."""
        with self._lock:
            self._plan = deque(cuts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for open_socket in self._sockets:
                with contextlib.suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            with contextlib.suppress(OSError):
                commands, replies = client.makefile("rb"), server.makefile("rb")
                pushes = threading.Thread(target=_pass_on, args=(replies, client), daemon=True)
                is_subscribed = False
                while command := read_value(commands):
                    if b"SUBSCRIBE" in command[:32] and not is_subscribed:
                        is_subscribed = True
                        pushes.start()
                    if is_subscribed:
                        server.sendall(command)
                        continue
                    if not self._forward(command, client, server, replies):
                        break
            with self._lock:
                self._sockets -= {client, server}

    def _forward(
        self, command: bytes, client: socket.socket, server: socket.socket, replies: object
    ) -> bool:
        cut: Cut = "pass"
        if b"EVAL" in command[:32]:
            with self._lock:
                cut = self._plan.popleft() if self._plan else "pass"
                self.cuts += cut != "pass"
                self.calls += 1
        if cut == "before":
            return False
        server.sendall(command)
        reply = read_value(replies)
        if cut == "after" and not reply.startswith(b"-NOSCRIPT"):
            return False
        client.sendall(reply)
        return True


def _pass_on(replies: io.BufferedReader, client: socket.socket) -> None:
    """From a subscription on the server speaks unasked: no reply belongs to a command."""
    with contextlib.suppress(OSError, ValueError):
        while data := replies.read1():
            client.sendall(data)
        client.shutdown(socket.SHUT_RDWR)


def read_value(stream: object) -> bytes:
    """The bytes of one RESP2 value, commands included; empty at the end of the stream."""
    line: bytes = stream.readline()  # type: ignore[attr-defined]
    if not line:
        return b""
    kind, rest = line[:1], line[1:-2]
    if kind == b"$" and rest != b"-1":
        body: bytes = stream.read(int(rest) + 2)  # type: ignore[attr-defined]
        return line + body
    if kind == b"*" and rest != b"-1":
        return line + b"".join(read_value(stream) for _ in range(int(rest)))
    return line
