"""The contract of services of an event loop: `capsule_tasks.system.service`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from capsule_tasks.errors import PoolUnavailable, StorageClosed
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.settings import PoolSettings, Profile
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.system.service import AsyncService
from tests.servers import fresh_prefix
from tests.services import HANG_S, nothing_left
from tests.streaming import Ground

CALLERS = 8
TURNS = [0, 1, 2, 5, 20, 50]
"""Turns of the event loop until the start is half done."""


class Listening:
    """Doorbells: they start when the first listens, and stop when they are closed."""

    def __init__(self, url: str) -> None:
        self._bells = Doorbells(url)

    async def start(self) -> None:
        await self._bells.listen(fresh_prefix(), lambda _: None)

    async def stop(self) -> None:
        await self._bells.close()


class Connected:
    """A connection: it starts with the first call, and stops when it is closed."""

    def __init__(self, url: str) -> None:
        self._connection = PipelinedConnection(url)
        self._store = ExecutionStore(self._connection)

    async def start(self) -> None:
        await self._store.read_record(fresh_prefix())

    async def stop(self) -> None:
        await self._connection.close()


def profile() -> Profile:
    return Profile(pool=PoolSettings(min_idle=1, max_sessions=1))


KINDS: dict[str, Callable[[str], AsyncService]] = {
    "doorbells": Listening,
    "connection": Connected,
    "spawner": lambda _: TemplateSpawner(profile()),
    "pool": lambda _: SessionPool({"app": profile()}),
    "supervisor": Ground,
}


@pytest.fixture(params=KINDS)
async def service(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[AsyncService]:
    """A service of one kind, of which nothing is left when the test is over."""
    with nothing_left(valkey_url):
        yield KINDS[request.param](valkey_url)


async def start(service: AsyncService) -> None:
    """Start the service; one that is stopped meanwhile may raise an error about that."""
    with contextlib.suppress(PoolUnavailable, StorageClosed):
        await service.start()


async def test_started_twice_and_stopped_twice(service: AsyncService) -> None:
    async with asyncio.timeout(HANG_S):
        before = asyncio.all_tasks()
        await service.start()
        await service.start()
        for _ in range(2):
            await service.stop()
            assert asyncio.all_tasks() == before


async def test_stopped_before_it_is_started_it_does_not_start_any_more(
    service: AsyncService,
) -> None:
    async with asyncio.timeout(HANG_S):
        before = asyncio.all_tasks()
        await service.stop()
        await start(service)
        assert asyncio.all_tasks() == before


async def test_each_of_many_tasks_that_stop_it_waits_for_the_end(service: AsyncService) -> None:
    async with asyncio.timeout(HANG_S):
        before = asyncio.all_tasks()
        await service.start()
        stopping: set[asyncio.Task[None]] = set()

        async def stop() -> None:
            await service.stop()
            assert asyncio.all_tasks() <= before | stopping

        async with asyncio.TaskGroup() as group:
            stopping |= {group.create_task(stop()) for _ in range(CALLERS)}


@pytest.mark.parametrize("turns", TURNS)
async def test_stopped_half_way_through_its_start(service: AsyncService, turns: int) -> None:
    """Another task stops it; the caller of start does not wait for ever."""
    async with asyncio.timeout(HANG_S):
        before = asyncio.all_tasks()
        starting = asyncio.create_task(start(service))
        for _ in range(turns):
            await asyncio.sleep(0)
        await service.stop()
        await starting
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("turns", TURNS)
async def test_cancelled_half_way_through_its_start(service: AsyncService, turns: int) -> None:
    async with asyncio.timeout(HANG_S):
        before = asyncio.all_tasks()
        starting = asyncio.create_task(start(service))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        await service.stop()
        assert asyncio.all_tasks() == before
