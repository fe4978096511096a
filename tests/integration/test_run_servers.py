"""Runs on more than one Redis: leases lie where the runs do, and histories of commits, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from capsule_tasks import SyncHistory
from capsule_tasks.errors import InvalidSetting, LeaseLost, LeaseMissing, RunClaimed, RunClaimLost
from capsule_tasks.settings import HistorySettings, LeaseSettings, RunSettings
from capsule_tasks.storage import SyncConnections, SyncRunStore

LONG = LeaseSettings(lease_s=600)


@pytest.fixture
def stores(
    valkey_url: str, redis62_url: str, prefix: str
) -> Iterator[tuple[SyncRunStore, SyncRunStore]]:
    """Runs on two servers, one queued on each."""
    settings = RunSettings(prefix=prefix)
    with (
        SyncRunStore(valkey_url, settings=settings) as here,
        SyncRunStore(redis62_url, settings=settings) as there,
    ):
        for store in (here, there):
            store.create("r", "user-42", b"{}", schema="1", agent="a")
        yield here, there


def test_a_lease_on_another_server_is_none_for_a_claim(
    stores: tuple[SyncRunStore, SyncRunStore],
) -> None:
    """Its owner looked as if it were gone, and any other worker could take the run."""
    here, there = stores
    here.lease("w1", LONG).acquire()
    with pytest.raises(LeaseMissing, match="'w1' has no lease on the Redis of this run"):
        there.claim("r", "w1")
    assert there.read("r").status == "queued"


def test_losing_the_lease_on_one_server_ends_only_what_that_server_guards(
    stores: tuple[SyncRunStore, SyncRunStore],
) -> None:
    here, there = stores
    leases = [store.lease("w1", LONG) for store in stores]
    for lease, store in zip(leases, stores, strict=True):
        lease.acquire()
        store.lease("w2", LONG).acquire()
    lost, kept = (store.claim("r", "w1") for store in stores)
    leases[0].release()
    assert here.claim("r", "w2").token > lost.token
    with pytest.raises(RunClaimLost):
        here.commit(lost, b"late", turn=1)
    with pytest.raises(LeaseLost):
        leases[0].renew()

    with pytest.raises(RunClaimed):
        there.claim("r", "w2")
    leases[1].renew()
    there.create("another", "user-42", b"{}", schema="1", agent="a")
    there.claim("another", "w1")
    assert there.commit(kept, b"done", turn=1, status="completed").status == "completed"


ELSEWHERE: dict[str, Callable[[str, str], Any]] = {
    "another server": lambda _here, there: there,
    "another database": lambda here, _there: f"{here.removesuffix('/0')}/1",
    "a client of another server": lambda _here, there: redis.Redis.from_url(there),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_commit_refuses_a_history_on_another_redis(
    stores: tuple[SyncRunStore, SyncRunStore],
    valkey_url: str,
    redis62_url: str,
    prefix: str,
    kind: str,
) -> None:
    """Items that were meant for that history went to the Redis of the run."""
    here, _ = stores
    here.lease("w1", LONG).acquire()
    claim = here.claim("r", "w1")
    settings = HistorySettings(prefix=prefix)
    history = SyncHistory("user-42", ELSEWHERE[kind](valkey_url, redis62_url), settings=settings)
    with pytest.raises(InvalidSetting, match="must be on the Redis of the run") as caught:
        here.commit(claim, b"x", turn=1, items=[{"n": 1}], history=history)
    for spelled in (here.store.location, history.store.location, "the same connections"):
        assert str(spelled) in str(caught.value)
    assert here.read("r").revision == 1
    with SyncHistory("user-42", valkey_url, settings=settings) as mine:
        assert mine.get_items() == []


def test_a_commit_takes_a_history_on_the_same_redis_however_it_gets_there(
    valkey_url: str, prefix: str
) -> None:
    settings, connections = HistorySettings(prefix=prefix), SyncConnections(valkey_url)
    with (
        SyncRunStore(connections, settings=RunSettings(prefix=prefix)) as runs,
        redis.Redis.from_url(valkey_url) as client,
    ):
        runs.lease("w1", LONG).acquire()
        runs.create("r", "user-42", b"{}", schema="1", agent="a")
        claim = runs.claim("r", "w1")
        for turn, way in enumerate([connections, valkey_url, client], 1):
            history = SyncHistory("user-42", way, settings=settings)
            items = [{"turn": turn}]
            claim = runs.commit(claim, b"x", turn=turn, items=items, history=history).claim
        assert SyncHistory("user-42", connections, settings=settings).get_items() == [
            {"turn": 1}, {"turn": 2}, {"turn": 3},
        ]  # fmt: skip
    connections.close_blocking()
