"""Code for named sessions as Celery tasks: clients of their sessions, in canvas like any task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, chain, chord
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule, Execution
from capsule_tasks.errors import CodeFailed, CodeNotRun, SessionUnknown
from capsule_tasks.protocol.events import AttemptClaimed
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes

HOLD = "import time\nprint('holds', flush=True)\ntime.sleep(1000)"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this module's own, since its hosts take whatever session is wanted."""
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def code_worker(url: str, directory: Path, *, max_live: int, **options: Any) -> Worker:
    conf = json.dumps({"capsule_code_profiles": {"sandbox": {"max_live": max_live}}})
    app = "tests.acceptance.others.code_app"
    return Worker(url, directory, app=app, TEST_CONF=conf, **options)


def client_worker(url: str, directory: Path, **options: Any) -> Worker:
    """A worker that holds no sessions itself."""
    return code_worker(url, directory, max_live=0, **options)


def host_worker(url: str, directory: Path) -> Worker:
    """A worker that has sessions, and takes no tasks from the others' queues."""
    return code_worker(url, directory, max_live=10)


@pytest.fixture(scope="module")
def worker(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with one slot."""
    with client_worker(url, tmp_path_factory.mktemp("worker"), concurrency=1) as worker:
        yield worker


@pytest.fixture
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


@pytest.fixture
def session_id() -> str:
    return uuid4().hex


@pytest.fixture
def host(url: str, tmp_path: Path) -> Iterator[Worker]:
    with host_worker(url, tmp_path) as host:
        yield host


def value_of(execution: Execution) -> Any:
    return execution.get(timeout=HANG_S)


@contextlib.contextmanager
def closing_app(url: str, queue: str) -> Iterator[Celery]:
    """The app of a producer that outlives its workers."""
    app = producer(url, queue)
    try:
        yield app
    finally:
        close(app)


def unfinished(capsule: Capsule, session_id: str) -> int:
    try:
        return capsule.session(session_id).info().unfinished
    except SessionUnknown:
        return 0


def submitted(capsule: Capsule, session_id: str, count: int = 1) -> None:
    """Return once so many calls of the session are unfinished."""
    eventually(lambda: unfinished(capsule, session_id) == count, "the calls")


def acknowledged(url: str) -> None:
    """Return once no message of this module is unacknowledged."""
    with redis.Redis.from_url(url) as client:
        eventually(lambda: not client.hlen("unacked"), "the acknowledgement")


@pytest.mark.usefixtures("host")
def test_tasks_of_one_session_share_its_namespace(capsule: Capsule, session_id: str) -> None:
    first = capsule.execute("n = 41\nprint('set')", session=session_id)
    assert value_of(first) is None
    second = capsule.execute("n += 1\nn", session=session_id)
    assert value_of(second) == 42
    events = [event.message for event in second.events()]
    claims = [event for event in events if isinstance(event, AttemptClaimed)]
    assert [claim.task for claim in claims] == ["capsule.execute_in_session"]


@pytest.mark.usefixtures("host")
def test_what_the_code_raises_is_the_error_of_the_task(capsule: Capsule, session_id: str) -> None:
    with pytest.raises(CodeFailed, match="ZeroDivisionError: division by zero"):
        value_of(capsule.execute("1 / 0", session=session_id))
    execution = capsule.execute("1", session=session_id, profile="other")
    with pytest.raises(CodeNotRun, match="profile 'sandbox', not 'other'"):
        value_of(execution)


@pytest.mark.usefixtures("host")
def test_messages_are_acknowledged_however_the_task_ends(
    capsule: Capsule, session_id: str, url: str
) -> None:
    value_of(capsule.execute("1", session=session_id))
    for execution in (
        capsule.execute("1 / 0", session=session_id),
        capsule.execute("1", session=session_id, profile="other"),
    ):
        with pytest.raises(Exception, match=r"division|profile"):
            value_of(execution)
    acknowledged(url)


@pytest.mark.usefixtures("host")
def test_chords_chains_and_links_work(capsule: Capsule, session_id: str) -> None:
    total = capsule.app.signature("total")
    calls = [capsule.execute.s(f"{n} * 10", session=session_id) for n in range(5)]
    assert chord(calls, total)().get(timeout=HANG_S) == 100
    follows = capsule.execute.s(session=session_id)
    assert value_of(chain(capsule.execute.s("'6 * 7'", session=session_id), follows)()) == 42
    execution = capsule.execute(
        "1 / 0", session=session_id, link_error=capsule.app.signature("explain")
    )
    client, key = capsule.app.backend.client, f"mark:{execution.id}"
    found = client.blpop(key, timeout=HANG_S)
    assert found[1] == b"CodeFailed: ZeroDivisionError: division by zero"


def test_tasks_that_wait_for_their_session_hold_no_slot(
    capsule: Capsule, session_id: str, url: str, tmp_path: Path
) -> None:
    waiting = [capsule.execute(f"{n}", session=session_id) for n in range(20)]
    submitted(capsule, session_id, 20)
    assert value_of(capsule.execute("6 * 7")) == 42  # in the only slot
    with host_worker(url, tmp_path):
        assert [value_of(execution) for execution in waiting] == list(range(20))


@pytest.mark.parametrize("stop", ["cancel", "revoke"])
def test_a_task_that_has_not_begun_is_stopped(capsule: Capsule, session_id: str, stop: str) -> None:
    execution = capsule.execute("1", session=session_id)
    submitted(capsule, session_id)
    if stop == "cancel":
        assert execution.cancel() == "pending"
    else:
        execution.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        value_of(execution)
    eventually(lambda: execution.snapshot().outcome == "cancelled", "the end of the call")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("stop", ["cancel", "revoke"])
def test_a_task_that_runs_is_stopped(capsule: Capsule, session_id: str, stop: str) -> None:
    value_of(capsule.execute("kept = 1", session=session_id))
    execution = capsule.execute(HOLD, session=session_id)
    next(execution.output())
    if stop == "cancel":
        assert execution.cancel() == "requested"
    else:
        execution.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        value_of(execution)
    # Celery stores a revoke before the task has ended.
    eventually(lambda: execution.snapshot().outcome == "cancelled", "the end of the call")
    assert value_of(capsule.execute("kept", session=session_id)) == 1


def test_a_message_of_a_dead_worker_runs_nothing_twice(
    url: str, tmp_path: Path, session_id: str
) -> None:
    queue = unique()
    with closing_app(url, queue) as app:
        capsule = Capsule(app)
        with client_worker(url, tmp_path, queue=queue) as doomed:
            value = "n = globals().get('n', 0) + 1\nn"
            execution = capsule.execute(value, session=session_id)
            submitted(capsule, session_id)
            doomed.kill()
        with host_worker(url, tmp_path):
            eventually(lambda: unfinished(capsule, session_id) == 0, "the end of the call")
            with client_worker(url, tmp_path, queue=queue):
                assert value_of(execution) == 1
                assert value_of(capsule.execute("n", session=session_id)) == 1
                acknowledged(url)


def test_a_worker_that_stops_leaves_its_waiting_tasks_to_others(
    url: str, tmp_path: Path, session_id: str
) -> None:
    queue = unique()
    with closing_app(url, queue) as app:
        capsule = Capsule(app)
        with client_worker(url, tmp_path, queue=queue):
            calls = [capsule.execute.s(f"{n}", session=session_id) for n in range(3)]
            result = chord(calls, app.signature("total"))()
            submitted(capsule, session_id, 3)
        with client_worker(url, tmp_path, queue=queue), host_worker(url, tmp_path):
            assert result.get(timeout=HANG_S) == 3


# --- the handle of a session ----------------------------------------------------------------------


@pytest.mark.usefixtures("host")
def test_a_session_is_looked_into_saved_restarted_and_closed(
    capsule: Capsule, session_id: str
) -> None:
    session = capsule.session(session_id)
    assert session.execute("n = 1\nn").get(timeout=HANG_S) == 1
    assert "n" in [entry.name for entry in session.namespace().entries]
    assert "n" in session.checkpoint().saved
    holding = session.execute(HOLD)
    next(holding.output())
    assert session.interrupt() == "requested"
    with pytest.raises(CodeFailed, match="KeyboardInterrupt"):
        holding.get(timeout=HANG_S)
    session.restart()
    assert session.execute("'n' in globals()").get(timeout=HANG_S) is False
    session.close()
    with pytest.raises(SessionUnknown):
        session.info()
    assert session.execute("2").get(timeout=HANG_S) == 2


@pytest.mark.usefixtures("host")
def test_everything_of_a_session_in_use_is_forgotten(capsule: Capsule, session_id: str) -> None:
    session = capsule.session(session_id, tenant=session_id)
    assert session.execute("n = 1\nn").get(timeout=HANG_S) == 1
    holding = session.execute(HOLD)
    next(holding.output())
    capsule.forget(tenant=session_id)
    with pytest.raises(SessionUnknown):
        session.info()
    assert session.execute("'n' in globals()").get(timeout=HANG_S) is False
