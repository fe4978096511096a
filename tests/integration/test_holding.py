"""Messages that a worker holds are renewed, requeued and released, whatever else happens."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kombu import Connection
from kombu.transport.redis import QoS

from capsule_tasks.taskpool.stock_redis import visibility
from capsule_tasks.taskpool.stock_redis.visibility import VisibilityRenewal
from capsule_tasks.testing.servers import PrivateServer

HANG_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def client(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


class Deaf:
    """A hub on which nothing ever happens later."""

    def call_later(self, *_: Any) -> None: ...


@pytest.fixture
def consumer() -> Any:
    """Celery's, which is one and the same through all its connections."""
    return SimpleNamespace(hub=Deaf())


@contextlib.contextmanager
def connected(renewal: VisibilityRenewal, consumer: Any, url: str) -> Iterator[Any]:
    """The messages of a connection that a consumer has just made, and that is looked after."""
    with Connection(url, transport_options={"visibility_timeout": 1}) as connection:
        renewal.prepare(connection)
        channel = connection.default_channel
        consumer.connection = connection
        consumer.task_consumer = SimpleNamespace(channel=channel)
        renewal.start()
        yield channel.qos
        channel.qos._delivered.clear()


def test_a_task_of_the_connection_before_the_last_is_acknowledged(
    server: PrivateServer, client: Any, consumer: Any
) -> None:
    renewal = VisibilityRenewal(consumer)
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(connected(renewal, consumer, server.url)) for _ in range(3)
        ]
        first.acks.hold("a", "{}")
        first.acks.flush()
        assert client.hkeys("unacked") == ["a"]
        first.ack("a")
        renewal.stop()
        assert client.hkeys("unacked") == []


def test_a_redis_that_allows_no_scripts_is_logged_once(
    server: PrivateServer,
    client: Any,
    consumer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Live messages are renewed there too, over one connection."""
    client.acl_setuser(
        "kombu", True, passwords="+x", keys=["*"], categories=["+@all", "-@scripting"]
    )
    monkeypatch.setattr(visibility, "_SWEEP_EVERY_S", 0.0)
    client.zadd("unacked_index", {"living": 0})
    scores: set[float] = set()
    connections: set[str] = set()
    renewal = VisibilityRenewal(consumer)
    with connected(renewal, consumer, f"redis://kombu:x@127.0.0.1:{server.port}") as qos:
        qos._delivered["living"] = None
        while len(scores) < 4:
            scores.add(client.zscore("unacked_index", "living"))
            connections |= {entry["id"] for entry in client.client_list()}
        renewal.stop()
    assert caplog.text.count("are requeued by kombu only") == 1
    assert "again" not in caplog.text
    assert len(connections) <= 5


def test_held_messages_are_renewed_while_many_others_are_requeued(
    server: PrivateServer, client: Any, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message that is put back takes a second here."""
    clock = SimpleNamespace(now=time.monotonic())
    times: queue.Queue[float] = queue.Queue()
    many = 250

    def restore_by_tag(_qos: Any, tag: str, *_: Any) -> None:
        times.put(client.zscore("unacked_index", "living"))
        clock.now += 1
        client.zrem("unacked_index", tag)

    monkeypatch.setattr(QoS, "restore_by_tag", restore_by_tag)
    fake = SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    monkeypatch.setattr(visibility, "time", fake)
    long_ago = time.time() - 2 * visibility.DEFAULT_VISIBILITY_S
    client.zadd("unacked_index", {f"dead-{number}": long_ago for number in range(many)})
    client.zadd("unacked_index", {"living": time.time()})
    renewal = VisibilityRenewal(consumer)
    with connected(renewal, consumer, server.url) as qos:
        qos._delivered["living"] = None
        scores = [times.get(timeout=HANG_S) for _ in range(many)]
        renewal.stop()
    assert len(set(scores)) == many
