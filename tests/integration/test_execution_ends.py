"""Results and commands of an execution that is over, also where its result is not kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery

from capsule_tasks.client import Event, Execution
from capsule_tasks.client import execution as execution_module
from capsule_tasks.client.watching import watcher
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import NoOpenQuestion, NoResult
from capsule_tasks.protocol.events import Ended, Outcome, encode_event
from tests.attempts import append, claim
from tests.sessions import HANG_S

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes


@pytest.fixture
def app(valkey_url: str) -> Iterator[Celery]:
    app = Celery(broker=valkey_url, backend=valkey_url, set_as_current=False)
    app.conf.capsule_redis_url = valkey_url
    yield app
    app.backend.client.close()
    app.close()


async def ended(app: Celery, outcome: Outcome, **said: Any) -> Execution:
    """An execution whose stream has come to this end."""
    execution = Execution(uuid4().hex, app=app)
    store = (await watch_thread.watcher(app)).store
    claimed = await claim(store, execution.id, owner="w", claim="c")
    end = [encode_event(Ended(outcome=outcome, **said))]
    await append(store, execution.id, claimed.attempt, 2, end, state="ended", outcome=outcome)
    return execution


async def got(execution: Execution) -> Any:
    return await asyncio.wait_for(execution.aget(HANG_S), HANG_S)


async def test_a_value_is_the_result_backends(app: Celery) -> None:
    execution = await ended(app, Outcome.SUCCEEDED)
    app.backend.store_result(execution.id, [1, 2], "SUCCESS")
    assert await got(execution) == [1, 2]


async def test_a_result_that_is_stored_after_the_stream_is_waited_for(app: Celery) -> None:
    execution = await ended(app, Outcome.LOST)
    getting = asyncio.ensure_future(got(execution))
    app.backend.store_result(execution.id, ValueError("lost"), "FAILURE")
    with pytest.raises(ValueError, match="lost"):
        await getting


async def test_an_ignored_result_is_none_at_once(app: Celery) -> None:
    execution = await ended(app, Outcome.SUCCEEDED, result_text="5")
    execution.ignored = True
    async with asyncio.timeout(3):
        assert await execution.aget() is None


async def test_an_ignored_failure_names_the_error(app: Celery) -> None:
    execution = await ended(app, Outcome.FAILED, type="ValueError", message="because")
    execution.ignored = True
    with pytest.raises(NoResult, match=r"as failed \(ValueError: because\)") as raised:
        await got(execution)
    assert (raised.value.execution_id, raised.value.outcome) == (execution.id, "failed")


async def test_a_success_without_a_kept_result_is_none_if_it_returned_none(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_module, "_PAUSES_S", (0.05, 0.1, 0.2))
    assert await got(await ended(app, Outcome.SUCCEEDED, result_text="None")) is None
    with pytest.raises(NoResult, match="succeeded"):
        await got(await ended(app, Outcome.SUCCEEDED, result_text="5"))


async def test_a_task_that_raised_ignore_has_no_result(app: Celery) -> None:
    with pytest.raises(NoResult, match="ignored"):
        await got(await ended(app, Outcome.IGNORED))


class Vanishing(Execution):
    """One whose stream is gone as soon as its first event was seen."""

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        store = (await watch_thread.watcher(self.app)).store
        async for event in super().aevents(after):
            yield event
            with redis.Redis.from_url(self.app.conf.capsule_redis_url) as client:
                client.delete(store.keys_of(self.id).meta)


async def test_a_vanished_stream_is_a_clear_error(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_VANISHED_S", 0.5)
    execution = Vanishing(uuid4().hex, app=app)
    await claim((await watch_thread.watcher(app)).store, execution.id, owner="w", claim="c")
    with pytest.raises(NoResult, match="StreamExpired") as raised:
        await got(execution)
    assert raised.value.execution_id == execution.id


async def test_waiting_for_the_result_counts_towards_the_timeout(app: Celery) -> None:
    execution = await ended(app, Outcome.SUCCEEDED)
    with pytest.raises(TimeoutError):
        await execution.aget(0.3)


def test_an_execution_of_an_ignored_result_is_ignored_too(app: Celery) -> None:
    result = app.AsyncResult(uuid4().hex)
    result.ignored = True
    assert Execution.of(result).ignored


async def test_events_after_the_end_are_ignored_and_logged(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "capsule_tasks.client")
    execution = await ended(app, Outcome.SUCCEEDED)
    keys = (await watch_thread.watcher(app)).store.keys_of(execution.id)
    assert await execution.acancel() == await execution.ainterrupt() == "over"
    with pytest.raises(NoOpenQuestion):
        await execution.arespond("late", request_id="r")
    assert [record.getMessage() for record in caplog.records] == [
        f"execution {execution.id} has ended: command {what} ignored"
        for what in ("cancel", "interrupt", "respond")
    ]
    with redis.Redis.from_url(app.conf.capsule_redis_url) as client:
        assert not client.exists(keys.control)
