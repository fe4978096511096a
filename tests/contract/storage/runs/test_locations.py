"""A run is found by its id alone for as long as it goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import redis

from capsule_tasks.errors import RunExists
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.runs import locations
from capsule_tasks.storage.runs.store import SyncRunStore
from tests.clocks import elapse
from tests.contract.storage.runs.subjects import ask

STEP_S = 20 * 86_400.0
"""Less than a run is kept without a change."""


@pytest.fixture
def connections(valkey_url: str) -> Iterator[SyncConnections]:
    connections = SyncConnections(valkey_url)
    yield connections
    connections.close_blocking()


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.mark.parametrize("is_same_process", [True, False])
def test_a_run_that_goes_on_for_years_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
    connections: SyncConnections,
    client: redis.Redis,
    prefix: str,
    is_same_process: bool,
) -> None:
    """Its place lapsed a year after the run was made: no decision found it, another could take its
    id, and it waited for ever.
    """
    now_s = 0.0
    monkeypatch.setattr(locations, "monotonic", lambda: now_s)
    another = functools.partial(SyncRunStore, connections, settings=RunSettings(prefix=prefix))
    runs = another()
    runs.create("run-1", "s", b"", schema="1", agent="a")
    for turn in range(1, 60):
        now_s += STEP_S
        elapse(client, prefix, STEP_S)
        runs = runs if is_same_process else another()
        runs.lease(f"w{turn}").acquire()
        claim = runs.claim("run-1", f"w{turn}")
        asks = [ask(f"c{turn}")]
        runs.commit(claim, b"", turn=turn, status="interrupted", approval_requests=asks)
        runs.approvals.approve("run-1", f"c{turn}")
    assert another().read("run-1").turn == 59
    with pytest.raises(RunExists):
        another().create("run-1", "other", b"", schema="1", agent="a")
