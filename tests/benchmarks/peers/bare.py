"""The raw limit: bare interpreters that do the same work with nothing in between.

The parent's side is the leanest that asyncio's stock loop allows: one reader registered once, one
read for each readiness, no protocol and no stream object.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from typing import Self

_READ_BYTES = 256 * 1024
_ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(65536):
    sock.sendall(data)
"""
_WAIT_FOR_GO = "import sys\nsys.stdin.readline()\n"
_FLUSH = "import sys\nsys.stdout.flush()\n"
LIVE = "import sys\nsys.stdout.reconfigure(line_buffering=True)\n"
"""Each `print` is seen at once, as in a session; by default a pipe holds back up to 8 KB."""


def start_bare_s() -> float:
    """Seconds to start an interpreter that does nothing, and to see it end."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


class EchoChild:
    """Sends back whatever it gets over a socketpair, in a loop that only blocks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self.pid = self._child.pid
        self._missing = 0
        self._arrived: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._ours, self._on_readable)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.remove_reader(self._ours)
        self._ours.close()
        await asyncio.to_thread(self._child.wait)

    async def echo(self, data: bytes) -> None:
        """Send `data` and wait until all of it is back."""
        self._missing = len(data)
        self._arrived = self._loop.create_future()
        self._ours.send(data)
        await self._arrived

    def _on_readable(self) -> None:
        data = self._ours.recv(_READ_BYTES)
        self._missing -= len(data)
        if not data:
            self._arrived.set_exception(EOFError("the echo child is gone"))
        elif not self._missing:
            self._arrived.set_result(None)


class PipeChild:
    """Runs `work` on a go, its standard output a raw pipe; `prepare` has run before that."""

    def __init__(self, prepare: str, work: str) -> None:
        self._loop = asyncio.get_running_loop()
        source = f"{prepare}print('ready', flush=True)\n{_WAIT_FOR_GO}{work}{_FLUSH}"
        self._child = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._received = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def seconds_for(self, size: int) -> float:
        """From the go to the last of `size` bytes; then the child ends."""
        with self._child as child:
            await asyncio.to_thread(child.stdout.readline)
            os.set_blocking(child.stdout.fileno(), False)
            begun = time.perf_counter()
            self._loop.add_reader(child.stdout, self._on_readable, size)
            child.stdin.write(b"go\n")
            try:
                await self._ended
                return time.perf_counter() - begun
            finally:
                self._loop.remove_reader(child.stdout)

    def _on_readable(self, size: int) -> None:
        data = os.read(self._child.stdout.fileno(), _READ_BYTES)
        self._received += len(data)
        if self._received == size:
            self._ended.set_result(None)
        elif not data or self._received > size:
            fault = f"{self._received} of {size} bytes came out of the pipe"
            self._ended.set_exception(EOFError(fault))
