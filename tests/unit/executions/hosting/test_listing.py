"""The index of sessions learns of many uses in one write, and of none after a session has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.hosting import listing
from capsule_tasks.executions.hosting.listing import Listing
from capsule_tasks.storage.sessions.types import SessionEntry


class SlowIndex:
    """Writes when the test says so."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.begun: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def record(self, entries: Sequence[SessionEntry]) -> None:
        done = asyncio.get_running_loop().create_future()
        self.begun.put_nowait(done)
        await done
        self.written.append([entry.session_id for entry in entries])


@pytest.fixture
def index() -> SlowIndex:
    return SlowIndex()


@pytest.fixture
async def used(index: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listing]:
    monkeypatch.setattr(listing, "_PAUSE_S", 0.0)
    background = BackgroundTasks()
    used = Listing(index, background)
    background.spawn(used.run())
    yield used
    await background.stop()


def use(used: Listing, *session_ids: str) -> None:
    for session_id in session_ids:
        used.used(SessionEntry(session_id, "sandbox"))


async def test_uses_during_a_write_are_one_write_in_their_order(
    index: SlowIndex, used: Listing
) -> None:
    use(used, "a")
    first = await index.begun.get()
    use(used, "b", "a", "c", "b")
    first.set_result(None)
    (await index.begun.get()).set_result(None)
    use(used, "d")
    (await index.begun.get()).set_result(None)
    while len(index.written) < 3:
        await asyncio.sleep(0)
    assert index.written == [["a"], ["a", "c", "b"], ["d"]]


async def test_a_failed_write_is_repeated_without_sessions_that_have_left(
    index: SlowIndex, used: Listing
) -> None:
    use(used, "a", "b")
    first = await index.begun.get()
    used.discard("a")
    first.set_exception(StorageUnavailable("redis", "it is away"))
    (await index.begun.get()).set_result(None)
    while not index.written:
        await asyncio.sleep(0)
    assert index.written == [["b"]]
