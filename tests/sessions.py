"""Helpers for tests of sessions: collect the messages of an execution, wait for a condition."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from capsule_tasks.protocol.messages import Code, Message, Output, Terminal
from capsule_tasks.sessions import Session, SessionConfig
from capsule_tasks.settings import ChildSettings

HANG_S = 30.0
"""No step of any test takes this long unless something hangs."""


async def collect(session: Session, source: str, **options: Any) -> list[Message]:
    """All messages of one execution, the terminal message last."""
    async with asyncio.timeout(HANG_S):
        return [message async for message in session.execute(source, **options)]


async def end_of(session: Session, source: str, **options: Any) -> Any:
    """The terminal message of one execution."""
    return (await collect(session, source, **options))[-1]


async def submitted(session: Session, source: str, **options: Any) -> list[Message]:
    """The same of one that is begun by `submit`."""
    messages: list[Message] = []
    over = asyncio.get_running_loop().create_future()

    def consume(message: Message) -> None:
        messages.append(message)
        if isinstance(message, Terminal):
            over.set_result(None)

    session.submit(Code(source=source), consume, execution_id="submitted", **options)
    async with asyncio.timeout(HANG_S):
        await over
    return messages


def child_config(*, max_frame_bytes: int = ChildSettings().max_frame_bytes, **sections: Any) -> Any:
    """A session's settings with some sections of its child's: `child_config(limits=...)`."""
    return SessionConfig(child=ChildSettings(max_frame_bytes=max_frame_bytes, **sections))


def text(messages: list[Message], stream: str = "stdout") -> str:
    """The text that was written to one stream."""
    outputs = [m for m in messages if isinstance(m, Output)]
    return "".join(m.data for m in outputs if m.stream == stream)


class Watched:
    """An execution that runs in the background while the test does something to it."""

    def __init__(self, session: Session, source: str, **options: Any) -> None:
        self.messages: list[Message] = []
        self.source = source
        self.execution_id: str = options.setdefault("execution_id", f"watched-{id(self)}")
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._follow(session.execute(source, **options)))

    async def until_output(self, wanted: str) -> None:
        """Wait until `wanted` has been written to either stream."""
        await self._until(lambda: wanted in text(self.messages) + text(self.messages, "stderr"))

    async def until(self, kind: type[Message]) -> Any:
        """Wait for a message of a kind; the first one."""
        await self._until(lambda: any(isinstance(m, kind) for m in self.messages))
        return next(m for m in self.messages if isinstance(m, kind))

    async def ended(self) -> Any:
        """Wait for the end; the terminal message."""
        async with asyncio.timeout(HANG_S):
            await self._task
        terminals = [m for m in self.messages if isinstance(m, Terminal)]
        assert len(terminals) == 1, terminals
        assert self.messages[-1] is terminals[0]
        return terminals[0]

    async def _follow(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            async with self._changed:
                self.messages.append(message)
                self._changed.notify_all()

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(condition)


async def eventually(condition: Callable[[], Any]) -> Any:
    """Poll `condition`, which gives no signal, and return its first true value."""
    async with asyncio.timeout(HANG_S):
        while not (value := condition()):
            await asyncio.sleep(0.001)
    return value


async def until_exited(pid: int) -> None:
    """Wait until a process has exited, whichever process is its parent."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        async with asyncio.timeout(HANG_S):
            await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class GilHold:
    """Code that keeps the GIL, in one C call, from its announcement until the test releases it.

    It speaks through shared memory: any other way to speak would release the GIL.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "held-and-let-go"
        self._file.write_bytes(b"\0\0")
        self.definition = f"""
def hold_gil():
    import itertools, mmap, operator
    with open({str(self._file)!r}, "r+b") as file:
        flags = mmap.mmap(file.fileno(), 2)
    say = map(operator.not_, map(flags.__setitem__, [0], [1]))
    look = map(operator.not_, map(flags.__getitem__, itertools.repeat(1)))
    return not all(itertools.chain(say, look))
"""
        self.source = f"{self.definition}hold_gil()"

    async def until_held(self) -> None:
        await eventually(lambda: self._file.read_bytes()[0])

    def let_go(self) -> None:
        with self._file.open("r+b") as file:
            file.seek(1)
            file.write(b"\1")
