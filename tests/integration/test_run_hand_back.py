"""A driver whose store does its work and loses the answers, and runs that end from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.durable import RunFailure
from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.storage import RunStore
from tests.integration.test_run_driver import TWO_TURNS, ScriptedEngine, started


def unavailable(monkeypatch: pytest.MonkeyPatch, store: RunStore, name: str, *lost_as: str) -> None:
    """Have a method of the store lose the `request`, or do its work and lose the `answer`."""
    method, left = getattr(store, name), list(lost_as)

    async def lost(*args: Any, **options: Any) -> Any:
        what = left.pop(0) if left else ""
        if what != "request":
            answer = await method(*args, **options)
        if what:
            raise StorageUnavailable(f"the {what} was lost", may_have_written=what == "answer")
        return answer

    monkeypatch.setattr(store, name, lost)


async def test_a_claim_whose_answer_is_lost_is_the_claim_that_is_driven(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would belong to a live lease, and nobody would drive it."""
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "claim", "answer", "request", "answer")
    stop = await driver.drive("r", engine)
    assert (stop.status, engine.effects) == ("completed", ["a", "b"])


async def test_a_drive_that_is_cancelled_before_its_claim_is_answered_leaves_no_owner(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "claim", "answer", "request", "answer")
    drive = asyncio.create_task(driver.drive("r", engine))
    while (await store.read("r")).status != "running":
        await asyncio.sleep(0)
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    assert ((await store.read("r")).status, engine.effects) == ("queued", [])


async def test_a_claim_that_was_not_made_is_left_to_the_next_delivery(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "claim", "request")
    with pytest.raises(StorageUnavailable):
        await driver.drive("r", engine)
    assert (await store.read("r")).status == "queued"


async def test_a_run_is_handed_back_as_soon_as_the_store_answers(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(store, engine := ScriptedEngine(TWO_TURNS))
    unavailable(monkeypatch, store, "commit", "answer")
    unavailable(monkeypatch, store, "release", "request", "answer")
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
