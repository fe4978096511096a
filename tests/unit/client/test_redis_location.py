"""Which Redis holds what code of tasks stores."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.transport.redis import Channel

from capsule_tasks.client.redis_location import (
    current_execution_id,
    needed_redis_url,
    redis_of_backend,
    redis_url,
)
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets


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
    app.conf.result_backend = "redis://results/1"
    assert redis_url(app) == "redis://results/1"
    app.conf.broker_url = "redis://broker/0;redis://spare/0"
    assert redis_url(app) == "redis://broker/0"
    assert redis_of_backend(app) == "redis://results/1"
    monkeypatch.setenv("CAPSULE_REDIS_URL", "redis://environment/2")
    assert redis_url(app) == "redis://environment/2"
    app.conf.capsule_redis_url = "rediss+sentinel://a,b/main/0"
    assert redis_url(app) == needed_redis_url(app) == "rediss+sentinel://a,b/main/0"


def test_without_any_redis_the_error_names_the_setting(app: Celery) -> None:
    app.conf.result_backend = "db+sqlite://"
    assert redis_url(app) is None
    with pytest.raises(InvalidSetting, match=r"capsule_redis_url.*CAPSULE_REDIS_URL"):
        needed_redis_url(app)


def test_no_error_repeats_the_password_of_a_broker(app: Celery) -> None:
    app.conf.broker_url = "amqp://user:hunter2@host//"
    with pytest.raises(InvalidSetting, match="which is amqp://…") as caught:
        needed_redis_url(app)
    assert "hunter2" not in str(caught.value)


def test_the_first_of_several_brokers_counts_also_in_a_list(app: Celery) -> None:
    app.conf.broker_url = ["redis://first/0", "redis://second/0"]
    assert redis_url(app) == "redis://first/0"


def options_of(url: str | None) -> dict[str, Any]:
    assert url is not None
    return targets.parsed(url, ConnectionSettings()).options


@pytest.mark.parametrize("setting", ["broker_url", "result_backend"])
def test_a_unix_socket_is_understood_as_celery_spells_it(app: Celery, setting: str) -> None:
    app.conf[setting] = "redis+socket://:word@/run/redis.sock?virtual_host=3&socket_timeout=2"
    options = options_of(redis_url(app))
    assert (options["path"], options["db"], options["password"]) == ("/run/redis.sock", 3, "word")


def as_kombu_connects(app: Celery) -> dict[str, Any]:
    """Arguments that kombu would pass to redis-py, without connecting."""
    with app.connection_for_write() as connection:
        channel = Channel.__new__(Channel)
        channel.connection = SimpleNamespace(client=connection, default_port=6379)
        return dict(channel._connparams())


def about_tls(options: dict[str, Any]) -> dict[str, Any]:
    """The settings, as a connection that is made with them understands them."""
    given = {name: value for name, value in options.items() if name.startswith("ssl_")}
    connection = redis.SSLConnection(**given)
    assert issubclass(options["connection_class"], redis.SSLConnection)
    names = ("cert_reqs", "check_hostname", "ca_certs", "certfile", "keyfile", "ssl_min_version")
    return {name: getattr(connection, name) for name in names}


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("rediss://host/0", False),
        ("rediss://host/0", {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/a b/ca.pem"}),
        ("rediss://host/0", {"ssl_cert_reqs": None}),
        ("redis://host/0", {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}),
        ("redis://host/0", {"ssl_certfile": "/c", "ssl_keyfile": "/k", "ssl_ca_certs": None}),
        ("rediss://host/0", {"ssl_min_version": ssl.TLSVersion.TLSv1_3}),
        ("rediss://host/0?ssl_cert_reqs=CERT_OPTIONAL", {"ssl_cert_reqs": ssl.CERT_NONE}),
        ("rediss://host/0?ssl_ca_certs=%2Fca.pem", {"ssl_cert_reqs": ssl.CERT_NONE}),
    ],
)
def test_tls_of_a_broker_follows_kombus_reading_of_its_settings(
    app: Celery, url: str, tls: Any
) -> None:
    app.conf.broker_url = url
    app.conf.broker_use_ssl = tls
    assert about_tls(options_of(redis_url(app))) == about_tls(as_kombu_connects(app))


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("redis://host/0", {"ssl_cert_reqs": ssl.CERT_NONE}),
        ("rediss://host/0", {"ssl_cert_reqs": "CERT_OPTIONAL", "ssl_ca_certs": "/ca.pem"}),
        ("rediss://host/0?ssl_cert_reqs=required", {"ssl_ca_certs": "/ca.pem"}),
        ("rediss://host/0?ssl_cert_reqs=none", {"ssl_cert_reqs": ssl.CERT_REQUIRED}),
    ],
)
def test_tls_of_a_result_backend_follows_celerys_reading_of_its_settings(
    app: Celery, url: str, tls: Any
) -> None:
    app.conf.result_backend = url
    app.conf.redis_backend_use_ssl = tls
    assert about_tls(options_of(redis_url(app))) == about_tls(app.backend.connparams)


def test_flags_of_tls_are_carried(app: Celery) -> None:
    flags = [ssl.VerifyFlags.VERIFY_X509_STRICT, ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF]
    app.conf.broker_url = "rediss://host/0"
    app.conf.broker_use_ssl = {"ssl_include_verify_flags": flags}
    assert options_of(redis_url(app))["ssl_include_verify_flags"] == flags


@pytest.mark.parametrize("spelled", ["CERT_REQUIRED", "CERT_NONE", "required"])
def test_celerys_spelling_of_tls_options_is_understood(spelled: str) -> None:
    target = targets.parsed(f"rediss://host/0?ssl_cert_reqs={spelled}", ConnectionSettings())
    assert target.options["ssl_cert_reqs"] == spelled.removeprefix("CERT_").lower()


def test_a_task_called_as_a_function_is_part_of_its_caller(app: Celery) -> None:
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
