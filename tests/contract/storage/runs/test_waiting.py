"""Waiting until a run has ended or is parked, in both ways, on every server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from capsule_tasks.errors import InvalidSetting, RunNotFound, RunTimeout
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import RunKeys
from capsule_tasks.storage.runs import waiting
from capsule_tasks.storage.runs.store import RunStore, SyncRunStore
from capsule_tasks.storage.runs.types import RunRecord
from tests.contract.storage.runs.conftest import STORES
from tests.contract.storage.runs.subjects import LIMIT_S, Subject, ask, opened, until
from tests.severing_proxy import SeveringProxy

Wait = Callable[..., Awaitable[RunRecord]]


async def awaited(url: str, prefix: str, run_id: str = "run-1", **options: Any) -> RunRecord:
    async with RunStore(url, settings=RunSettings(prefix=prefix)) as runs:
        return await runs.wait(run_id, **options)


async def in_a_thread(url: str, prefix: str, run_id: str = "run-1", **options: Any) -> RunRecord:
    def wait() -> RunRecord:
        with SyncRunStore(url, settings=RunSettings(prefix=prefix)) as runs:
            return runs.wait(run_id, **options)

    return await asyncio.to_thread(wait)


@pytest.fixture(params=[awaited, in_a_thread])
def wait(request: pytest.FixtureRequest) -> Wait:
    found: Wait = request.param
    return found


@pytest.fixture(autouse=True)
def never_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a ring, or a new connection, ends a wait."""
    monkeypatch.setattr(waiting, "CHECK_S", LIMIT_S)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(STORES[request.param])
    return found


@pytest.fixture
async def subject(url: str) -> AsyncIterator[Subject]:
    async with opened(url, "async") as subject:
        yield subject


async def subscribed(url: str, prefix: str, run_id: str = "run-1") -> None:
    """Return once somebody listens; each server of a cluster knows only its own listeners."""
    if "cluster" in url:
        return
    channel = RunKeys("user-42", run_id, prefix).channel
    async with redis.asyncio.Redis.from_url(url) as client:

        async def is_heard() -> bool:
            return bool((await client.pubsub_numsub(channel))[0][1])

        await until(is_heard)


@pytest.mark.parametrize("how", ["end", "fail", "cancel", "expire"])
async def test_the_end_of_a_run_ends_the_wait_for_it(
    subject: Subject, url: str, wait: Wait, how: str
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    task = asyncio.ensure_future(wait(url, subject.prefix, timeout_s=LIMIT_S))
    await subscribed(url, subject.prefix)
    claim = (await runs.commit(claim, b"", turn=1)).claim
    if how == "end":
        await runs.commit(claim, b"", turn=2, status="completed", result=b"r")
    elif how == "fail":
        await runs.commit(claim, b"", turn=2, status="failed", error=b"e")
    elif how == "cancel":
        await runs.release(claim)
        await runs.cancel("run-1")
    else:
        asks = [ask(expires_in_s=0.001, on_expiry="cancel")]
        await runs.commit(claim, b"", turn=2, status="interrupted", approval_requests=asks)
        await until(lambda: cancelled_by_time(runs))
    record = await task
    statuses = {"end": "completed", "fail": "failed"}
    assert record.status == statuses.get(how, "cancelled")
    assert (record.result, record.error) == (
        b"r" if how == "end" else b"",
        b"e" if how == "fail" else b"",
    )


async def cancelled_by_time(runs: Any) -> bool:
    return bool((await runs.approvals.expire("run-1")).calls)


async def test_a_wait_goes_on_while_the_run_is_parked_unless_that_is_waited_for(
    subject: Subject, url: str, wait: Wait
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    for_end, for_park = (
        asyncio.ensure_future(wait(url, subject.prefix, until=what, timeout_s=LIMIT_S))
        for what in ("ended", "parked")
    )
    await subscribed(url, subject.prefix)
    await runs.commit(claim, b"", turn=1, status="interrupted", approval_requests=[ask()])
    parked = await for_park
    assert (parked.status, [call.call_id for call in parked.pending]) == ("interrupted", ["call-1"])
    assert not for_end.done()
    await runs.approvals.approve("run-1", "call-1")
    claim = await runs.claim("run-1", "w1")
    await runs.commit(claim, b"", turn=2, status="completed", result=b"r")
    assert (await for_end).result == b"r"


async def test_a_run_that_is_queued_again_after_its_owner_died_is_waited_for(
    subject: Subject, url: str, wait: Wait
) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    await runs.claim("run-1", "w1")
    task = asyncio.ensure_future(wait(url, subject.prefix, timeout_s=LIMIT_S))
    await subscribed(url, subject.prefix)
    await lease.release()
    await runs.requeue("run-1", "w1")
    await runs.cancel("run-1")
    assert (await task).status == "cancelled"


async def test_a_wait_is_over_at_once_for_a_run_that_has_ended(
    subject: Subject, url: str, wait: Wait
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.commit(claim, b"", turn=1, status="completed", result=b"r")
    assert (await wait(url, subject.prefix, timeout_s=0)).result == b"r"


async def test_a_wait_has_a_time_limit(subject: Subject, url: str, wait: Wait) -> None:
    await subject.claimed(subject.runs())
    for timeout_s in (0, 0.1):
        with pytest.raises(RunTimeout, match=f"run 'run-1' is running after .* {timeout_s}"):
            await wait(url, subject.prefix, timeout_s=timeout_s)
    with pytest.raises(RunNotFound):
        await wait(url, subject.prefix, "ghost")
    for wrong in ({"until": "over"}, {"timeout_s": -1}, {"timeout_s": math.nan}):
        with pytest.raises(InvalidSetting):
            await wait(url, subject.prefix, **wrong)


async def test_a_run_is_read_again_after_a_time_without_a_ring(
    valkey_url: str, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody rings when a run expires."""
    monkeypatch.setattr(waiting, "CHECK_S", 0.05)
    async with (
        opened(valkey_url, "async") as subject,
        redis.asyncio.Redis.from_url(valkey_url) as client,
    ):
        await subject.claimed(subject.runs())
        task = asyncio.ensure_future(wait(valkey_url, subject.prefix, timeout_s=LIMIT_S))
        await subscribed(valkey_url, subject.prefix)
        await client.delete(RunKeys("user-42", "run-1", subject.prefix).run)
        with pytest.raises(RunNotFound):
            await task


async def test_many_waiters_of_a_loop_share_a_connection_that_ends_with_the_last(
    valkey_url: str,
) -> None:
    async with (
        opened(valkey_url, "async") as subject,
        redis.asyncio.Redis.from_url(valkey_url) as client,
        RunStore(valkey_url, settings=RunSettings(prefix=subject.prefix)) as waiting_runs,
    ):
        runs = subject.runs()
        await subject.worker("w1")
        known = {each["id"] for each in await client.client_list(_type="pubsub")}
        tasks = []
        for number in range(20):
            await runs.create(f"r{number}", "user-42", b"", schema="1", agent="a")
            tasks.append(asyncio.ensure_future(waiting_runs.wait(f"r{number}", timeout_s=LIMIT_S)))
        for number in range(20):
            await subscribed(valkey_url, subject.prefix, f"r{number}")
        listeners = {each["id"] for each in await client.client_list(_type="pubsub")} - known
        assert len(listeners) == 1
        for number in range(20):
            await runs.cancel(f"r{number}")
        assert {record.status for record in await asyncio.gather(*tasks)} == {"cancelled"}

        async def are_gone() -> bool:
            return not listeners & {each["id"] for each in await client.client_list()}

        await until(are_gone)


async def test_an_end_that_was_rung_while_the_connection_was_lost_is_found(
    valkey_url: str, wait: Wait
) -> None:
    async with (
        opened(valkey_url, "async") as subject,
        redis.asyncio.Redis.from_url(valkey_url) as client,
    ):
        with SeveringProxy(urlsplit(valkey_url).port or 0) as proxy:
            runs = subject.runs()
            claim = await subject.claimed(runs)
            task = asyncio.ensure_future(wait(proxy.url, subject.prefix, timeout_s=LIMIT_S))
            await subscribed(valkey_url, subject.prefix)
            proxy.stall_at(b"SUBSCRIBE")
            await client.client_kill_filter(_type="pubsub", skipme=True)
            await asyncio.to_thread(proxy.stalled, LIMIT_S)
            await runs.commit(claim, b"", turn=1, status="completed", result=b"r")
            proxy.go_on()
            assert (await task).result == b"r"


async def test_a_client_of_the_caller_cannot_be_waited_with(valkey_url: str) -> None:
    async with (
        redis.asyncio.Redis.from_url(valkey_url) as client,
        opened(valkey_url, "async") as subject,
    ):
        await subject.claimed(subject.runs())
        runs = RunStore(client, settings=RunSettings(prefix=subject.prefix))
        with pytest.raises(InvalidSetting, match="a URL, or connections to one"):
            await runs.wait("run-1")
