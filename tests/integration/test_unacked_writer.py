"""Deliveries and acknowledgements reach the keys of kombu, whatever happens to the connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from capsule_tasks.errors import StorageDenied, StorageFull, StorageUnavailable
from capsule_tasks.storage.stock_redis.unacked_writer import UnackedWriter
from capsule_tasks.testing.servers import PrivateServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        yield server


@contextlib.contextmanager
def writer_to(url: str, *, has_marks: bool = False, **options: Any) -> Iterator[UnackedWriter]:
    with Connection(url, transport_options=options) as connection:
        writer = UnackedWriter(connection.default_channel, has_marks=has_marks)
        try:
            yield writer
        finally:
            writer.close()


def noted(client: Any, prefix: str = "") -> tuple[dict[str, str], set[str], set[str]]:
    """The messages, those in the index, those that are marked."""
    return (
        client.hgetall(f"{prefix}unacked"),
        set(client.zrange(f"{prefix}unacked_index", 0, -1)),
        set(client.zrange(f"{prefix}unacked_index.renewed", 0, -1)),
    )


@pytest.fixture
def client(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.mark.parametrize("prefix", ["", "shop:"])
@pytest.mark.parametrize("has_marks", [True, False])
def test_deliveries_and_acknowledgements_are_stored(
    server: PrivateServer, client: Any, prefix: str, has_marks: bool
) -> None:
    with writer_to(server.url, has_marks=has_marks, global_keyprefix=prefix) as writer:
        for number in range(5000):
            writer.deliver(f"t{number}", "{}")
            if number % 100 == 0:
                writer.write()
        for number in range(4998):
            writer.ack(f"t{number}")
        writer.flush()
        assert writer.is_flushed
        left = {"t4998", "t4999"}
        expected = (dict.fromkeys(left, "{}"), left, left if has_marks else set())
        assert noted(client, prefix) == expected


def test_a_redelivered_message_is_held_again(server: PrivateServer, client: Any) -> None:
    with writer_to(server.url) as writer:
        writer.deliver("a", "once")
        writer.ack("a")
        writer.deliver("a", "again")
        writer.flush()
        assert noted(client)[0] == {"a": "again"}


def test_writes_on_a_lost_connection_are_repeated_on_the_next(
    server: PrivateServer, client: Any
) -> None:
    with writer_to(server.url) as writer:
        writer.deliver("a", "1")
        writer.flush()
        client.client_kill_filter(_type="normal", skipme=True)
        writer.deliver("b", "2")
        writer.ack("a")
        for _ in range(3):  # the first may go into a socket that is closed at the other end
            with contextlib.suppress(StorageUnavailable):
                writer.flush()
        assert noted(client)[:2] == ({"b": "2"}, {"b"})


def test_writes_for_an_absent_server_are_carried_over_to_another_writer(
    server: PrivateServer, client: Any, tmp_path: Path
) -> None:
    port = server.port
    with writer_to(server.url) as old, writer_to(server.url) as new:
        old.deliver("a", "1")
        old.flush()
        server.stop()
        old.ack("a")
        old.deliver("b", "2")
        new.deliver("c", "3")
        with pytest.raises(StorageUnavailable):
            old.flush()
        assert not old.is_flushed
        with PrivateServer(tmp_path / "redis", port=port, aof=True):
            new.take_over(old)
            new.flush()
            assert old.is_flushed
            assert noted(client)[:2] == ({"b": "2", "c": "3"}, {"b", "c"})


def test_refused_writes_are_kept_until_they_are_accepted(
    server: PrivateServer, client: Any
) -> None:
    client.acl_setuser("kombu", True, passwords="+x", keys=["*"], categories=["+@all", "-@hash"])
    with writer_to(f"redis://kombu:x@127.0.0.1:{server.port}") as writer:
        writer.deliver("a", "1")
        for _ in range(2):
            with pytest.raises(StorageDenied):
                writer.flush()
        assert noted(client)[:2] == ({}, set())
        client.acl_setuser("kombu", True, categories=["+@hash"])
        writer.flush()
        assert noted(client)[:2] == ({"a": "1"}, {"a"})


def test_acknowledgements_are_written_though_no_delivery_may_be(
    server: PrivateServer, client: Any
) -> None:
    """A server that is out of memory gets some of it back by that."""
    with writer_to(server.url, has_marks=True) as writer:
        writer.deliver("a", "1")
        writer.flush()
        client.config_set("maxmemory", 1)
        writer.ack("a")
        writer.deliver("b", "2")
        with pytest.raises(StorageFull):
            writer.flush()
        assert noted(client) == ({}, set(), set())
        client.config_set("maxmemory", 0)
        writer.flush()
        assert noted(client) == ({"b": "2"}, {"b"}, {"b"})
