"""Which workers keep runs going."""

from __future__ import annotations

import asyncio

import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.taskpool.run_keeper import RunKeeper, make_run_keeper
from tests.unit.client.runs.test_registry import ScriptEngine


def app_with(broker: str, *agents: str) -> Celery:
    app = Celery("keeping", broker=broker, set_as_current=False)
    for name in agents:
        Capsule(app).runs.register(name, ScriptEngine())
    return app


async def has_looked(keeper: RunKeeper | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a keeper that is started looks after runs."""
    assert keeper is not None
    looks = 0

    async def look(self: RunKeeper) -> float:
        nonlocal looks
        looks += 1
        return 60.0

    monkeypatch.setattr(RunKeeper, "look", look)
    await keeper.start()
    await asyncio.sleep(0)
    await keeper.stop()
    return looks > 0


async def test_an_app_with_agents_keeps_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = make_run_keeper(app_with("redis://nowhere", "clerk"))
    assert await has_looked(keeper, monkeypatch)


async def test_an_app_without_agents_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await has_looked(make_run_keeper(app_with("redis://nowhere")), monkeypatch)


def test_an_app_without_agents_and_redis_has_no_keeper(caplog: pytest.LogCaptureFixture) -> None:
    assert make_run_keeper(app_with("memory://")) is None
    assert not caplog.records


def test_an_app_without_redis_says_that_it_keeps_no_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert make_run_keeper(app_with("memory://", "clerk")) is None
    assert "runs are not kept going: set capsule_redis_url" in caplog.text
