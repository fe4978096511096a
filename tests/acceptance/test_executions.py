"""Executions seen from producers: watched, stopped and answered, through a real worker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from capsule_tasks.client import Execution, GroupExecution
from capsule_tasks.client.watching import watcher
from capsule_tasks.errors import InvalidId, NoOpenQuestion
from capsule_tasks.protocol.events import Accepted, AttemptClaimed, AttemptEnded, Ended, Outcome
from capsule_tasks.protocol.messages import Gap, InputClosed, InputRequest, Output, Progress
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually, unique

WATCH = """
import json, sys
from celery import Celery
from capsule_tasks.client import Execution, GroupExecution
app = Celery(broker=sys.argv[1], backend=sys.argv[1])
for event in Execution(sys.argv[2], app=app).events():
    kind = type(event.message).__name__
    print(json.dumps([event.id, kind, getattr(event.message, "data", "")]), flush=True)
"""


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def kinds(execution: Execution, after: str | None = None) -> list[str]:
    return [type(event.message).__name__ for event in execution.events(after)]


def end_of(execution: Execution) -> Ended:
    *_, last = execution.events()
    assert isinstance(last.message, Ended)
    return last.message


def test_output_and_progress_arrive_while_the_task_runs(worker: Worker) -> None:
    key = unique()
    execution = Execution.of(worker.send("steps", key, 3))
    events = execution.events()
    heard: list[object] = []
    for event in events:
        heard.append(event.message)
        if isinstance(event.message, Progress) and event.message.done == 3:
            assert execution.snapshot().state == "running"
            worker.go(key)
    assert isinstance(heard[0], AttemptClaimed)
    assert heard[0].task == "steps"
    text = "".join(m.data for m in heard if isinstance(m, Output))
    assert text == "step 0\nstep 1\nstep 2\n"
    assert [m.note for m in heard if isinstance(m, Progress)] == ["note 0", "note 1", "note 2"]
    last = heard[-1]
    assert isinstance(last, Ended)
    assert (last.outcome, last.result_text) == (Outcome.SUCCEEDED, "3")
    assert last.stdout_bytes == len(text)
    assert execution.get(HANG_S) == 3


def claimed(execution: Execution) -> None:
    """A task begins before it is claimed; only then does an answer know that it runs."""
    eventually(lambda: execution.snapshot().state == "running", "its claim")


def test_one_process_watches_and_another_cancels(worker: Worker, redis_url: str) -> None:
    key = unique()
    result = worker.send("busy", key)
    command = [sys.executable, "-c", WATCH, redis_url, result.id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as watcher:
        worker.heard(key)
        claimed(Execution.of(result))
        assert Execution.of(result).cancel() == "requested"
        assert Execution.of(result).cancel() in ("requested", "over")
        assert watcher.stdout is not None
        heard = [json.loads(line) for line in watcher.stdout]
        assert watcher.wait(HANG_S) == 0
    assert heard[0][1] == "AttemptClaimed"
    assert heard[-1][1] == "Ended"
    assert end_of(Execution.of(result)).outcome == Outcome.CANCELLED
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)
    assert Execution.of(result).cancel() == "over"
    assert worker.get("add", 1, 1) == 2


def test_revoke_with_terminate_ends_the_stream_as_a_cancel_does(worker: Worker) -> None:
    key = unique()
    result = worker.send("busy", key)
    worker.heard(key)
    result.revoke(terminate=True)
    assert end_of(Execution.of(result)).outcome == Outcome.CANCELLED


def test_output_of_a_short_tasks_processes_belongs_to_the_task(worker: Worker) -> None:
    """Their bytes reach the worker before the message that the task runs."""
    for _ in range(20):
        execution = Execution.of(worker.send("from_a_process"))
        events = [event.message for event in execution.events()]
        assert [type(message) for message in events[:2]] == [AttemptClaimed, Accepted]
        said = [m for m in events if isinstance(m, Output)]
        assert sorted((m.stream, m.data) for m in said) == [
            ("stderr", "err\n"),
            ("stdout", "out\n"),
        ]


def test_one_answer_of_several_leaves_the_other_questions_open(worker: Worker) -> None:
    names = ["a? ", "b? ", "c? "]
    execution = Execution.of(worker.send("ask_in_threads", *names))
    asked: list[str] = []
    closed = 0
    for event in execution.events():
        match event.message:
            case InputRequest():
                asked.append(event.message.prompt)
                if len(asked) < len(names):
                    continue  # all of them are open
            case InputClosed():
                closed += 1
            case _:
                continue
        question = execution.question()
        assert (question is None) == (closed == len(names))
        if question is not None:
            execution.respond(question.prompt.upper())
    assert execution.get(HANG_S) == ["A? ", "B? ", "C? "]


def test_a_tail_has_as_many_events_as_were_asked_for(worker: Worker) -> None:
    execution = Execution.of(worker.send("speak", "x"))
    ids = [event.id for event in execution.events()]
    assert [event.id for event in execution.tail(2)] == ids[-2:]
    assert execution.tail(0) == []
    with pytest.raises(ValueError, match="limit = -1"):
        execution.tail(-1)


def test_an_execution_has_an_id(worker: Worker) -> None:
    with pytest.raises(InvalidId, match="must not be empty"):
        Execution("", app=worker.app)
    with pytest.raises(TypeError, match="execution_id"):
        Execution(None, app=worker.app)  # type: ignore[arg-type]


def test_a_question_is_answered(worker: Worker) -> None:
    execution = Execution.of(worker.send("ask", "name? "))
    for event in execution.events():
        if isinstance(event.message, InputRequest):
            assert event.message.prompt == "name? "
            execution.respond("Ada")
    assert execution.get(HANG_S) == "heard Ada"


def test_a_question_that_cannot_be_published_ends_its_input(
    worker: Worker, redis_url: str, tmp_path: Path
) -> None:
    def failed_by_its_input(result: AsyncResult[Any]) -> bool:
        meta = worker.app.backend.get_task_meta(result.id, cache=False)
        return isinstance(meta["result"], EOFError)

    over = worker.send("fail", "x")
    assert end_of(Execution.of(over)).outcome == Outcome.FAILED
    again = worker.send("ask", "name? ", task_id=over.id)  # its stream is closed
    eventually(lambda: failed_by_its_input(again))
    unstreamed = json.dumps({"capsule_streams": False})
    with Worker(redis_url, tmp_path, TEST_CONF=unstreamed) as silent:
        unanswered = silent.send("ask", "name? ")
        eventually(lambda: failed_by_its_input(unanswered))


def test_an_interrupt_is_for_the_task_to_answer(worker: Worker) -> None:
    key = unique()
    execution = Execution.of(worker.send("interruptible", key))
    worker.heard(key)
    claimed(execution)
    assert execution.interrupt() == "requested"
    assert execution.get(HANG_S) == "interrupted"


def test_the_stack_shows_where_the_code_is(worker: Worker) -> None:
    key = unique()
    execution = Execution.of(worker.send("steps", key, 1))
    worker.heard(key)
    assert "in steps" in execution.stack()
    worker.go(key)


def test_late_and_resuming_watchers_see_every_event_once(worker: Worker) -> None:
    key = unique()
    execution = Execution.of(worker.send("steps", key, 5))
    worker.go(key)
    whole = [(event.id, event.message) for event in execution.events()]
    ids = [event_id for event_id, _ in whole]
    assert len(set(ids)) == len(ids)
    assert [event.id for event in execution.events()] == ids
    for place in range(len(ids)):
        assert [event.id for event in execution.events(after=ids[place])] == ids[place + 1 :]


def test_a_watcher_of_a_stream_that_vanishes_still_gets_the_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task may write once more before its result is there, however long that takes here."""
    monkeypatch.setattr(watcher, "_VANISHED_S", HANG_S)
    key = unique()
    execution = Execution.of(worker.send("steps", key, 1))
    events = execution.events()
    next(events)
    claimed(execution)
    worker.app.backend.client.delete(f"capsule:{{E:{execution.id}}}:meta")
    worker.go(key)
    assert [event.message for event in events][-1].outcome == Outcome.SUCCEEDED


def test_a_watcher_of_a_flushed_stream_soon_learns_that_it_is_lost(tmp_path: Path) -> None:
    """No doorbell rings while the task is silent: the loss once went unnoticed for a minute."""
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path) as worker,
        redis.from_url(server.url) as client,
    ):
        key = unique()
        execution = Execution.of(worker.send("hold", key))
        worker.heard(key)
        claimed(execution)
        events = execution.events()
        next(events)
        client.flushall()
        began = time.monotonic()
        *_, last = events
        assert time.monotonic() - began < 30
        assert isinstance(last.message, Ended)
        assert (last.message.outcome, last.message.type) == (Outcome.LOST, "StreamExpired")


def test_a_failure_and_a_retry_are_reported_as_they_are(worker: Worker) -> None:
    failed = end_of(Execution.of(worker.send("fail", "why")))
    assert (failed.outcome, failed.type) == (Outcome.FAILED, "ValueError")
    assert "why" in failed.message
    heard = [event.message for event in Execution.of(worker.send("retry", 2)).events()]
    hows = [message.outcome for message in heard if isinstance(message, AttemptEnded)]
    assert hows == ["retry", "retry"]
    assert sum(isinstance(message, AttemptClaimed) for message in heard) == 3
    assert sum(isinstance(message, Ended) for message in heard) == 1


def test_a_task_that_replaced_itself_goes_on_in_its_stream(worker: Worker) -> None:
    """The successor may run before the last output of the replaced attempt is stored."""
    executions = [Execution.of(worker.send("replace_by", word)) for word in "abcdefghij" * 5]
    for word, execution in zip("abcdefghij" * 5, executions, strict=True):
        said = [event.message for event in execution.events()]
        text = "".join(m.data for m in said if isinstance(m, Output))
        assert text == f"before\n{word}\n"
        assert [m.outcome for m in said if isinstance(m, AttemptEnded)] == ["replaced"]
        assert sum(isinstance(m, Ended) for m in said) == 1


def test_a_message_that_was_sent_twice_has_one_end(worker: Worker) -> None:
    keys, task_id = [unique(), unique()], unique()
    for key in keys:
        worker.send("hold", key, task_id=task_id)
        worker.heard(key)
    for key in keys:
        worker.go(key)
    heard = kinds(Execution(task_id, app=worker.app))
    assert heard.count("Ended") == 1
    assert heard[-1] == "Ended"


def test_a_lost_child_ends_its_execution_after_its_output(worker: Worker) -> None:
    end = end_of(Execution.of(worker.send("die", "kill")))
    assert (end.outcome, end.type) == (Outcome.FAILED, "WorkerLostError")


def test_output_right_before_a_crash_arrives(worker: Worker) -> None:
    for _ in range(5):
        assert "".join(Execution.of(worker.send("print_and_crash")).output()) == "last words\n"


@pytest.mark.parametrize("how", ["interpreter", "process"])
def test_a_task_that_cannot_report_its_start_is_cancelled(worker: Worker, how: str) -> None:
    for number in range(4):
        worker.get("add", number, 1)
    execution = Execution.of(worker.send("grip", how))
    claimed(execution)
    assert execution.cancel(grace_s=0.2) == "requested"
    assert end_of(execution).outcome == Outcome.CANCELLED
    with pytest.raises(TaskRevokedError):
        execution.get(timeout=HANG_S)
    stats = worker.ask("stats")["pool"]["capsule"]
    assert stats["jobs"] == 0, stats


def test_answers_in_a_row_go_to_one_question_each(worker: Worker) -> None:
    names = ["a? ", "b? ", "c? "]
    execution = Execution.of(worker.send("ask_in_threads", *names))

    def all_are_asked() -> bool:
        asked = [event for event in execution.tail() if isinstance(event.message, InputRequest)]
        return len(asked) == len(names)

    eventually(all_are_asked, "all questions")
    for answer in "123":
        execution.respond(answer)
    assert sorted(execution.get(timeout=HANG_S)) == ["1", "2", "3"]
    with pytest.raises(NoOpenQuestion):
        execution.respond("4")


@pytest.mark.parametrize("after", ["9" * 30 + "-1", "1-" + "9" * 30, "\u0661-1", "1-1-1", "-1"])
def test_an_event_has_an_id_that_redis_can_count(worker: Worker, after: str) -> None:
    with pytest.raises(ValueError, match="must be the id of an event"):
        next(Execution(unique(), app=worker.app).events(after))


def test_a_cancel_before_the_start_is_seen_at_the_start(
    redis_url: str, tmp_path: Path, worker: Worker
) -> None:
    """No worker receives the cancel, so only its copy in Redis can stop the task."""
    key = unique()
    late = Worker(redis_url, tmp_path)
    execution = Execution.of(late.send("hold", key))
    assert execution.cancel() == "pending"
    with late:
        assert end_of(execution).outcome == Outcome.CANCELLED
        assert late.app.backend.client.llen(f"mark:{key}") == 0
        with pytest.raises(TaskRevokedError):
            execution.get(timeout=HANG_S)


def test_a_watcher_may_come_before_the_task(redis_url: str, tmp_path: Path) -> None:
    late = Worker(redis_url, tmp_path)
    execution = Execution.of(late.send("add", 1, 2))
    heard: list[str] = []
    watching = threading.Thread(target=lambda: heard.extend(kinds(execution)))
    watching.start()
    with late:
        watching.join(HANG_S)
    assert heard[0] == "AttemptClaimed"
    assert heard[-1] == "Ended"


def test_a_silent_execution_is_answered_by_the_result_backend_later(worker: Worker) -> None:
    execution = Execution.of(worker.send("add", 2, 3))
    assert execution.get(HANG_S) == 5
    client = worker.app.backend.client
    eventually(lambda: 0 < client.pttl(f"capsule:{{E:{execution.id}}}:meta") <= 30_000)
    client.delete(f"capsule:{{E:{execution.id}}}:meta")
    (only,) = execution.events()
    assert isinstance(only.message, Ended)
    assert (only.message.outcome, only.message.result_text) == (Outcome.SUCCEEDED, "5")
    assert execution.snapshot().outcome == "succeeded"


def test_an_end_whose_stream_is_gone_is_in_the_index(worker: Worker) -> None:
    """Its stream has expired, and its result was ignored, but it has ended."""
    execution = Execution.of(worker.send("add", 2, 3, ignore_result=True))
    assert end_of(execution).outcome == Outcome.SUCCEEDED
    client = worker.app.backend.client
    entries = "capsule:{recent}:entries"
    eventually(lambda: b'"succeeded"' in (client.hget(entries, execution.id) or b""))
    client.delete(f"capsule:{{E:{execution.id}}}:meta")
    assert execution.snapshot().outcome == "succeeded"
    assert execution.cancel() == "over"
    (only,) = execution.events()
    assert isinstance(only.message, Ended)
    assert only.message.outcome == Outcome.SUCCEEDED


async def test_many_are_watched_at_once_on_one_loop(worker: Worker) -> None:
    async def last(execution: Execution) -> Any:
        return [event.message async for event in execution.aevents()][-1]

    executions = [Execution.of(worker.send("add", n, 1)) for n in range(100)]
    ends = await asyncio.gather(*map(last, executions))
    assert [end.result_text for end in ends] == [str(n + 1) for n in range(100)]
    assert await executions[7].aget(HANG_S) == 8


def test_a_flood_leaves_a_gap_and_keeps_its_tail(worker: Worker) -> None:
    execution = Execution.of(worker.send("flood", 20_000_000))
    assert end_of(execution).outcome == Outcome.SUCCEEDED
    messages = [event.message for event in execution.events()]
    assert type(messages[0]).__name__ == "Gap"
    kept = sum(len(m.data) for m in messages if isinstance(m, Output))
    assert 1000 < kept <= 64 * 1024
    assert isinstance(messages[-1], Ended)
    record = worker.app.backend.client.memory_usage(f"capsule:{{E:{execution.id}}}:events")
    assert record < 2 * 64 * 1024


def test_a_group_tells_its_progress_and_its_failures(worker: Worker) -> None:
    members = [worker.sig("add", n, 1) for n in range(20)] + [worker.sig("fail", "why")]
    running = GroupExecution.of(group(members, app=worker.app).apply_async())
    states = list(running.watch())
    assert states[-1].is_over
    assert states[-1].counts == {"succeeded": 20, "failed": 1}
    assert [state.done for state in states] == sorted(state.done for state in states)
    (failure,) = [failure for state in states for failure in state.failures]
    assert failure.execution_id == running.member(20).id
    assert "ValueError" in failure.reason
    assert running.snapshot().failed == 1
    assert end_of(running.member(3)).result_text == "4"
    assert running.cancel() == {"requested": 0, "pending": 0, "over": 21}


def test_a_group_is_cancelled_at_once(worker: Worker) -> None:
    """Waiting members as well as running ones, all at once."""
    members = [worker.sig("busy", unique()) for _ in range(60)]
    running = GroupExecution.of(group(members, app=worker.app).apply_async())
    assert sum(running.cancel().values()) == 60
    assert list(running.watch())[-1].counts == {"cancelled": 60}


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_task_that_celery_discards_ends_in_its_stream(worker: Worker, how: str) -> None:
    options: dict[str, float] = {"expires": -1} if how == "expired" else {"countdown": 1}
    execution = Execution.of(worker.send("add", 1, 1, **options))
    if how == "revoked":
        execution.revoke()
    event = list(execution.events())[-1]
    assert isinstance(event.message, Ended)
    assert event.message.outcome == Outcome.CANCELLED
    eventually(lambda: execution.snapshot().task == "add", "its end in the stream")
    stored = list(execution.events())[-1].message
    assert isinstance(stored, Ended)
    assert stored.message == how


def test_a_group_without_its_members_is_not_cancelled_in_silence(worker: Worker) -> None:
    with pytest.raises(LookupError, match="without its members"):
        GroupExecution(unique(), 3, worker.app).cancel()


def test_a_task_on_another_pool_ends_by_its_result_and_is_cancelled_by_revoke(
    redis_url: str, tmp_path: Path
) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool="prefork") as other:
        (only,) = Execution.of(other.send("add", 1, 2)).events()
        assert isinstance(only.message, Ended)
        assert (only.message.outcome, only.message.result_text) == (Outcome.SUCCEEDED, "3")
        execution = Execution.of(other.send("busy", key))
        other.heard(key)
        assert execution.cancel() == "pending"
        assert end_of(execution).outcome == Outcome.CANCELLED


def test_a_flood_past_sys_stdout_is_read_at_the_rate_and_holds_up_no_other(
    worker: Worker,
) -> None:
    size = 50_000_000
    begun_at = time.monotonic()
    flooding = Execution.of(worker.send("flood_from_a_process", size))
    claimed(flooding)
    others = 0
    while flooding.snapshot().state == "running":
        other = Execution.of(worker.send("speak", "here"))
        # On a busy machine the flood may fill the buffer: then a Gap stands for the output.
        messages = [event.message for event in other.events()]
        assert any(isinstance(message, (Output, Gap)) for message in messages)
        others += any(isinstance(message, Output) for message in messages)
    assert end_of(flooding).stdout_bytes == size
    assert time.monotonic() - begun_at > 1.0, "20 MiB a second, and a tenth of that at once"
    assert others > 3


def test_a_task_whose_id_no_stream_can_have_runs_and_gives_its_slot_back(
    redis_url: str, tmp_path: Path
) -> None:
    with Worker(redis_url, tmp_path, concurrency=1) as worker:
        assert worker.get("add", 1, 1, task_id="i" * 600) == 2
        assert worker.get("add", 1, 2) == 3
        assert worker.stop() == 0
