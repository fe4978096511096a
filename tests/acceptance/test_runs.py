"""Durable runs as Celery tasks, on real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from capsule_tasks import Capsule, SyncHistory
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.messages import send
from capsule_tasks.client.runs.stores import sync_run_store
from capsule_tasks.errors import RunCancelled, RunFailed
from capsule_tasks.protocol.events import AttemptClaimed, AttemptEnded, Ended
from capsule_tasks.protocol.messages import Output, RunEvent
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

APP = "tests.acceptance.others.script_app"
AGENT = "script"


@pytest.fixture(scope="module")
def workers(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Worker, Worker]]:
    """Two workers on one queue."""
    directory = tmp_path_factory.mktemp("workers")
    with (
        Worker(redis_url, directory, app=APP) as one,
        Worker(redis_url, directory, app=APP, queue=one.queue) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def capsule(workers: tuple[Worker, Worker]) -> Capsule:
    return Capsule(workers[0].app)


@pytest.fixture
def worker(workers: tuple[Worker, Worker]) -> Worker:
    return workers[0]


def events_of(run: RunHandle) -> list[Any]:
    return [event.message for event in run.events()]


def attempts(messages: list[Any]) -> list[str]:
    """How the attempts of a run went: `claimed`, and how each of them ended."""
    said = []
    for message in messages:
        if isinstance(message, AttemptClaimed):
            said.append("claimed")
        elif isinstance(message, AttemptEnded | Ended):
            said.append(str(message.outcome))
    return said


def kinds(messages: list[Any]) -> list[str]:
    return [message.kind for message in messages if isinstance(message, RunEvent)]


def effects(worker: Worker, run: RunHandle) -> list[str]:
    return list(worker.app.backend.client.lrange(f"effects:{run.id}", 0, -1))


def logged(worker: Worker, text: str) -> int:
    """How often this worker and those beside it have logged something."""
    logs = worker.log_file.parent.glob("*.log")
    return sum(path.read_text(errors="replace").count(text) for path in logs)


def parked(run: RunHandle) -> RunHandle:
    """Wait until a run waits for a person, and its attempt has ended."""
    state = lambda: run.execution.snapshot().state == "waiting"  # noqa: E731
    eventually(state, "a parked run")
    assert run.state().status == "interrupted"
    return run


def test_a_run_with_tools_completes(capsule: Capsule, worker: Worker) -> None:
    run = capsule.runs.start(AGENT, "tool look; say hello | print hi; tool pay", session=unique())
    assert run.execution.get(timeout=HANG_S) == "made pay"
    assert run.result(timeout_s=HANG_S) == "made pay"
    messages = events_of(run)
    assert attempts(messages) == ["claimed", "succeeded"]
    assert kinds(messages) == ["run_claimed", "said", "turn", "turn"]
    assert messages[3].data == "hello"
    assert "".join(each.data for each in messages if isinstance(each, Output)) == "hi\n"
    assert [each.decode() for each in effects(worker, run)] == ["look", "pay"]
    with SyncHistory(run.state().session_id, worker.environment["REDIS_URL"]) as history:
        contents = [item["content"] for item in history.get_items()]
    assert contents == ["made look; hello", "print hi; made pay"]


def test_a_parked_run_resumes_under_its_id_in_one_stream(
    capsule: Capsule, workers: tuple[Worker, Worker]
) -> None:
    worker = workers[0]
    run = parked(capsule.runs.start(AGENT, "tool look | ask refund; tool refund"))
    result = AsyncResult(run.id, app=worker.app)
    assert result.state == "RETRY"
    assert [each for one in workers for each in one.ask("active")] == [], "no worker has it"
    assert [each for one in workers for each in one.ask("reserved")] == []
    run.approve("refund", by="ann")
    assert run.execution.get(timeout=HANG_S) == "made refund"
    messages = events_of(run)
    assert attempts(messages) == ["claimed", "parked", "claimed", "succeeded"]
    assert kinds(messages) == ["run_claimed", "turn", "turn", "run_parked", "run_resumed", "turn"]
    (asked,) = [
        each.data for each in messages if isinstance(each, RunEvent) and each.kind == "run_parked"
    ]
    assert [call["call_id"] for call in asked["calls"]] == ["refund"]
    assert [each.decode() for each in effects(worker, run)] == ["look", "refund"]


def test_a_duplicate_delivery_leaves_the_run_and_its_stream_alone(
    capsule: Capsule, worker: Worker
) -> None:
    key = unique()
    run = capsule.runs.start(AGENT, f"mark {key}; hold {key} | say done")
    worker.heard(key)
    with sync_run_store(worker.app) as store:
        message = store.read(run.id, with_snapshot=False).message
    eventually(lambda: len(run.execution.tail(100)) >= 3, "the events of its start")
    before = [event.id for event in run.execution.tail(100)]
    for _ in range(4):
        send(worker.app, run.id, message)
    log = f"run {run.id} is left to others"
    eventually(lambda: logged(worker, log) >= 4, "four deliveries that change nothing")
    assert [event.id for event in run.execution.tail(100)] == before
    worker.go(key)
    assert run.execution.get(timeout=HANG_S) == "done"
    assert attempts(events_of(run)) == ["claimed", "succeeded"]


def test_a_failed_run_raises_what_it_failed_of(capsule: Capsule) -> None:
    run = capsule.runs.start(AGENT, "say hello | fail no money")
    with pytest.raises(RunFailed, match="no money") as failed:
        run.execution.get(timeout=HANG_S)
    assert (failed.value.kind, failed.value.type) == ("error", "Scripted")
    assert attempts(events_of(run)) == ["claimed", "failed"]


def test_a_group_waits_for_a_member_that_is_parked(capsule: Capsule) -> None:
    members = [capsule.runs.s(AGENT, "say a"), capsule.runs.s(AGENT, "ask go; say b")]
    result = group(members, app=capsule.app).apply_async()
    run = parked(capsule.runs.get(result[1].id))
    assert not result.ready()
    run.approve("go")
    assert result.get(timeout=HANG_S) == ["a", "b"]


def test_a_chord_waits_for_a_member_that_is_parked(capsule: Capsule, worker: Worker) -> None:
    members = [capsule.runs.s(AGENT, "say a"), capsule.runs.s(AGENT, "ask go; say b")]
    body = worker.app.signature("tests.acceptance.others.script_app.summed")
    result = chord(members, app=capsule.app)(body)
    run = parked(capsule.runs.get(result.parent[1].id))
    run.approve("go")
    assert result.get(timeout=HANG_S) == "a, b"


def test_a_chain_passes_input_and_output(capsule: Capsule, worker: Worker) -> None:
    steps = chain(
        capsule.runs.s(AGENT, "ask go; say say from the first"),
        capsule.runs.s(AGENT),
        app=capsule.app,
    )
    result = steps.apply_async()
    parked(capsule.runs.get(result.parent.id)).approve("go")
    assert result.get(timeout=HANG_S) == "from the first"


def test_a_delivery_after_the_end_repairs_what_was_not_reported(
    capsule: Capsule, worker: Worker
) -> None:
    """As when a worker is killed between the end of the run and that of the task."""
    run = capsule.runs.start(AGENT, "say done")
    assert run.execution.get(timeout=HANG_S) == "done"
    events_of(run)
    with sync_run_store(worker.app) as store:
        message = store.read(run.id, with_snapshot=False).message
    client = worker.app.backend.client
    client.delete(
        f"celery-task-meta-{run.id}",
        f"capsule:{{E:{run.id}}}:meta",
        f"capsule:{{E:{run.id}}}:events",
    )
    send(worker.app, run.id, message)
    again = AsyncResult(run.id, app=worker.app)
    assert again.get(timeout=HANG_S) == "done"
    assert attempts(events_of(run)) == ["claimed", "succeeded"]


@pytest.mark.parametrize("by", ["the handle", "the execution"])
def test_a_running_run_is_cancelled(capsule: Capsule, worker: Worker, by: str) -> None:
    key = unique()
    run = capsule.runs.start(AGENT, f"say hello | mark {key}; sleep 3600")
    worker.heard(key)
    if by == "the handle":
        run.cancel(by="ann")
    else:
        run.execution.cancel()
    assert attempts(events_of(run)) == ["claimed", "cancelled"]
    result = AsyncResult(run.id, app=worker.app)
    eventually(lambda: result.state == "REVOKED", "REVOKED")
    eventually(lambda: run.state().status == "cancelled", "a cancelled run")


def test_a_cancel_of_the_execution_reaches_a_run_that_is_about_to_be_parked(
    capsule: Capsule,
) -> None:
    """The command came too late for the attempt, which ended as parked, and waited for the next."""
    for _ in range(5):
        run = capsule.runs.start(AGENT, "ask refund|tool pay")
        for event in run.events():
            if getattr(event.message, "kind", "") == "run_parked":
                break
        run.execution.cancel()
        with pytest.raises(RunCancelled):
            run.result(timeout_s=HANG_S)
        with pytest.raises(TaskRevokedError):
            run.execution.get(timeout=HANG_S)


def test_a_parked_run_is_cancelled_and_fails_its_chord(capsule: Capsule, worker: Worker) -> None:
    members = [capsule.runs.s(AGENT, "say a"), capsule.runs.s(AGENT, "ask go; say b")]
    body = worker.app.signature("tests.acceptance.others.script_app.summed")
    result = chord(members, app=capsule.app)(body)
    run = parked(capsule.runs.get(result.parent[1].id))
    assert run.cancel(by="ann") == "cancelled"
    assert attempts(events_of(run)) == ["claimed", "parked", "claimed", "cancelled"]
    eventually(lambda: AsyncResult(run.id, app=worker.app).state == "REVOKED", "REVOKED")
    eventually(lambda: result.state == "FAILURE", "the error of the chord")
