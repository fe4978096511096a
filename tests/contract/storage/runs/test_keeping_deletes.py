"""Runs of a session are listed, and erased with all that is stored of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from capsule_tasks.errors import (
    InvalidId,
    RunClaimLost,
    RunExists,
    RunNotFound,
)
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import PlannedCall, RunStore
from capsule_tasks.storage.keys import RunKeys, run_location
from capsule_tasks.storage.runs.run_index import RunIndex
from tests.contract.storage.runs.subjects import LIMIT_S, PRINT, Subject, ask, opened

ABOUT: dict[str, Any] = {"schema": "1", "agent": "a"}


async def listed(runs: Any, **query: Any) -> list[str]:
    return [record.run_id for record in (await runs.list(**query)).runs]


async def a_session_with_runs(subject: Subject) -> Any:
    """Runs of all kinds in one session, and one in another."""
    runs = subject.runs()
    await subject.worker("w1")
    for run_id in ("queued", "running", "parked", "over"):
        await runs.create(run_id, subject.session_id, b"snapshot", message=b"m", **ABOUT)
    await runs.create("other", "user-43", b"", **ABOUT)
    running = await runs.claim("running", "w1")
    await runs.start_calls(running, [PlannedCall("c1", PRINT)])
    await runs.journal(running, "m1", b"reply")
    parked = await runs.claim("parked", "w1")
    await runs.commit(parked, b"x", turn=1, status="interrupted", approval_requests=[ask()])
    over = await runs.claim("over", "w1")
    await runs.commit(over, b"x", turn=1, status="completed", result=b"r")
    return runs, running


async def test_runs_of_a_session_are_listed(subject: Subject) -> None:
    runs, _ = await a_session_with_runs(subject)
    query = {"session_id": subject.session_id}
    assert await listed(runs, **query) == ["over", "parked", "running", "queued"]
    oldest_first = {**query, "newest_first": False}
    assert await listed(runs, **oldest_first) == ["queued", "running", "parked", "over"]
    assert await listed(runs, **query, status="interrupted") == ["parked"]
    assert await listed(runs, **query, agent="a", status="queued") == ["queued"]
    assert await listed(runs, **query, agent="b") == []
    assert await listed(runs, session_id="user-43") == ["other"]
    assert await listed(runs, session_id="user-44") == []
    first = await runs.list(**query, limit=3)
    second = await runs.list(**query, limit=3, cursor=first.cursor)
    assert [record.run_id for record in (*first.runs, *second.runs)] == await listed(runs, **query)
    with pytest.raises(InvalidId):
        await runs.list(session_id="")


async def test_the_list_of_a_session_is_repaired_with_the_index(subject: Subject) -> None:
    runs, _ = await a_session_with_runs(subject)
    index = RunIndex(RunSettings(prefix=subject.prefix))
    for entry, _ in await subject.drive(
        index.page(None, None, "0", 100, session_id=subject.session_id)
    ):
        await subject.drive(index.drop(entry))
    assert await listed(runs, session_id=subject.session_id) == []
    await runs.reindex("parked")
    assert await listed(runs, session_id=subject.session_id) == ["parked"]


async def test_a_deleted_run_is_gone_from_everywhere(subject: Subject) -> None:
    runs, _ = await a_session_with_runs(subject)
    query = {"session_id": subject.session_id}
    for run_id in ("queued", "running", "parked", "over"):
        await runs.delete(run_id)
        with pytest.raises(RunNotFound):
            await runs.read(run_id)
        with pytest.raises(RunNotFound):
            await runs.delete(run_id)
        with pytest.raises(RunNotFound):
            await runs.cancel(run_id)
    with pytest.raises(RunNotFound):
        await runs.approvals.approve("parked", "call-1")
    assert await listed(runs, **query) == []
    assert await listed(runs) == ["other"]
    assert (await runs.approvals.pending()).calls == []
    unsent = await runs.queued_unsent()
    assert unsent.runs == []


async def test_the_owner_of_a_deleted_run_can_write_no_more(subject: Subject) -> None:
    runs, claim = await a_session_with_runs(subject)
    other = subject.runs()  # it has not cached where the run is
    await other.delete("running")
    for store in (runs, subject.runs()):
        writes: list[Callable[[], Any]] = [
            lambda store=store: store.start_calls(claim, [PlannedCall("c2", PRINT)]),
            lambda store=store: store.finish_calls(claim, {"c1": b"made"}),
            lambda store=store: store.journal(claim, "m2", b"reply"),
            lambda store=store: store.commit(claim, b"y", turn=1, items=[{"n": 1}]),
            lambda store=store: store.release(claim),
        ]
        for write in writes:
            with pytest.raises(RunClaimLost, match="its status is gone"):
                await write()
    assert await subject.items() == []
    with pytest.raises(RunNotFound):
        await runs.claim("running", "w1")
    assert await runs.requeue_lapsed()


async def test_a_deleted_run_is_not_created_by_a_late_message(subject: Subject) -> None:
    runs, _ = await a_session_with_runs(subject)
    await runs.delete("queued")
    with pytest.raises(RunExists, match="is deleted"):
        await runs.create("queued", subject.session_id, b"", **ABOUT)
    with pytest.raises(RunNotFound):
        await runs.read("queued")
    assert await listed(runs, session_id=subject.session_id, status="queued") == []


async def test_whoever_waits_for_a_run_is_told_that_it_was_deleted(valkey_url: str) -> None:
    async with opened(valkey_url, "async") as subject:
        runs, _ = await a_session_with_runs(subject)
        waiting = asyncio.ensure_future(runs.wait("parked", timeout_s=LIMIT_S))
        channel = RunKeys(subject.session_id, "parked", subject.prefix).channel
        with redis.Redis.from_url(valkey_url) as client:
            while not client.pubsub_numsub(channel)[0][1]:
                await asyncio.sleep(0.01)
        await runs.delete("parked")
        with pytest.raises(RunNotFound):
            await waiting


async def test_all_runs_of_a_session_are_deleted_and_nothing_is_left(valkey_url: str) -> None:
    async with opened(valkey_url, "async") as subject:
        runs, _ = await a_session_with_runs(subject)
        assert await runs.delete_all(subject.session_id) == 4
        assert await runs.delete_all(subject.session_id) == 0
        assert await listed(runs) == ["other"]
        with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
            left = {
                key: client.hgetall(key)
                for key in client.scan_iter(f"{subject.prefix}:*", count=1000)
                if subject.session_id in key and not key.endswith(":operations")
            }
            entries = client.hkeys(f"{subject.prefix}:{{runs}}:entries")
        assert set(map(str, left.values())) == {"{'status': 'deleted'}"}
        assert len(left) == 4
        assert [entry for entry in entries if "other" not in entry] == []


async def test_a_delete_that_died_half_way_is_completed_by_the_next(valkey_url: str) -> None:
    async with opened(valkey_url, "async") as subject:
        runs, _ = await a_session_with_runs(subject)

        class Died(Exception):
            pass

        class Dying:
            """The store of a process that dies before it has dropped a run from the index."""

            is_closed, location, target = False, subject.store.location, subject.store.target

            async def run(self, call: Any) -> Any:
                if call.script.name == "runs/index_drop":
                    raise Died
                return await subject.store.run(call)

        dying: Any = Dying()
        with pytest.raises(Died):
            await RunStore(dying, settings=runs.core.settings).delete_all(subject.session_id)
        assert await runs.delete_all(subject.session_id) == 4
        with redis.Redis.from_url(valkey_url) as client:
            for run_id in ("queued", "running", "parked", "over"):
                assert not client.exists(run_location(run_id, subject.prefix))
