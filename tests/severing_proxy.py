"""A TCP proxy that severs or stalls the links of running programs, pushes included.

`cutting_proxy` plans cuts command by command and knows one reply for each. This one forwards bytes,
so that pipelines and subscriptions pass through it as they are, and severs all its links at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal, Self

Manner = Literal["now", "before", "half", "after"]
MANNERS: tuple[Manner, ...] = ("now", "before", "half", "after")
"""At once; or at the next bytes of the client: before the server has it, when it has one half,
or when it has it all and its answer is on the way."""
_CHUNK = 64 * 1024


class SeveringProxy:
    """Forwards to a server on loopback that may come and go; entered, it has its port."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pattern: bytes | None = None
        self._may_pass = asyncio.Event()
        self._is_stalled = threading.Event()
        self.severed: Counter[str] = Counter()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def sever(self, chance: random.Random) -> None:
        """Every link that there is, each in a manner of its own."""
        seed = chance.random()
        self._loop.call_soon_threadsafe(self._sever, random.Random(seed))

    def stall_at(self, pattern: bytes) -> None:
        """Pass nothing to the server from the first bytes that match this pattern.

        What another call had stalled goes on.
        """

        def stall() -> None:
            self._pattern = pattern
            self._may_pass.set()

        self._is_stalled.clear()
        self._call(stall)

    def stalled(self, timeout_s: float) -> None:
        """Wait until that is so."""
        assert self._is_stalled.wait(timeout_s), f"no client sent {self._pattern!r}"

    def go_on(self) -> None:
        """Pass on what was held up."""

        def pass_on() -> None:
            self._pattern = None
            self._may_pass.set()

        self._call(pass_on)

    def _call(self, change: Callable[[], None]) -> None:
        """On the loop's own thread, and done."""

        async def make() -> None:
            change()

        asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    async def _gate(self, chunk: bytes) -> None:
        if self._pattern is not None and self._pattern in chunk:
            self._pattern = None
            self._may_pass.clear()
            self._is_stalled.set()
        await self._may_pass.wait()

    def _sever(self, chance: random.Random) -> None:
        for link in list(self._links):
            if link.manner is None:
                link.sever(chance.choice(MANNERS))

    async def _listen(self) -> None:
        self._may_pass.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            return  # the proxy is closed; asyncio would tell of a task that was cancelled
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            return
        link = _Link(self._gate)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                ways = [
                    pumps.create_task(link.to_server(reader, forth)),
                    pumps.create_task(link.to_client(back, writer)),
                    pumps.create_task(link.is_cut.wait()),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        finally:
            self._links.discard(link)
            if link.is_cut.is_set():
                self.severed[str(link.manner)] += 1
            forth.close()


class _Link:
    """One connection through the proxy."""

    def __init__(self, gate: Callable[[bytes], Awaitable[None]]) -> None:
        self._gate = gate
        self.manner: Manner | None = None
        self.is_cut = asyncio.Event()

    def sever(self, manner: Manner) -> None:
        self.manner = manner
        if manner == "now":
            self.is_cut.set()

    async def to_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self.manner in ("before", "half"):
                    writer.write(chunk[: len(chunk) // 2] if self.manner == "half" else b"")
                    await writer.drain()
                    self.is_cut.set()
                    return
                await self._gate(chunk)
                writer.write(chunk)
                await writer.drain()

    async def to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self.manner == "after":
                    self.is_cut.set()
                    return
                writer.write(chunk)
                await writer.drain()
