"""Checkpoints of hosted sessions in a Redis that is full."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from capsule_tasks.executions.hosting import profile
from capsule_tasks.protocol.calls import CheckpointMade, CheckpointRequest, RequestFailed
from capsule_tasks.settings import MIB
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.hosting import Caller, HostWorker
from tests.streaming import eventually


class Server:
    """A Redis that can be full."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self.client = redis.Redis.from_url(url)

    def fill(self, room: int) -> None:
        """Leave room for so many bytes."""
        self.client.config_set("maxmemory", self.client.info("memory")["used_memory"] + room)

    def chunks(self) -> int:
        """Chunks of all checkpoints, finished or not."""
        keys = self.client.scan_iter(match=f"{self.prefix}:*:checkpoint:*")
        return sum(self.client.llen(key) for key in keys)


@pytest.fixture
def server(tmp_path: Path, prefix: str) -> Iterator[Server]:
    with PrivateServer(tmp_path / "redis") as private:
        server = Server(private.url, prefix)
        yield server
        server.client.close()


@pytest.fixture
async def caller(server: Server) -> AsyncIterator[Caller]:
    caller = Caller(server.url, server.prefix)
    yield caller
    await caller.close()


async def test_a_checkpoint_that_a_full_redis_refuses_is_given_up_and_leaves_nothing(
    server: Server, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    async with HostWorker(server.url, server.prefix, {}) as worker:
        await caller.run("user-1", "n = 1")
        assert isinstance(await caller.ask("user-1", CheckpointRequest()), CheckpointMade)
        await caller.run("user-1", "import os; data = os.urandom(12 * 1024 * 1024)")
        server.fill(6 * MIB)
        for _ in range(2):
            refused = await caller.ask("user-1", CheckpointRequest())
            assert isinstance(refused, RequestFailed)
            assert "used memory > 'maxmemory'" in refused.message
            assert server.chunks() == 1
        assert "no checkpoint of session 'user-1' was made: Redis: " in caplog.text
        assert (await caller.run("user-1", "n, len(data)")).result_text == f"(1, {12 * MIB})"
        server.client.config_set("maxmemory", 0)
        assert isinstance(await caller.ask("user-1", CheckpointRequest()), CheckpointMade)
        assert server.chunks() == 13
        assert set(worker.hosted) == {"user-1"}


async def test_a_worker_that_stops_leaves_sessions_that_a_full_redis_does_not_save(
    server: Server, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PATIENCE_S", 0.0)
    async with HostWorker(server.url, server.prefix, {}) as worker:
        await caller.run("user-1", "import os; data = os.urandom(12 * 1024 * 1024)")
        await eventually(lambda: set(worker.hosted) == {"user-1"})
        server.fill(6 * MIB)
    assert server.chunks() == 0
    assert not (await caller.sessions.info("user-1")).owner
