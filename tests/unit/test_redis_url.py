"""Which Redis holds what code of tasks stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from capsule_tasks.client.where import current_execution_id, redis_url
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import targets


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


def test_no_error_repeats_the_password_of_a_broker(app: Celery) -> None:
    app.conf.broker_url = "amqp://user:hunter2@host//"
    with pytest.raises(InvalidSetting, match="which is amqp://…") as caught:
        redis_url()
    assert "hunter2" not in str(caught.value)


def test_of_several_brokers_the_first_counts_also_in_a_list(app: Celery) -> None:
    app.conf.broker_url = ["redis://first/0", "redis://second/0"]
    assert redis_url() == "redis://first/0"


@pytest.mark.parametrize("spelled", ["CERT_REQUIRED", "CERT_NONE", "required"])
def test_celerys_spelling_of_what_tls_checks_is_understood(spelled: str) -> None:
    target = targets.parsed(f"rediss://host/0?ssl_cert_reqs={spelled}", ConnectionSettings())
    assert target.options["ssl_cert_reqs"] == spelled.removeprefix("CERT_").lower()


def test_a_task_called_as_a_function_is_a_part_of_the_one_that_calls_it(app: Celery) -> None:
    @app.task
    def inner(depth: int) -> str | None:
        return inner(depth - 1) if depth else current_execution_id()

    @app.task
    def outer() -> list[str | None]:
        return [inner(0), inner(2), inner.apply(args=[0], task_id="own").get()]

    assert outer.apply(task_id="task-7").get() == ["task-7", "task-7", "own"]
    assert inner(0) is None


def test_a_task_knows_its_execution_and_other_code_has_none(app: Celery) -> None:
    @app.task
    def who() -> str | None:
        return current_execution_id()

    assert who.apply(task_id="task-7").get() == "task-7"
    assert current_execution_id() is None
