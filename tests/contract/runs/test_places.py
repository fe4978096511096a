"""A run is found by its id alone for as long as it goes on."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import RunExists
from capsule_tasks.storage import run_places
from capsule_tasks.storage.runs import SyncRunStore
from capsule_tasks.testing import MemoryStore
from tests.contract.run_subjects import ask

DAY_S = 86_400.0
STEP_S = 20 * DAY_S
"""Less than a run is kept without a change."""


@pytest.mark.parametrize("is_same_process", [True, False])
def test_a_run_that_goes_on_for_years_is_still_found(
    monkeypatch: pytest.MonkeyPatch, is_same_process: bool
) -> None:
    """Its place lapsed a year after the run was made: no decision found it, another could take its
    id, and it waited for ever.
    """
    now_s = 1.8e9
    memory = MemoryStore(clock=lambda: now_s)
    monkeypatch.setattr(run_places, "monotonic", lambda: now_s)
    runs = SyncRunStore(memory)
    runs.create("run-1", "s", b"", schema="1", agent="a")
    for turn in range(1, 60):
        now_s += STEP_S
        runs = runs if is_same_process else SyncRunStore(memory)
        runs.lease(f"w{turn}").acquire()
        claim = runs.claim("run-1", f"w{turn}")
        asks = [ask(f"c{turn}")]
        runs.commit(claim, b"", turn=turn, status="interrupted", asks=asks)
        runs.approvals.approve("run-1", f"c{turn}")
    assert SyncRunStore(memory).read("run-1").turn == 59
    with pytest.raises(RunExists):
        SyncRunStore(memory).create("run-1", "other", b"", schema="1", agent="a")
