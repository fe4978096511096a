"""Named sessions are forgotten while workers run their calls, and nobody waits for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import PIPE, Popen
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery.result import AsyncResult

from capsule_tasks import Capsule
from capsule_tasks.client.sessions import forgetting
from capsule_tasks.errors import (
    RunClaimLost,
    RunForgotten,
    RunNotFound,
    SessionClosing,
    SessionForgotten,
    SessionUnknown,
    StorageUnavailable,
)
from capsule_tasks.protocol.events import Ended
from capsule_tasks.storage import ApprovalRequest, SyncRunStore
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes

HOLD = "import time\nsecret = 'a secret'\nprint(secret, flush=True)\ntime.sleep(1000)"
LARGE = "import os\nsecret = os.urandom(64 * 1024 * 1024)"
WAIT_ELSEWHERE = """
import sys
from capsule_tasks.client.sessions.execution import SessionExecution
from tests.acceptance.workers import producer
call = SessionExecution(sys.argv[3], app=producer(sys.argv[1], sys.argv[2]))
print("waits", flush=True)
try:
    call.get(timeout=60)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this module's own, since its workers take whatever session is wanted."""
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def worker(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    app, directory = "tests.acceptance.others.code_app", tmp_path_factory.mktemp("worker")
    with Worker(url, directory, app=app) as worker:
        yield worker


@pytest.fixture
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


@pytest.fixture
def session_id() -> str:
    return f"session-{uuid4().hex}"


def keys_with(url: str, *parts: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return sorted(key for key in client.scan_iter() if any(part in key for part in parts))


def secrets(url: str) -> list[str]:
    """Keys in whose values the text is that the code printed."""
    with redis.Redis.from_url(url) as client:
        return [
            key.decode()
            for key in client.scan_iter()
            if not key.startswith(b"unacked") and b"a secret" in (client.dump(key) or b"")
        ]


def fate(work: Callable[[], Any]) -> Future[BaseException | None]:
    """The error in which work on a thread of its own ends."""
    future: Future[BaseException | None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            future.set_result(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_whoever_waits_for_a_call_is_told_that_its_session_was_forgotten(
    capsule: Capsule, worker: Worker, url: str, session_id: str
) -> None:
    session = capsule.session(session_id)
    running = session.execute(HOLD)
    next(running.output())
    waiting = [session.execute(f"{n}") for n in range(20)]
    calls = [running, *waiting]
    getting = [fate(lambda call=call: call.get(timeout=HANG_S)) for call in calls]  # type: ignore[misc]
    watched = ThreadPoolExecutor().submit(lambda: [event.message for event in waiting[3].events()])
    elsewhere = [
        Popen(
            [sys.executable, "-c", WAIT_ELSEWHERE, url, worker.queue, call.id],
            cwd=ROOT,
            stdout=PIPE,
            text=True,
        )
        for call in (running, waiting[-1])
    ]
    for process in elsewhere:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
    capsule.forget(session=session_id)
    for call, error in zip(calls, (each.result(timeout=HANG_S) for each in getting), strict=True):
        assert isinstance(error, SessionForgotten)
        assert (error.session_id, error.call_id) == (session_id, call.id)
        assert error.may_have_run == (call is running)
    (ended,) = watched.result(timeout=HANG_S)
    assert isinstance(ended, Ended)
    assert "did not run" in ended.message
    said = [process.communicate(timeout=HANG_S)[0] for process in elsewhere]
    assert [text.split()[0] for text in said] == ["SessionForgotten"] * 2
    assert "may have run" in said[0]
    assert "did not run" in said[1]
    assert secrets(url) == []
    assert {key.rpartition(":")[2] for key in keys_with(url, session_id)} <= {
        *("session", "operations", "marks")
    }
    with pytest.raises(SessionUnknown):
        session.info()
    # The same name begins empty.
    assert session.execute("'secret' in globals()").get(timeout=HANG_S) is False


def test_durable_runs_of_a_session_are_forgotten_with_it(
    capsule: Capsule, url: str, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "_MAX_LEAVE_S", 0.2)
    agent: dict[str, Any] = {"schema": "1", "agent": "a"}
    ask = ApprovalRequest(call_id="c", tool="bare:pay", agent="a", fingerprint="0123")
    statuses = ("queued", "running", "interrupted", "completed", "failed")
    with SyncRunStore(url) as runs, runs.lease(f"w-{session_id}").keep():
        claims = {}
        for status in statuses:
            run_id = f"{status}-{session_id}"
            runs.create(run_id, session_id, b"a secret", message=b"a message", **agent)
            if status != "queued":
                claims[status] = claim = runs.claim(run_id, f"w-{session_id}")
            if status not in ("queued", "running"):
                asks = [ask] if status == "interrupted" else []
                items = [{"role": "user", "content": "a secret"}]
                parts: Any = {"turn": 1, "status": status, "items": items}
                runs.commit(claim, b"a secret", approval_requests=asks, **parts)
        getting = {
            status: fate(AsyncResult(f"{status}-{session_id}", app=capsule.app).get)
            for status in statuses[:3]
        }
        capsule.forget(session=session_id)
        for status, future in getting.items():
            error = future.result(timeout=HANG_S)
            assert isinstance(error, RunForgotten)
            assert (error.session_id, error.run_id) == (session_id, f"{status}-{session_id}")
        for status in statuses:
            with pytest.raises(RunNotFound):
                runs.read(f"{status}-{session_id}")
        with pytest.raises(RunClaimLost):
            runs.commit(claims["running"], b"a secret", turn=1, items=[{"n": 1}])
        assert runs.approvals.pending().calls == []
    assert secrets(url) == []
    left = {key.rpartition(":run:")[2] for key in keys_with(url, session_id) if ":run:" in key}
    assert left == {f"{status}-{session_id}" for status in statuses}
    capsule.forget(session=session_id)


def test_a_run_that_is_forgotten_may_be_ended_by_its_worker(
    capsule: Capsule, url: str, session_id: str
) -> None:
    run_id = f"run-{session_id}"
    with SyncRunStore(url) as runs, runs.lease(f"w-{session_id}").keep():
        runs.create(run_id, session_id, b"", schema="1", agent="a")
        claim = runs.claim(run_id, f"w-{session_id}")
        forgotten = fate(lambda: capsule.forget(session=session_id))
        eventually(lambda: runs.read(run_id).cancelled_by == "forget", "the cancel")
        assert not forgotten.done()
        runs.commit(claim, b"", turn=0, status="cancelled")
        assert forgotten.result(timeout=HANG_S) is None
        with pytest.raises(RunNotFound):
            runs.read(run_id)


def test_a_session_is_forgotten_while_its_checkpoint_is_made(
    capsule: Capsule, url: str, session_id: str
) -> None:
    session = capsule.session(session_id)
    assert session.execute(LARGE).get(timeout=HANG_S) is None
    asking = fate(lambda: session.checkpoint(timeout_s=5))
    eventually(lambda: keys_with(url, f"{session_id}}}:checkpoint"), "the first chunk")
    capsule.forget(session=session_id)
    assert keys_with(url, f"{session_id}}}:checkpoint") == []
    assert isinstance(asking.result(timeout=HANG_S), (SessionUnknown, TimeoutError))
    assert session.execute("'secret' in globals()").get(timeout=HANG_S) is False


def test_a_forget_that_died_half_way_is_completed_by_the_next(
    capsule: Capsule, url: str, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = capsule.session(session_id)
    assert session.execute("secret = 'a secret'\nsecret").get(timeout=HANG_S) == "a secret"
    running = session.execute(HOLD)
    next(running.output())

    async def die(*_: Any) -> None:
        raise StorageUnavailable("Redis has died", may_have_written=False)

    with monkeypatch.context() as patched:
        patched.setattr(forgetting, "_forget_calls", die)
        with pytest.raises(StorageUnavailable):
            capsule.forget(session=session_id)
    with pytest.raises(SessionForgotten):
        running.get(timeout=HANG_S)
    with pytest.raises(SessionClosing):
        session.execute("1")
    assert session.info().is_forgotten
    for _ in range(2):
        capsule.forget(session=session_id)
    assert secrets(url) == []
    assert session.execute("'secret' in globals()").get(timeout=HANG_S) is False


def test_calls_that_come_while_a_session_is_forgotten_end_or_are_refused(
    capsule: Capsule, session_id: str
) -> None:
    session = capsule.session(session_id)

    def call() -> list[type[BaseException]]:
        """How calls end that come to no end of their own."""
        ends: list[type[BaseException]] = []
        while ends.count(SessionForgotten) < 3:
            try:
                session.execute(HOLD).get(timeout=HANG_S)
            except (SessionClosing, SessionForgotten) as error:
                ends.append(type(error))
        return ends

    with ThreadPoolExecutor(4) as threads:
        callers = [threads.submit(call) for _ in range(4)]
        while not all(caller.done() for caller in callers):
            capsule.forget(session=session_id)
        for caller in callers:
            caller.result()


def test_a_session_that_no_worker_has_is_forgotten_with_its_calls(
    capsule: Capsule, url: str, session_id: str
) -> None:
    session = capsule.session(session_id, profile="of-no-worker", tenant=session_id)
    call = session.execute("1")
    getting = fate(lambda: call.get(timeout=HANG_S))
    capsule.forget(tenant=session_id)
    error = getting.result(timeout=HANG_S)
    assert isinstance(error, SessionForgotten)
    assert not error.may_have_run
    assert keys_with(url, f"{{T:{session_id}}}") == []
