"""Which Redis holds what code of tasks stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from capsule_tasks.client.where import current_execution_id, redis_url
from capsule_tasks.errors import InvalidSetting


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("urls", broker="memory://", set_as_current=False)
    app.set_current()
    yield app
    app.close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPSULE_REDIS_URL", raising=False)


def test_the_setting_goes_before_the_environment_and_that_before_celerys_own(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.conf.broker_url = "redis://broker/0;redis://spare/0"
    assert redis_url() == "redis://broker/0"
    app.conf.result_backend = "redis://results/1"
    assert redis_url() == "redis://results/1"
    monkeypatch.setenv("CAPSULE_REDIS_URL", "redis://environment/2")
    assert redis_url() == "redis://environment/2"
    app.conf.capsule_redis_url = "rediss+sentinel://a,b/main/0"
    assert redis_url() == "rediss+sentinel://a,b/main/0"


def test_without_any_redis_the_error_says_what_to_set(app: Celery) -> None:
    app.conf.result_backend = "db+sqlite://"
    with pytest.raises(InvalidSetting, match=r"capsule_redis_url.*CAPSULE_REDIS_URL"):
        redis_url()


def test_a_task_knows_its_execution_and_other_code_has_none(app: Celery) -> None:
    @app.task
    def who() -> str | None:
        return current_execution_id()

    assert who.apply(task_id="task-7").get() == "task-7"
    assert current_execution_id() is None
