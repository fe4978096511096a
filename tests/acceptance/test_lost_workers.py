"""Workers that die or stand still: every execution ends once, or is known to be redelivered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import redis
from celery import group
from celery.exceptions import WorkerLostError

from capsule_tasks.client.execution import Execution
from capsule_tasks.client.group import GroupExecution
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.protocol.events import AttemptClaimed, AttemptEnded, Ended, Outcome
from capsule_tasks.storage.executions.types import Event
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.workers import HANG_S, Worker, eventually, unique
from tests.severing_proxy import SeveringProxy

LEASE = {"TEST_LEASE": "1"}


async def seen(execution: Execution) -> list[Event]:
    return [event async for event in execution.aevents()]


def watched(execution: Execution) -> list[Event]:
    async def watch() -> list[Event]:
        async with asyncio.timeout(HANG_S):
            return await seen(execution)

    return asyncio.run(watch())


def test_an_acknowledged_task_of_a_killed_worker_is_ended_by_another(
    redis_url: str, tmp_path: Path
) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, **LEASE) as dying:
        execution = Execution.of(dying.send("steps", key, 2))
        dying.heard(key)
        eventually(lambda: len(execution.tail()) >= 6, "the output in the stream")
        dying.kill()
        with Worker(redis_url, tmp_path, **LEASE):
            events = watched(execution)
            with pytest.raises(WorkerLostError):
                execution.get(timeout=HANG_S)
    assert [event.message.outcome for event in events if isinstance(event.message, Ended)] == [
        Outcome.LOST
    ]
    assert events[-1].is_last
    assert execution.snapshot().outcome == "lost"


def test_two_that_look_after_a_dead_worker_write_one_end_for_each(
    redis_url: str, tmp_path: Path
) -> None:
    """And the list of recent executions has all of them."""
    keys = [unique() for _ in range(4)]
    with Worker(redis_url, tmp_path, concurrency=len(keys), **LEASE) as dying:
        members = [dying.sig("steps", key, 1) for key in keys]
        running = GroupExecution.of(group(members, app=dying.app).apply_async())
        executions = [running.member(place) for place in range(len(keys))]
        for execution, key in zip(executions, keys, strict=True):
            dying.heard(key)
            eventually(lambda one=execution: one.snapshot().state == "running", "its claim")
        dying.kill()
        with Worker(redis_url, tmp_path, **LEASE), Worker(redis_url, tmp_path, **LEASE):
            states = list(running.watch())
            streams = [watched(execution) for execution in executions]

            def all_are_listed() -> bool:
                listed = watch_thread.call(recent_of(dying, "lost"))
                return {execution.id for execution in executions} <= listed

            eventually(all_are_listed, "the entries of the lost")
    assert states[-1].counts == {"lost": len(keys)}
    failures = [failure.execution_id for state in states for failure in state.failures]
    assert sorted(failures) == sorted(execution.id for execution in executions)
    for events in streams:
        ends = [event.message for event in events if isinstance(event.message, Ended)]
        assert [end.outcome for end in ends] == [Outcome.LOST]


async def recent_of(worker: Worker, state: str) -> set[str]:
    watcher = await watch_thread.watcher(worker.app)
    return {
        entry.execution_id for entry in await watcher.store.list_recent(state=state, limit=1000)
    }


def test_a_redelivered_task_has_a_lost_attempt_and_one_that_ends(
    redis_url: str, tmp_path: Path
) -> None:
    key = unique()
    visibility = {**LEASE, "TEST_VISIBILITY": "2"}
    with Worker(redis_url, tmp_path, **visibility) as dying:
        execution = Execution.of(dying.send("hold_late", key))
        dying.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        dying.kill()
        with Worker(redis_url, tmp_path, queue=dying.queue, **visibility) as other:
            other.heard(key)
            other.go(key)
            events = watched(execution)
    hows = [event.message.outcome for event in events if isinstance(event.message, AttemptEnded)]
    assert hows == ["lost"]
    assert sum(isinstance(event.message, AttemptClaimed) for event in events) == 2
    assert events[-1].message.outcome == Outcome.SUCCEEDED


def test_a_question_is_repeated_in_an_attempt_under_a_new_lease(
    redis_url: str, tmp_path: Path
) -> None:
    with Worker(redis_url, tmp_path, **LEASE) as worker:
        execution = Execution.of(worker.send("ask", "what? "))
        eventually(execution.question, "its question")
        client, before = worker.app.backend.client, execution.snapshot().attempt
        owner = client.hget(f"capsule:{{E:{execution.id}}}:meta", "owner").decode()
        assert client.delete(f"capsule:{{W:{owner}}}")
        eventually(lambda: execution.snapshot().attempt > before, "another attempt")
        eventually(execution.question, "the question again")
        execution.respond("this")
        assert execution.get(timeout=HANG_S) == "heard this"


def test_a_suspended_worker_counts_as_dead_and_its_later_writes_are_refused(
    redis_url: str, tmp_path: Path
) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, **LEASE) as stopped:
        execution = Execution.of(stopped.send("steps", key, 2))
        stopped.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        os.kill(stopped.pid, signal.SIGSTOP)
        with Worker(redis_url, tmp_path, **LEASE):
            events = watched(execution)
            assert events[-1].message.outcome == Outcome.LOST
            os.kill(stopped.pid, signal.SIGCONT)
            stopped.go(key)
            assert stopped.get("add", 1, 1) == 2
            assert [event.id for event in watched(execution)] == [event.id for event in events]
        refused = f"WARNING/MainProcess] another attempt owns the stream of task {execution.id}"
        eventually(lambda: refused in stopped.log, "the warning")


def test_a_worker_that_stood_still_alone_goes_on_where_it_was(
    redis_url: str, tmp_path: Path
) -> None:
    """No other worker took its executions, so that it claims them again under its next lease."""
    key = unique()
    with Worker(redis_url, tmp_path, **LEASE) as stopped:
        execution = Execution.of(stopped.send("steps", key, 2))
        stopped.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        client = stopped.app.backend.client
        lease = next(
            name
            for name in client.scan_iter("capsule:{W:*}")
            if client.hget(f"capsule:{{E:{execution.id}}}:meta", "owner") in name
        )
        os.kill(stopped.pid, signal.SIGSTOP)
        eventually(lambda: client.hget(lease, "until") < _now_us(client), "the end of the lease")
        os.kill(stopped.pid, signal.SIGCONT)
        eventually(lambda: execution.snapshot().attempt > 0 and _is_retaken(execution))
        stopped.go(key)
        events = watched(execution)
    assert events[-1].message.outcome == Outcome.SUCCEEDED
    hows = [event.message.outcome for event in events if isinstance(event.message, AttemptEnded)]
    assert hows == ["replaced"]
    text = "".join(getattr(event.message, "data", "") for event in events)
    assert text == "step 0\nstep 1\n"


def _now_us(client: object) -> bytes:
    seconds, us = client.time()  # type: ignore[attr-defined]
    return str(seconds * 1_000_000 + us).encode()


def _is_retaken(execution: Execution) -> bool:
    return any(isinstance(event.message, AttemptEnded) for event in execution.tail())


def test_a_stopped_worker_leaves_nothing_running_behind(redis_url: str, tmp_path: Path) -> None:
    key = unique()
    with Worker(redis_url, tmp_path) as worker:
        execution = Execution.of(worker.send("steps", key, 1))
        worker.heard(key)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.go(key)
        worker.process.wait(HANG_S)
    assert watched(execution)[-1].message.outcome == Outcome.SUCCEEDED


def test_a_redis_that_restarts_loses_no_event(tmp_path: Path) -> None:
    key = unique()
    with PrivateServer(tmp_path / "broker") as broker:
        server = PrivateServer(tmp_path / "streams", port=free_port(), aof=True)
        server.start()
        try:
            url = server.url
            with Worker(broker.url, tmp_path, TEST_STREAMS_URL=url) as worker:
                worker.app.conf.capsule_redis_url = url
                execution = Execution.of(worker.send("steps", key, 3))
                worker.heard(key)
                server.stop()
                worker.go(key)
                assert execution.get(timeout=HANG_S) == 3
                server.start()
                events = watched(execution)
        finally:
            server.stop()
    text = "".join(getattr(event.message, "data", "") for event in events)
    assert text == "step 0\nstep 1\nstep 2\n"
    assert sum(event.is_last for event in events) == 1


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_claim_that_arrives_after_its_lease_is_repeated(
    redis_url: str, tmp_path: Path, is_looked_at: bool
) -> None:
    """Held up on its way; another worker may have seen to what that lease held meanwhile."""
    key = unique()
    with (
        PrivateServer(tmp_path / "redis") as server,
        SeveringProxy(server.port) as proxy,
        redis.Redis.from_url(server.url) as client,
        Worker(redis_url, tmp_path, TEST_STREAMS_URL=proxy.url, **LEASE) as stalled,
    ):
        execution = late_claim(stalled, server, proxy, key)
        if is_looked_at:
            (gone,) = client.zrange("capsule:workers", 0, -1)
            with Worker(redis_url, tmp_path, TEST_STREAMS_URL=server.url, **LEASE):
                eventually(lambda: client.zscore("capsule:workers", gone) is None, "its reaper")
        proxy.go_on()
        eventually(lambda: _is_retaken(execution), "a new attempt")
        stalled.go(key)
        events = watched(execution)
        assert execution.get(timeout=HANG_S) == 2
    hows = [event.message.outcome for event in events if isinstance(event.message, AttemptEnded)]
    assert hows == ["replaced"]
    assert [event.message.outcome for event in events if isinstance(event.message, Ended)] == [
        Outcome.SUCCEEDED
    ]
    text = "".join(getattr(event.message, "data", "") for event in events)
    assert text == "step 0\nstep 1\n"


def test_a_message_is_kept_until_its_claim_is_under_a_lease_that_lasts(
    redis_url: str, tmp_path: Path
) -> None:
    """A worker that dies with a claim no reaper finds has not acknowledged: it is redelivered."""
    key = unique()
    patient = {"TEST_CONF": json.dumps({"capsule_publish": {"claim_wait_s": 600}})}
    options = {**LEASE, **patient, "TEST_VISIBILITY": "2"}
    with (
        PrivateServer(tmp_path / "redis") as server,
        SeveringProxy(server.port) as proxy,
        Worker(redis_url, tmp_path, TEST_STREAMS_URL=proxy.url, **options) as dying,
    ):
        execution = late_claim(dying, server, proxy, key)
        proxy.stall_at(b"capsule:workers")  # before it has another lease
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        proxy.stalled(HANG_S)
        assert dying.ask("active")  # behind this its acknowledgement would be there
        held = dying.app.backend.client.hvals("unacked")
        assert any(execution.id.encode() in message for message in held)
        dying.kill()
        options["TEST_STREAMS_URL"] = server.url
        with Worker(redis_url, tmp_path, queue=dying.queue, **options) as other:
            other.heard(key)
            other.go(key)
            events = watched(execution)
    assert events[-1].message.outcome == Outcome.SUCCEEDED
    hows = [event.message.outcome for event in events if isinstance(event.message, AttemptEnded)]
    assert hows == ["lost"]


def late_claim(worker: Worker, server: PrivateServer, proxy: SeveringProxy, key: str) -> Execution:
    """A task that runs, and whose claim is held up in front of Redis until the lease is over."""
    worker.app.conf.capsule_redis_url = server.url
    first = unique()
    worker.go(first)
    watched(Execution.of(worker.send("twice", first)))  # the server knows the scripts from now on
    proxy.stall_at(b"steps")  # its name is in the claim
    execution = Execution.of(worker.send("steps", key, 2))
    worker.heard(key)
    proxy.stalled(HANG_S)
    assert execution.snapshot().state == "unknown"
    with redis.Redis.from_url(server.url) as client:
        (lease,) = client.scan_iter("capsule:{W:*}", count=1000)
        eventually(lambda: int(client.hget(lease, "until")) < int(_now_us(client)), "its end")
    return execution
