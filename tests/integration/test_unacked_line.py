"""Deliveries and acknowledgements are in kombu's keys, whatever becomes of the connection."""

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
def line_to(url: str, *, has_marks: bool = False, **options: Any) -> Iterator[UnackedWriter]:
    with Connection(url, transport_options=options) as connection:
        line = UnackedWriter(connection.default_channel, has_marks=has_marks)
        try:
            yield line
        finally:
            line.close()


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
def test_what_is_held_and_let_go_is_there(
    server: PrivateServer, client: Any, prefix: str, has_marks: bool
) -> None:
    with line_to(server.url, has_marks=has_marks, global_keyprefix=prefix) as line:
        for number in range(5000):
            line.deliver(f"t{number}", "{}")
            if number % 100 == 0:
                line.write()
        for number in range(4998):
            line.ack(f"t{number}")
        line.flush()
        assert line.is_flushed
        left = {"t4998", "t4999"}
        expected = (dict.fromkeys(left, "{}"), left, left if has_marks else set())
        assert noted(client, prefix) == expected


def test_a_message_that_comes_again_is_held_again(server: PrivateServer, client: Any) -> None:
    with line_to(server.url) as line:
        line.deliver("a", "once")
        line.ack("a")
        line.deliver("a", "again")
        line.flush()
        assert noted(client)[0] == {"a": "again"}


def test_what_a_lost_connection_may_not_have_brought_goes_on_the_next(
    server: PrivateServer, client: Any
) -> None:
    with line_to(server.url) as line:
        line.deliver("a", "1")
        line.flush()
        client.client_kill_filter(_type="normal", skipme=True)
        line.deliver("b", "2")
        line.ack("a")
        for _ in range(3):  # the first may go into a socket that is closed at the other end
            with contextlib.suppress(StorageUnavailable):
                line.flush()
        assert noted(client)[:2] == ({"b": "2"}, {"b"})


def test_what_a_server_that_was_away_did_not_hear_another_line_goes_on_with(
    server: PrivateServer, client: Any, tmp_path: Path
) -> None:
    port = server.port
    with line_to(server.url) as old, line_to(server.url) as new:
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


def test_what_a_server_refuses_is_kept_until_it_does_not(
    server: PrivateServer, client: Any
) -> None:
    client.acl_setuser("kombu", True, passwords="+x", keys=["*"], categories=["+@all", "-@hash"])
    with line_to(f"redis://kombu:x@127.0.0.1:{server.port}") as line:
        line.deliver("a", "1")
        for _ in range(2):
            with pytest.raises(StorageDenied):
                line.flush()
        assert noted(client)[:2] == ({}, set())
        client.acl_setuser("kombu", True, categories=["+@hash"])
        line.flush()
        assert noted(client)[:2] == ({"a": "1"}, {"a"})


def test_what_was_let_go_is_gone_though_nothing_more_may_be_held(
    server: PrivateServer, client: Any
) -> None:
    """A server that is out of memory gets some of it back by that."""
    with line_to(server.url, has_marks=True) as line:
        line.deliver("a", "1")
        line.flush()
        client.config_set("maxmemory", 1)
        line.ack("a")
        line.deliver("b", "2")
        with pytest.raises(StorageFull):
            line.flush()
        assert noted(client) == ({}, set(), set())
        client.config_set("maxmemory", 0)
        line.flush()
        assert noted(client) == ({"b": "2"}, {"b"}, {"b"})
