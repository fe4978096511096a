"""Code that producers send, in the fresh sessions of a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import chain, chord
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule, Execution
from capsule_tasks.client import Event
from capsule_tasks.errors import CodeFailed, CodeNotRun, TooManyLosses
from capsule_tasks.protocol.events import AttemptEnded, Ended, Outcome
from capsule_tasks.protocol.messages import InputRequest
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running

HOLD = "import time\nprint('holds', flush=True)\ntime.sleep(1000)"


def code_worker(url: str, directory: Path, queue: str | None = None, **conf: Any) -> Worker:
    app = "tests.acceptance.others.code_app"
    return Worker(url, directory, app=app, queue=queue, TEST_CONF=json.dumps(conf))


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with code_worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


def value_of(execution: Execution) -> Any:
    return execution.get(timeout=HANG_S)


def failure_of(execution: Execution) -> CodeFailed:
    with pytest.raises(CodeFailed) as failed:
        value_of(execution)
    return failed.value


def holding(capsule: Capsule, source: str = HOLD, **options: Any) -> Execution:
    """An execution whose code has printed and goes on."""
    execution = capsule.execute(source, **options)
    next(execution.output())
    return execution


def end_of(execution: Execution) -> Ended:
    last = [event.message for event in execution.events()][-1]
    assert isinstance(last, Ended)
    return last


# --- values, errors, output --------------------------------------------------------------------


def test_code_has_a_session_of_its_own_and_leaves_nothing_to_the_next(capsule: Capsule) -> None:
    source = "import os\nn = globals().get('n', 0) + 1\nn, os.getpid(), os.getcwd(), os.listdir()"
    found = [value_of(capsule.execute(source)) for _ in range(3)]
    assert [(n, files) for n, _, _, files in found] == [(1, [])] * 3
    assert len({pid for _, pid, _, _ in found}) == 3
    assert len({place for _, _, place, _ in found}) == 3


def test_its_events_are_those_of_any_execution(capsule: Capsule, worker: Worker) -> None:
    execution = capsule.execute("print('hello')\n6 * 7")
    assert value_of(execution) == 42
    events: list[Event] = list(execution.events())
    kinds = [type(event.message).__name__ for event in events]
    assert kinds[:2] == ["AttemptClaimed", "Accepted"]
    ended = events[-1].message
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.result_text, ended.stdout_bytes) == (Outcome.SUCCEEDED, "42", 6)
    assert ended.runtime_s is not None
    assert "".join(execution.output()) == "hello\n"
    assert execution.snapshot().task == "capsule.execute"
    assert "hello" not in worker.log, "what code prints is for whoever sent it"


def test_what_code_raises_is_raised_by_get_with_its_traceback(capsule: Capsule) -> None:
    error = failure_of(capsule.execute("def divide(): 1 / 0\ndivide()"))
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert str(error) == "ZeroDivisionError: division by zero"
    assert 'File "<cell 1>", line 1, in divide' in error.traceback
    assert error.traceback in error.__notes__
    assert "capsule_tasks" not in error.traceback


def test_a_source_that_does_not_compile_fails_like_one_that_raises(capsule: Capsule) -> None:
    assert failure_of(capsule.execute("1 +")).type == "SyntaxError"


def test_the_last_event_of_code_that_raised_has_its_traceback(capsule: Capsule) -> None:
    ended = end_of(capsule.execute("{}['key']"))
    assert (ended.outcome, ended.type, ended.message) == ("failed", "CodeFailed", "KeyError: 'key'")
    assert ended.traceback.startswith('Traceback (most recent call last):\n  File "<cell 1>"')


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("{'a': [1, 2.5, None, True, 'ß']}", {"a": [1, 2.5, None, True, "ß"]}),
        ("object", "<class 'object'>"),
        ("{1}", "{1}"),
        ("'print'", "print"),
        ("x = 1", None),
        ("10 ** 5000", "<int whose repr raised ValueError>"),
        ("'\\ud800'", "\ud800"),
        ("x = []; x.append(x); x", "[[...]]"),
    ],
)
def test_a_value_that_the_result_serializer_cannot_write_comes_as_its_repr(
    capsule: Capsule, source: str, value: object
) -> None:
    assert value_of(capsule.execute(source)) == value


async def test_code_is_sent_and_awaited_without_a_thread(capsule: Capsule) -> None:
    execution = await capsule.aexecute("'there and back'")
    assert await execution.aget(HANG_S) == "there and back"


async def test_code_that_was_sent_without_a_thread_leaves_no_subscription(
    capsule: Capsule, worker: Worker
) -> None:
    """An execution that is collected after the thread of its backend would connect once more."""
    execution = await capsule.aexecute("6 * 7")
    client = worker.app.backend.client
    channel = worker.app.backend.get_key_for_task(execution.id)
    eventually(lambda: client.pubsub_numsub(channel) == [(channel, 0)], "the end of it")
    assert value_of(execution) == 42


# --- profiles ----------------------------------------------------------------------------------


def test_a_profile_has_limits_and_a_warmup_of_its_own(capsule: Capsule) -> None:
    assert value_of(capsule.execute("import os\nwarmed == os.getpid()", profile="tight"))
    error = failure_of(capsule.execute("while True: pass", profile="tight"))
    assert "CPU time limit of 0.5 s" in error.message
    assert error.kind == "limit"
    assert failure_of(capsule.execute("bytes(10**9)", profile="tight")).type == "MemoryError"


def test_a_trusted_profile_has_the_environment_of_the_worker(capsule: Capsule) -> None:
    source = "import os\n'REDIS_URL' in os.environ"
    assert value_of(capsule.execute(source, profile="trusted")) is True
    assert value_of(capsule.execute(source)) is False


def test_a_profile_that_the_worker_does_not_have_is_named_with_those_it_has(
    capsule: Capsule,
) -> None:
    with pytest.raises(CodeNotRun, match=r"no profile 'gpu' .* 'sandbox', 'tight', 'trusted'"):
        value_of(capsule.execute("1", profile="gpu"))


def test_a_profile_whose_sessions_do_not_start_fails_code_and_says_why(capsule: Capsule) -> None:
    with pytest.raises(CodeNotRun, match="profile 'broken' starts: the warmup failed: ZeroDiv"):
        value_of(capsule.execute("1", profile="broken"))


@pytest.mark.parametrize("arguments", [[1], [], ["1", 2], [["1"]]])
def test_a_message_with_other_arguments_fails_as_a_task_would(
    worker: Worker, arguments: list[Any]
) -> None:
    with pytest.raises(TypeError):
        worker.get("capsule.execute", *arguments)


# --- stopping ----------------------------------------------------------------------------------


def test_code_is_stopped_after_its_time(capsule: Capsule) -> None:
    error = failure_of(capsule.execute("while True: pass", timeout_s=0.3))
    assert error.type == "ExecutionTimeout"
    assert "0.3 s" in error.message
    assert error.kind == "timeout"


def test_a_cancel_stops_code_in_order(capsule: Capsule) -> None:
    source = f"try:\n    {HOLD.replace(chr(10), chr(10) + '    ')}\nfinally: print('tidied')"
    execution = holding(capsule, source)
    assert execution.cancel() == "requested"
    assert end_of(execution).outcome == "cancelled"
    assert "tidied" in "".join(execution.output())
    with pytest.raises(TaskRevokedError):
        value_of(execution)


def test_code_that_waits_for_a_slot_is_cancelled_without_a_run(capsule: Capsule) -> None:
    holders = [holding(capsule) for _ in range(2)]
    waiting = capsule.execute("print('ran')")
    assert waiting.cancel() == "pending"
    for holder in holders:
        holder.cancel()
    assert end_of(waiting).outcome == "cancelled"
    assert not list(waiting.output())


def test_an_interrupt_and_a_stack_reach_the_code(capsule: Capsule) -> None:
    execution = holding(capsule)
    assert 'File "<cell 1>", line 3' in execution.stack()
    assert execution.interrupt() == "requested"
    assert failure_of(execution).type == "KeyboardInterrupt"


def test_code_asks_and_is_answered(capsule: Capsule) -> None:
    execution = capsule.execute("input('name? ').upper()")
    events = execution.events()
    question = next(e.message for e in events if isinstance(e.message, InputRequest))
    assert question.prompt == "name? "
    execution.respond("ada")
    assert value_of(execution) == "ADA"


def test_a_revoke_terminates_code(capsule: Capsule, worker: Worker) -> None:
    execution = holding(capsule)
    worker.listen()
    execution.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        value_of(execution)


def test_the_time_limits_of_celery_hold_for_code(capsule: Capsule) -> None:
    hard = capsule.execute(HOLD, time_limit=0.3)
    soft = capsule.execute(HOLD, soft_time_limit=0.3)
    with pytest.raises(TimeLimitExceeded):
        value_of(hard)
    assert failure_of(soft).type == "TimeoutError"


def test_code_that_kills_its_session_is_lost_and_the_next_runs(capsule: Capsule) -> None:
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        value_of(capsule.execute("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
    assert value_of(capsule.execute("1 + 1")) == 2


# --- canvas ------------------------------------------------------------------------------------


def test_code_takes_part_in_a_chord(capsule: Capsule, worker: Worker) -> None:
    codes = [capsule.execute.s(f"{n} * {n}") for n in range(6)]
    assert chord(codes, worker.sig("total")).delay().get(timeout=HANG_S) == 55


def test_code_that_fails_fails_its_chord(capsule: Capsule, worker: Worker) -> None:
    codes = [capsule.execute.s("1"), capsule.execute.s("1 / 0")]
    body = chord(codes, worker.sig("total")).delay()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        body.get(timeout=HANG_S)


def test_a_chain_hands_a_source_on(capsule: Capsule) -> None:
    steps = chain(capsule.execute.s("'6 * 7'"), capsule.execute.s(), capsule.execute.si("'end'"))
    last = steps.delay()
    assert last.get(timeout=HANG_S) == "end"
    assert last.parent.get(timeout=HANG_S) == 42


def test_what_is_linked_is_called(capsule: Capsule, worker: Worker) -> None:
    execution = capsule.execute("1 / 0", link_error=worker.sig("explain"))
    failure_of(execution)
    assert worker.heard(execution.id) == "CodeFailed: ZeroDivisionError: division by zero"
    after = capsule.execute.si("'after'").set(task_id=f"{execution.id}-after", queue=worker.queue)
    capsule.execute("0", link=after)
    assert value_of(Execution(f"{execution.id}-after", app=worker.app)) == "after"


def test_an_ignored_result_is_not_stored(capsule: Capsule, worker: Worker) -> None:
    execution = capsule.execute("42", ignore_result=True)
    assert end_of(execution).result_text == "42"
    assert worker.app.backend.client.get(f"celery-task-meta-{execution.id}") is None


# --- workers -----------------------------------------------------------------------------------


def test_a_warm_session_waits_for_the_next_code_and_shows_in_the_statistics(
    capsule: Capsule, worker: Worker
) -> None:
    value_of(capsule.execute("1"))

    def warm() -> list[Any]:
        sessions = worker.ask("stats")["pool"]["sessions"]
        return [one for one in sessions if one["kind"] == "code:sandbox" and not one["retiring"]]

    (session,) = eventually(lambda: len(warm()) == 1 and warm(), "one warm session")
    assert session["tasks"] == 0
    assert value_of(capsule.execute("import os\nos.getpid()")) == session["pid"]


def test_a_warm_shutdown_waits_for_code_and_leaves_no_process(
    redis_url: str, tmp_path: Path
) -> None:
    with code_worker(redis_url, tmp_path) as worker:
        execution = holding(
            Capsule(worker.app),
            "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1)\n'whole'",
        )
        pid = int(next(execution.output()))
        assert worker.stop() == 0
        assert value_of(execution) == "whole"
        assert not is_running(pid)


def test_a_cold_shutdown_ends_code_and_its_message_goes_to_the_next_worker(
    redis_url: str, tmp_path: Path
) -> None:
    with code_worker(redis_url, tmp_path, task_acks_late=True, capsule_child_stop_s=0.3) as worker:
        execution = Capsule(worker.app).execute("import os\nprint(os.getpid())\ninput()")
        pid = int(next(execution.output()))
        assert worker.stop(signal.SIGQUIT) == 0
        assert not is_running(pid)
        worker.start()
        eventually(execution.question, "the question of the next run")
        execution.respond("again")
        assert value_of(execution) == "again"


def test_code_that_costs_a_process_each_time_is_not_delivered_for_ever(
    redis_url: str, tmp_path: Path
) -> None:
    late = {"task_acks_late": True, "task_reject_on_worker_lost": True, "capsule_loss_limit": 2}
    with code_worker(redis_url, tmp_path, **late) as worker:
        execution = Capsule(worker.app).execute("import os\nprint('dies')\nos._exit(3)")
        with pytest.raises(TooManyLosses, match="2 child processes died"):
            value_of(execution)
        assert "".join(execution.output()) == "dies\n" * 2


def test_a_pool_cannot_shrink_below_the_code_that_runs(capsule: Capsule, worker: Worker) -> None:
    holders = [holding(capsule) for _ in range(2)]
    assert "All processes busy" in str(worker.tell("pool_shrink", 1))
    for holder in holders:
        holder.cancel()
        end_of(holder)


def test_code_of_a_dead_worker_runs_again_on_another(redis_url: str, tmp_path: Path) -> None:
    late = {"task_acks_late": True, "capsule_lease_s": 0.5}
    with code_worker(redis_url, tmp_path, **late) as first:
        execution = Capsule(first.app).execute("input('go on? ')")
        messages = (event.message for event in execution.events())
        next(message for message in messages if isinstance(message, InputRequest))
        with code_worker(redis_url, tmp_path, queue=first.queue, **late):
            os.kill(first.pid, signal.SIGKILL)
            lost = next(message for message in messages if isinstance(message, AttemptEnded))
            assert lost.outcome == "lost"
            next(message for message in messages if isinstance(message, InputRequest))
            execution.respond("yes")
            assert value_of(execution) == "yes"


def test_code_runs_where_streams_are_off(redis_url: str, tmp_path: Path) -> None:
    with code_worker(redis_url, tmp_path, capsule_streams=False) as worker:
        capsule = Capsule(worker.app)
        assert value_of(capsule.execute("print('unseen')\n6 * 7")) == 42
        assert failure_of(capsule.execute("1 / 0")).type == "ZeroDivisionError"
        waiting = capsule.execute("input()")
        assert failure_of(waiting).type == "EOFError"


async def test_many_at_once_are_all_run(capsule: Capsule) -> None:
    sent = [await capsule.aexecute(f"{n} + 1") for n in range(20)]
    assert await asyncio.gather(*(one.aget(HANG_S) for one in sent)) == list(range(1, 21))
