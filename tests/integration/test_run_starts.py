"""Runs that a producer starts: stored, sent through a real broker, kept if nobody sent them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client.runs.messages import RUN_TASK, send
from capsule_tasks.client.runs.stores import run_store, sync_run_store
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.durable import INPUT_SCHEMA, input_of
from capsule_tasks.errors import InvalidSetting, RunExists
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.storage import RunStore
from tests.acceptance.workers import close, producer


@pytest.fixture
async def capsule(valkey_url: str, prefix: str) -> AsyncIterator[Capsule]:
    app = producer(valkey_url, f"q-{prefix}", capsule_prefix=prefix)
    yield Capsule(app)
    close(app)


@pytest.fixture
async def store(capsule: Capsule) -> AsyncIterator[RunStore]:
    async with run_store(capsule.app) as store:
        yield store


def delivered(capsule: Capsule) -> Any:
    with capsule.app.connection_for_read() as connection:
        message = connection.SimpleQueue(capsule.app.conf.task_default_queue).get(timeout=5)
        message.ack()
    return message


async def test_a_run_is_stored_and_sent(capsule: Capsule, store: RunStore) -> None:
    run_id = (await capsule.runs.astart("support", "refund", session="user-1", priority=2)).id
    record = await store.read(run_id)
    assert (record.status, record.session_id, record.agent) == ("queued", "user-1", "support")
    assert record.schema == INPUT_SCHEMA
    assert input_of(record.snapshot).input == "refund"
    assert record.unsent_us == 0, "nobody has to send it again"

    message = delivered(capsule)
    assert message.payload[:2] == [[], {"agent": "support"}]
    assert (message.headers["task"], message.headers["id"]) == (RUN_TASK, run_id)
    assert message.properties["priority"] == 2


async def test_a_stored_message_is_sent_again(capsule: Capsule, store: RunStore) -> None:
    run_id = (await capsule.runs.astart("support", "hello")).id
    first = delivered(capsule)
    send(capsule.app, run_id, (await store.read(run_id)).message)
    again = delivered(capsule)
    assert again.payload == first.payload
    assert again.headers["id"] == run_id


async def test_a_run_has_a_session_of_its_own_unless_one_is_named(
    capsule: Capsule, store: RunStore
) -> None:
    run_id = (await capsule.runs.astart("support", "hello", context={"plan": "pro"})).id
    record = await store.read(run_id)
    assert record.session_id == run_id
    assert input_of(record.snapshot).context == {"plan": "pro"}


async def test_an_id_that_is_taken_is_refused(capsule: Capsule, store: RunStore) -> None:
    assert (await capsule.runs.astart("support", "hello", run_id="mine")).id == "mine"
    with pytest.raises(RunExists, match="'mine' exists already, and is queued"):
        await capsule.runs.astart("support", "again", run_id="mine")
    assert input_of((await store.read("mine")).snapshot).input == "hello"


async def test_a_run_whose_broker_is_away_is_kept_for_a_worker(
    capsule: Capsule, store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    away = Celery("away", set_as_current=False, broker="redis://127.0.0.1:1/0")
    away.conf.update(
        capsule_prefix=capsule.app.conf.capsule_prefix,
        capsule_redis_url=capsule.app.conf.broker_url,
        task_publish_retry=False,
    )
    run_id = (await Capsule(away).runs.astart("support", "hello")).id
    assert f"run {run_id} was not sent; a worker sends it" in caplog.text
    record = await store.read(run_id)
    assert (record.status, record.unsent_us) == ("queued", record.updated_us)


def test_an_agent_of_openai_agents_is_registered_with_its_options(capsule: Capsule) -> None:
    engine = capsule.runs.register("support", Agent(name="helper"), on_uncertain="fail")
    assert isinstance(engine, OpenAIEngine)
    assert capsule.runs.engine_of("support") is engine
    with pytest.raises(InvalidSetting, match="on_uncertain = 'ask'"):
        capsule.runs.register("sales", Agent(name="a"), on_uncertain="ask")


def test_a_run_is_started_without_an_event_loop(capsule: Capsule) -> None:
    run_id = capsule.runs.start("support", "hello").id
    with sync_run_store(capsule.app) as store:
        assert store.read(run_id).status == "queued"
    watch_thread.stop()
