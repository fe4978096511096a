"""Which workers keep runs going."""

from __future__ import annotations

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


def test_an_app_with_agents_has_a_keeper() -> None:
    assert isinstance(make_run_keeper(app_with("redis://nowhere", "clerk")), RunKeeper)


def test_an_app_without_agents_keeps_no_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert make_run_keeper(app_with("redis://nowhere")) is None
    assert not caplog.records


def test_an_app_without_redis_says_that_it_keeps_no_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert make_run_keeper(app_with("memory://", "clerk")) is None
    assert "runs are not kept going: set capsule_redis_url" in caplog.text
