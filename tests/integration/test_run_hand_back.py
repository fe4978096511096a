"""A driver whose store does its work and loses the answers, and runs that end from outside."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.durable import RunFailure
from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.storage import RunStore
from tests.integration.test_run_driver import TWO_TURNS, ScriptedEngine, started


def unavailable(monkeypatch: pytest.MonkeyPatch, store: RunStore, name: str, times: int) -> None:
    """Have a method of the store do its work and lose the answer, so many times."""
    method, left = getattr(store, name), [times]

    async def lost(*args: Any, **options: Any) -> Any:
        answer = await method(*args, **options)
        if left[0]:
            left[0] -= 1
            raise StorageUnavailable("the answer was lost", may_have_written=True)
        return answer

    monkeypatch.setattr(store, name, lost)


async def test_a_claim_whose_answer_is_lost_is_the_claim_that_is_driven(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would belong to a live lease, and nobody would drive it."""
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "claim", 2)
    stop = await driver.drive("r", engine)
    assert (stop.status, engine.effects) == ("completed", ["a", "b"])


async def test_a_run_is_handed_back_as_soon_as_the_store_answers(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "commit", 1)
    unavailable(monkeypatch, store, "release", 2)
    with pytest.raises(StorageUnavailable):
        await driver.drive("r", engine)
    assert (await store.read("r")).status == "queued"
    stop = await driver.drive("r", engine)
    assert (stop.status, engine.effects) == ("completed", ["a", "b"])


async def test_a_run_is_failed_from_outside_of_its_turns(store: RunStore) -> None:
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    failure = RunFailure("timeout", "SoftTimeLimitExceeded", "too long")
    stop = await driver.fail("r", engine, failure)
    assert (stop.status, stop.failure, engine.effects) == ("failed", failure, [])
    assert (await store.read("r")).status == "failed"
