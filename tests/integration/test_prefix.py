"""Apps that share a Redis keep to keys of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery

import capsule_tasks
from capsule_tasks.client import Execution
from capsule_tasks.client.revokes import store_revokes
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.taskpool.options import loss_counter_of
from tests.servers import fresh_prefix

ID = "an-execution"


@pytest.fixture
def app(valkey_url: str) -> Iterator[Celery]:
    app = Celery("prefixed", broker=valkey_url, set_as_current=False)
    app.conf.capsule_prefix = fresh_prefix()
    yield app
    app.close()


def keys(app: Celery) -> list[str]:
    prefix = app.conf.capsule_prefix
    with redis.Redis.from_url(app.conf.broker_url, decode_responses=True) as client:
        return [key.removeprefix(prefix) for key in client.scan_iter(f"{prefix}*")]


def test_revokes_use_the_prefix(app: Celery) -> None:
    store_revokes(app, ID)
    assert keys(app) == [":{revokes}"]


async def test_losses_use_the_prefix(app: Celery) -> None:
    losses = loss_counter_of(app)
    await losses.judge(TaskCall(name="t", task_id=ID, body=b""))
    await losses.close()
    assert keys(app) == [f":{{E:{ID}}}:losses:0"]


def test_steps_use_the_prefix(app: Celery) -> None:
    @app.task
    def pay() -> Any:
        return capsule_tasks.step("charge", int, "5")

    assert pay.apply(task_id=ID).get() == 5
    assert f":{{E:{ID}}}:steps" in keys(app)


def test_apps_of_one_process_keep_to_their_own_prefixes(valkey_url: str) -> None:
    prefixes = [uuid4().hex for _ in range(3)]
    execution_id = uuid4().hex
    with redis.Redis.from_url(valkey_url) as client:
        for count, prefix in enumerate(prefixes, start=1):
            app = Celery(broker=valkey_url, backend=valkey_url, set_as_current=False)
            app.conf.capsule_prefix = prefix
            assert Execution(execution_id, app=app).interrupt() == "pending"
            found = [key.decode() for key in client.scan_iter(f"*{execution_id}*:control")]
            assert sorted(key.split(":")[0] for key in found) == sorted(prefixes[:count])
