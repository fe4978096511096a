"""Limits of named sessions in a real worker: tenants, idleness, age, and sessions that are busy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_tasks import Capsule
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.errors import CodeFailed, NamedSessionBusy
from capsule_tasks.protocol.events import SessionRestored
from capsule_tasks.protocol.messages import InputRequest
from tests.acceptance.test_code import code_worker
from tests.acceptance.workers import HANG_S, Worker, eventually
from tests.servers import fresh_prefix

ASK = "print('asks', flush=True)\nanswer = input('?')"
BURN = """
import time
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
"""
COUNT = """
import os
n = globals().get("n", 0) + 1
[n, os.getpid()]
"""


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    conf = {
        "capsule_prefix": fresh_prefix(),
        "capsule_tenants": {
            "small": {"max_sessions": 1},
            "brief": {"max_cpu_s": 0.1},
        },
        "capsule_code_profiles": {
            "sandbox": {},
            "idle": {"idle_timeout_s": 0.2},
            "young": {"max_age_s": 0.5},
        },
    }
    with code_worker(redis_url, tmp_path_factory.mktemp("worker"), **conf) as worker:
        worker.app.conf.update(conf)
        yield worker


@pytest.fixture
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


def failure_of(session: NamedSession) -> CodeFailed:
    with pytest.raises(CodeFailed) as failed:
        session.execute("print('runs')").get(timeout=HANG_S)
    return failed.value


def test_a_tenant_has_no_more_live_sessions_than_it_may(capsule: Capsule) -> None:
    first, second = (capsule.session(name, tenant="small") for name in ("first", "second"))
    assert first.execute("1").get(timeout=HANG_S) == 1
    assert capsule.usage("small").live == 1
    refused = failure_of(second)
    assert refused.type == "TenantFull"
    assert "'small' has 1 live sessions" in refused.message
    assert first.execute("2").get(timeout=HANG_S) == 2
    first.close()
    eventually(lambda: capsule.usage("small").live == 0, "the end of the first session's place")
    assert second.execute("3").get(timeout=HANG_S) == 3


def test_a_tenant_uses_no_more_processor_time_than_it_may(capsule: Capsule) -> None:
    session = capsule.session("burns", tenant="brief")
    assert session.execute(BURN).get(timeout=HANG_S) is None
    eventually(lambda: capsule.usage("brief").calls == 1, "the call's usage")
    usage = capsule.usage("brief")
    assert usage.cpu_ms >= 150
    assert (usage.total_cpu_ms, usage.total_calls) == (usage.cpu_ms, 1)
    refused = failure_of(session)
    assert refused.type == "TenantOverLimit"
    assert "may use 0.1 s" in refused.message
    assert session.info().executions == 1


def test_an_idle_session_is_saved_and_released(capsule: Capsule) -> None:
    session = capsule.session("idle", profile="idle")
    count, child = session.execute(COUNT).get(timeout=HANG_S)
    assert count == 1
    eventually(lambda: not session.info().owner, "the release of the session")
    again = session.execute(COUNT)
    count, other = again.get(timeout=HANG_S)
    assert count == 2
    assert other != child
    (restored,) = (
        event.message for event in again.events() if isinstance(event.message, SessionRestored)
    )
    assert restored.saved_at is not None
    assert restored.lost_calls == 0


def test_an_old_session_goes_on_in_another_child(capsule: Capsule) -> None:
    """Also one that is never idle for long: no call is lost, and each counts on."""
    session = capsule.session("old", profile="young")
    counted = [session.execute(COUNT).get(timeout=HANG_S)]

    def is_replaced() -> bool:
        counted.append(session.execute(COUNT).get(timeout=HANG_S))
        return bool(counted[-1][1] != counted[0][1])

    eventually(is_replaced, "another child")
    assert [count for count, _ in counted] == list(range(1, len(counted) + 1))


def test_a_call_of_a_busy_session_waits_or_is_refused(capsule: Capsule) -> None:
    session = capsule.session("busy")
    running = session.execute(ASK, busy="error")
    next(each for each in running.events() if isinstance(each.message, InputRequest))
    with pytest.raises(NamedSessionBusy):
        session.execute("answer = 'mine'", busy="error")
    waiting = session.execute("answer", busy="wait")
    with pytest.raises(NamedSessionBusy):
        session.execute("answer = 'mine'", busy="error")
    assert waiting.snapshot().state != "ended"
    running.respond("theirs")
    assert waiting.get(timeout=HANG_S) == "theirs"
    for number in range(20):
        assert session.execute(str(number), busy="error").get(timeout=HANG_S) == number
