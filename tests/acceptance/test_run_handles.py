"""What people do with runs, on a real worker: cancels of every kind, decisions, settled calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import group
from celery.bin.base import CLIContext
from click.testing import CliRunner

from capsule_tasks import Capsule
from capsule_tasks.cli import capsule as command
from capsule_tasks.client import GroupExecution
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.errors import AlreadyDecided, RunCancelled
from capsule_tasks.protocol.messages import RunEvent
from tests.acceptance.test_runs import AGENT, APP, attempts, effects, events_of, parked
from tests.acceptance.workers import HANG_S, Worker, eventually, unique


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker"), app=APP) as worker:
        yield worker


@pytest.fixture(scope="module")
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


def is_cancelled(run: RunHandle) -> bool:
    return run.state().status == "cancelled" and run.execution.state == "REVOKED"


def test_a_cancel_of_the_execution_cancels_a_run_that_is_parked(capsule: Capsule) -> None:
    run = parked(capsule.runs.start(AGENT, "ask refund; say done"))
    run.execution.cancel()
    with pytest.raises(RunCancelled):
        run.result(timeout_s=HANG_S)
    eventually(lambda: is_cancelled(run), "a task that is revoked")
    assert attempts(events_of(run))[-1] == "cancelled"


def test_a_cancel_of_a_group_cancels_runs_that_run_and_those_that_wait(
    capsule: Capsule, worker: Worker
) -> None:
    key = unique()
    members = [
        capsule.runs.s(AGENT, f"mark {key}; sleep 3600"),
        capsule.runs.s(AGENT, "ask refund; say done"),
    ]
    result = group(members, app=worker.app).apply_async()
    runs = [capsule.runs.get(member.id) for member in result]
    worker.heard(key)
    parked(runs[1])
    GroupExecution.of(result).cancel()
    eventually(lambda: all(map(is_cancelled, runs)), "the end of both")


def test_a_run_that_no_worker_has_begun_is_cancelled(capsule: Capsule) -> None:
    run = capsule.runs.start(AGENT, "say done", countdown=3600)
    assert run.cancel(by="ann") == "cancelled"
    assert attempts(events_of(run)) == ["claimed", "cancelled"]
    eventually(lambda: is_cancelled(run), "a task that is revoked")


def test_of_ten_people_one_decides_and_the_run_goes_on_once(
    capsule: Capsule, worker: Worker
) -> None:
    run = parked(capsule.runs.start(AGENT, "ask refund; tool refund"))

    def approve(person: int) -> str:
        try:
            return run.approve("refund", by=f"person {person}")
        except AlreadyDecided:
            return "too late"

    with ThreadPoolExecutor(10) as people:
        answers = list(people.map(approve, range(10)))
    assert sorted(answers) == ["queued"] + 9 * ["too late"]
    assert run.result(timeout_s=HANG_S) == "made refund"
    assert effects(worker, run) == [b"refund"]
    assert attempts(events_of(run)) == ["claimed", "parked", "claimed", "succeeded"]


@pytest.mark.parametrize(
    ("made", "result", "made_calls"),
    [(True, "found out", [b"pay"]), (False, "made pay", [b"pay", b"pay"])],
)
def test_a_call_that_killed_its_process_is_settled(
    worker: Worker,
    tmp_path_factory: pytest.TempPathFactory,
    made: bool,
    result: str,
    made_calls: list[bytes],
) -> None:
    """A person finds out whether the call was made; the run goes on with what the person says."""
    directory, url = tmp_path_factory.mktemp("killed"), worker.environment["REDIS_URL"]
    with Worker(url, directory, app=APP, TEST_LEASE="2") as killed:
        capsule = Capsule(killed.app)
        run = capsule.runs.start(AGENT, "die pay")
        eventually(lambda: run.state().status == "interrupted", "a question about the call")
        (call,) = run.state().waiting
        assert (call.kind, call.tool) == ("settle", "bare:pay")
        output = "found out" if made else None
        assert run.settle(call.call_id, made=made, output=output, by="ann") == "queued"
        assert run.result(timeout_s=HANG_S) == result
        assert effects(killed, run) == made_calls


def test_a_run_is_tailed(capsule: Capsule, worker: Worker) -> None:
    run = capsule.runs.start(AGENT, "say hello | ask refund; say done")
    parked(run)
    context = CLIContext(worker.app, no_color=True, workdir=None)
    done = CliRunner().invoke(command, ["runs", "tail", run.id, "--no-wait"], obj=context)
    assert done.exit_code == 1
    assert "-- turn 1: running\n" in done.stderr
    assert "-- waits for refund: bare:refund {}, of script\n" in done.stderr
    run.approve("refund")
    done = CliRunner().invoke(command, ["runs", "tail", run.id], obj=context)
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("-- succeeded: 'done'\n")


def test_events_are_seen_once_by_late_watchers(capsule: Capsule) -> None:
    run = parked(capsule.runs.start(AGENT, "say a | ask go; say b"))
    run.approve("go")
    run.result(timeout_s=HANG_S)
    events = list(run.events())
    said = [
        each.message.data
        for each in events
        if isinstance(each.message, RunEvent) and each.message.kind == "said"
    ]
    assert said == ["a", "b"]
    ids = [each.id for each in events]
    middle = len(ids) // 2
    assert [each.id for each in run.events(after=ids[middle])] == ids[middle + 1 :]
