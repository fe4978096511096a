"""Named sessions in real workers: calls, results, and workers that come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule, Execution
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import CallIdTaken, CodeFailed
from capsule_tasks.protocol.events import Ended, Outcome, SessionRestored
from capsule_tasks.protocol.messages import InputRequest
from tests.acceptance.test_code import code_worker
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique
from tests.servers import fresh_prefix

LEASE_S = 1.0
ASK = "print('asks', flush=True)\nanswer = input('?')"


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with code_worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


def session_of(worker: Worker, name: str, conf: dict[str, Any]) -> NamedSession:
    """A session of workers that share nothing with those of other tests."""
    worker.app.conf.update(conf)
    return Capsule(worker.app).session(name)


def test_calls_share_a_sandbox_and_their_values_are_results(capsule: Capsule) -> None:
    session = capsule.session("values")
    first = session.execute("n = 41\nprint('set')")
    second = session.execute("n += 1\n{'n': n}")
    assert second.get(timeout=HANG_S) == {"n": 42}
    assert "".join(first.output()) == "set\n"
    assert first.get(timeout=HANG_S) is None


def test_an_error_and_a_value_that_is_no_json(capsule: Capsule) -> None:
    session = capsule.session("errors")
    with pytest.raises(CodeFailed, match="ZeroDivisionError: division by zero") as raised:
        session.execute("1 / 0").get(timeout=HANG_S)
    assert raised.value.kind == "raised"
    with pytest.raises(CodeFailed) as timed_out:
        session.execute("while True: pass", timeout_s=0.1).get(timeout=HANG_S)
    assert timed_out.value.kind == "timeout"
    assert session.execute("object").get(timeout=HANG_S) == "<class 'object'>"
    no_text = "<int whose repr raised ValueError>"  # Python writes no number of 5,000 digits
    assert session.execute("10**5000").get(timeout=HANG_S) == no_text


def test_a_sandbox_has_no_secrets(capsule: Capsule) -> None:
    call = capsule.session("secrets").execute("import os\n'TEST_CONF' in os.environ")
    assert call.get(timeout=HANG_S) is False


def test_a_cancelled_call_is_revoked_and_the_namespace_stays(capsule: Capsule) -> None:
    session = capsule.session("cancelled")
    call = session.execute("n = 1\nprint('go', flush=True)\nwhile True: pass")
    next(call.output())
    call.cancel()
    with pytest.raises(TaskRevokedError):
        call.get(timeout=HANG_S)
    assert session.execute("n").get(timeout=HANG_S) == 1


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes
def test_a_call_that_was_cancelled_while_it_waited_never_runs(
    worker: Worker, redis_url: str
) -> None:
    """Also if it waits for longer than the ends of executions without output are kept."""
    app = producer(redis_url, "none", capsule_retention={"silent_retention_s": 0.1})
    session = Capsule(app).session("cancelled-long-ago")
    first = session.execute(f"ran = []\n{ASK}")
    next(first.output())
    cancelled, witness = session.execute("ran.append(1)"), uuid4().hex
    assert cancelled.cancel() == "requested"
    store = watch_thread.call(watch_thread.watcher(app)).store
    watch_thread.call(store.end_unclaimed(witness, Ended(outcome=Outcome.CANCELLED), task="x"))
    expired = Execution(witness, app=app)
    eventually(lambda: expired.snapshot().state == "unknown", "a later end has expired")
    first.respond("")
    assert session.execute("ran").get(timeout=HANG_S) == []
    assert cancelled.snapshot().outcome == "cancelled"
    close(app)


def test_a_question_is_answered(capsule: Capsule) -> None:
    call = capsule.session("questions").execute("input('name?')")
    for event in call.events():
        if isinstance(event.message, InputRequest):
            call.respond("Ada")
    assert call.get(timeout=HANG_S) == "Ada"


def test_a_session_moves_with_its_namespace_when_its_worker_is_stopped(
    redis_url: str, tmp_path: Path
) -> None:
    conf = {"capsule_prefix": fresh_prefix()}
    with code_worker(redis_url, tmp_path, **conf) as first:
        session = session_of(first, "moves", conf)
        assert session.execute("n = 41").get(timeout=HANG_S) is None
        with code_worker(redis_url, tmp_path, queue=first.queue, **conf):
            first.stop()
            call = session.execute("n + 1")
            assert call.get(timeout=HANG_S) == 42
            messages = [event.message for event in call.events()]
            assert any(isinstance(each, SessionRestored) for each in messages)


def test_calls_of_a_killed_worker_are_lost_or_run_elsewhere(redis_url: str, tmp_path: Path) -> None:
    conf = {"capsule_lease_s": LEASE_S, "capsule_prefix": fresh_prefix()}
    with code_worker(redis_url, tmp_path, **conf) as killed:
        session = session_of(killed, "killed", conf)
        begun, waiting = session.execute(ASK), session.execute("6 * 7")
        next(begun.output())
        with code_worker(redis_url, tmp_path, queue=killed.queue, **conf):
            killed.kill()
            with pytest.raises(WorkerLostError, match="died"):
                begun.get(timeout=HANG_S)
            assert waiting.get(timeout=HANG_S) == 42


def test_the_owner_lists_saves_restarts_and_closes(capsule: Capsule) -> None:
    session = capsule.session("requests")
    session.execute("n = 1").get(timeout=HANG_S)
    assert "n" in [entry.name for entry in session.namespace().entries]
    assert "n" in session.checkpoint().saved
    assert (session.info().profile, session.info().hosts) == ("sandbox", 1)
    assert "requests" in [entry.session_id for entry in capsule.sessions()]
    session.restart()
    assert session.execute("'n' in globals()").get(timeout=HANG_S) is False
    session.close()
    assert "requests" not in [entry.session_id for entry in capsule.sessions()]


def test_a_call_reaches_its_limit_of_time(capsule: Capsule) -> None:
    call = capsule.session("limits").execute("while True: pass", timeout_s=0.2)
    with pytest.raises(CodeFailed, match="ExecutionTimeout") as failed:
        call.get(timeout=HANG_S)
    assert failed.value.kind == "timeout"


def test_a_full_worker_gives_up_the_session_that_is_idle_longest_whatever_its_profile(
    redis_url: str, tmp_path: Path
) -> None:
    conf = {
        "capsule_prefix": fresh_prefix(),
        "capsule_max_live_sessions": 2,
        "capsule_code_profiles": {"one": {}, "other": {}},
    }
    with code_worker(redis_url, tmp_path, **conf) as worker:
        worker.app.conf.update(conf)
        capsule = Capsule(worker.app)
        first, second = (capsule.session(name, profile="one") for name in ("first", "second"))
        assert first.execute("n = 1\nn").get(timeout=HANG_S) == 1
        assert second.execute("n = 2\nn").get(timeout=HANG_S) == 2
        third = capsule.session("third", profile="other")
        assert third.execute("n = 3\nn").get(timeout=HANG_S) == 3
        assert [bool(one.info().owner) for one in (first, second, third)] == [False, True, True]
        assert first.execute("n").get(timeout=HANG_S) == 1
        assert not second.info().owner


def test_a_call_is_stopped_when_a_worker_that_stops_has_waited_for_it(
    redis_url: str, tmp_path: Path
) -> None:
    conf = {"capsule_prefix": fresh_prefix(), "capsule_call_stop_s": 0}
    with code_worker(redis_url, tmp_path, **conf) as worker:
        call = session_of(worker, "stopped", conf).execute(
            "import time\nprint('go', flush=True)\ntime.sleep(9)\n'done'"
        )
        next(call.output())
        assert worker.stop() == 0
        with pytest.raises(WorkerLostError, match="its worker was stopped while the call ran"):
            call.get(timeout=HANG_S)


def test_tasks_of_a_worker_that_stops_use_its_sessions_to_their_end(
    redis_url: str, tmp_path: Path
) -> None:
    conf = {"capsule_prefix": fresh_prefix()}
    session_id = unique()
    with code_worker(redis_url, tmp_path, **conf) as worker:
        counting = worker.send("count", session_id)
        assert worker.heard(session_id) == "called"
        os.kill(worker.pid, signal.SIGTERM)
        eventually(lambda: "worker: Warm shutdown" in worker.log, "the warm shutdown")
        worker.go(session_id)
        assert worker.process is not None
        assert worker.process.wait(HANG_S) == 0
        assert counting.get(timeout=HANG_S) == [1, 2, 3]
        assert not session_of(worker, session_id, conf).info().owner


def test_a_second_signal_ends_the_wait_for_calls(redis_url: str, tmp_path: Path) -> None:
    conf = {"capsule_prefix": fresh_prefix(), "capsule_call_stop_s": 3600}
    with code_worker(redis_url, tmp_path, **conf) as worker:
        call = session_of(worker, "waited-for", conf).execute(ASK)
        next(call.output())
        os.kill(worker.pid, signal.SIGTERM)
        eventually(lambda: "worker: Warm shutdown" in worker.log, "the warm shutdown")
        worker.stop(signal.SIGQUIT)
        with pytest.raises(WorkerLostError, match="its worker was stopped while the call ran"):
            call.get(timeout=HANG_S)


def test_sessions_are_listed_as_they_are_by_their_last_use(capsule: Capsule) -> None:
    tenant = uuid4().hex
    first, second = (capsule.session(f"{name}-{tenant}", tenant=tenant) for name in ("a", "b"))
    for session, calls in ((first, 2), (second, 1), (first, 1)):
        for _ in range(calls):
            session.execute("1").get(timeout=HANG_S)
    eventually(lambda: first.info().executions == 3, "the last call to leave the log")
    listed = capsule.sessions(tenant=tenant)
    assert listed == [first.info(), second.info()]
    assert [(info.executions, bool(info.owner)) for info in listed] == [(3, True), (1, True)]
    (newest,) = eventually(
        lambda: [one for one in capsule.sessions(tenant=tenant, limit=1) if one == first.info()],
        "the order in the index",
    )
    assert newest.session_id == first.id


def test_a_profile_that_no_worker_hosts_is_shown_and_its_calls_wait(capsule: Capsule) -> None:
    session = capsule.session("unhosted", profile="elsewhere")
    call = session.execute("1")
    assert session.info().hosts == 0
    assert call.cancel() == "requested"


def test_an_id_of_a_call_of_another_session_is_refused(capsule: Capsule) -> None:
    first = capsule.session("first").execute("1", call_id="shared")
    assert first.get(timeout=HANG_S) == 1
    with pytest.raises(CallIdTaken, match="a call of session 'first', not of 'second'"):
        capsule.session("second").execute("2", call_id="shared")
