"""Cancelling and looking where the result backend can say nothing: there is none, or it is away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from capsule_tasks import Capsule
from capsule_tasks.cli import capsule
from capsule_tasks.client import Execution, cancelling
from capsule_tasks.client.revokes import revoke_store
from capsule_tasks.errors import ExecutionUnknown, StorageUnavailable
from capsule_tasks.testing.servers import free_port
from tests.acceptance.workers import Worker, unique


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with Worker(redis_url, directory, app="tests.acceptance.bare_app") as worker:
        yield worker


@pytest.fixture(params=["none", "away"])
def app(request: pytest.FixtureRequest, worker: Worker, redis_url: str) -> Iterator[Celery]:
    """A producer of the worker that has no result backend, or one that is not there."""
    away = f"redis://:secret@127.0.0.1:{free_port()}/0"
    backend = away if request.param == "away" else None
    with producer(redis_url, backend, task_default_queue=worker.queue) as app:
        yield app


@pytest.fixture
def elsewhere(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Streams in a Redis that is neither the broker nor a result backend."""
    monkeypatch.setenv("CAPSULE_REDIS_URL", redis_url)
    with producer("memory://", None) as app:
        yield app


@contextlib.contextmanager
def producer(broker: str, backend: str | None, **conf: Any) -> Iterator[Celery]:
    app = Celery("bare", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(broker_transport_options={"of": unique()}, **conf)
    if backend is not None:
        app.backend.remove_pending_result = lambda result: result
    yield app
    app.pool.force_close_all()
    app.close()


def send(app: Celery, **options: Any) -> Execution:
    return Execution.of(app.signature("busy").apply_async(ignore_result=True, **options))


def typed(app: Celery, *words: str, status: int = 0) -> Result:
    done = CliRunner().invoke(capsule, words, obj=CLIContext(app, no_color=True, workdir=None))
    assert done.exit_code == status, (done.output, done.exc_info)
    return done


def is_revoked(app: Celery, task_id: str) -> bool:
    store = revoke_store(app)
    assert store is not None
    with contextlib.closing(store):
        return task_id in store.read().ids


def outcome_of(execution: Execution) -> str:
    return str(list(execution.events())[-1].message.outcome)


def test_running_and_held_tasks_are_cancelled(app: Celery) -> None:
    running = send(app)
    assert "at work" in next(running.output())
    held = send(app, countdown=3)
    ids = [held.id, "nobody-knows", running.id]
    answers = Capsule(app).cancel(ids)
    assert answers == dict(zip(ids, ["pending", "pending", "requested"], strict=True))
    assert [outcome_of(one) for one in (running, held)] == ["cancelled", "cancelled"]
    assert running.cancel() == "over"


def test_an_unknown_task_is_revoked_from_the_command_line(app: Celery) -> None:
    unknown = unique()
    assert typed(app, "cancel", unknown).stdout == f"{unknown}: pending\n"
    assert is_revoked(app, unknown)


def test_a_fault_of_the_result_backend_is_one_line(
    worker: Worker, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with producer(redis_url, away, task_default_queue=worker.queue) as app:
        unknown = Execution(unique(), app=app)
        with pytest.raises(StorageUnavailable, match="result backend"):
            unknown.snapshot()
        assert unknown.cancel() == "pending"
        (said,) = caplog.messages
        assert "the result backend is unavailable" in said
        (line,) = typed(app, "tail", unknown.id, "--no-wait", status=69).stderr.splitlines()
        assert "the result backend is unavailable" in line
        assert "secret" not in said + line


def test_a_silent_result_backend_delays_no_revoke(
    worker: Worker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "MAX_OUTAGE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with producer(redis_url, away, task_default_queue=worker.queue) as app:
            unknown = Execution(unique(), app=app)
            assert unknown.cancel() == "pending"
            assert is_revoked(app, unknown.id)


@pytest.fixture(params=["app", "elsewhere"])
def bare(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Celery]:
    """No result backend; streams in the broker, or in a Redis of their own."""
    if request.param == "elsewhere":
        yield request.getfixturevalue("elsewhere")
    else:
        with producer(redis_url, None, task_default_queue=unique("q")) as app:
            yield app


def test_an_unknown_id_is_reported_as_unknown(bare: Celery) -> None:
    unknown = Execution(unique(), app=bare)
    assert unknown.snapshot().state == "unknown"
    assert unknown.interrupt() == "pending"
    with pytest.raises(ExecutionUnknown):
        unknown.stack()
    assert unknown.cancel() == "pending"
    said = f"no worker has started {unknown.id}"
    done = typed(bare, "cancel", unknown.id)
    assert done.stdout == f"{unknown.id}: pending\n"
    assert said in done.stderr
    assert said in typed(bare, "tail", unknown.id, "--no-wait", status=1).stderr


def test_the_stack_of_an_id_that_does_not_run(worker: Worker, redis_url: str) -> None:
    with producer(redis_url, None) as app:
        unknown = unique()
        here = ("-d", worker.name, "-t", "60")
        said = typed(app, "stack", unknown, *here, status=1).stderr
        assert f"no worker has started {unknown}" in said
