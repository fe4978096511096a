"""Results, failures, retries and canvas: the same as under prefork."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import WorkerLostError

from tests.acceptance.workers import HANG_S, Worker, eventually, unique


def test_a_value_comes_back(worker: Worker) -> None:
    assert worker.get("add", 2, 3) == 5
    assert worker.get("add", "ä", "\x00\n") == "ä\x00\n"
    assert worker.get("add", [1], [{"a": None}]) == [1, {"a": None}]


def test_a_failure_has_type_arguments_and_traceback(worker: Worker) -> None:
    result = worker.send("fail", "why")
    with pytest.raises(ValueError, match="why") as caught:
        result.get(timeout=HANG_S)
    assert caught.value.args == ("why", 7)
    assert result.state == "FAILURE"
    assert "raise ValueError(text, 7)" in result.traceback
    assert "capsule_tasks" not in result.traceback


def test_an_exception_of_the_apps_own_is_named(worker: Worker) -> None:
    with pytest.raises(Exception, match="code 3") as caught:
        worker.get("fail_own")
    assert "OwnError" in str(caught.value)


@pytest.mark.parametrize("name", ["fail", "fail_own", "fail_local"])
def test_a_failure_is_published_as_an_event(worker: Worker, name: str) -> None:
    failed: dict[str, Any] = {}
    sent: set[str] = set()
    with worker.app.connection_for_read() as source:
        handlers = {"task-failed": lambda event: failed.update({event["uuid"]: event})}
        receiver = worker.app.events.Receiver(source, handlers=handlers)
        with receiver.consumer_context() as (connection, _, _):

            def heard() -> set[str]:
                """Kombu subscribes when it first reads: earlier events are not received."""
                sent.add(worker.send(name).id)
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.5)
                return sent & set(failed)

            ids = eventually(heard)
    assert all(failed[task_id]["exception"] for task_id in ids)


def test_the_cause_of_an_exception_is_reported(worker: Worker) -> None:
    result = worker.send("fail_chained")
    with pytest.raises(RuntimeError, match="worse"):
        result.get(timeout=HANG_S)
    assert "KeyError: 'absent'" in result.traceback
    assert "direct cause" in result.traceback
    assert "a note" in result.traceback


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("fail_base", "OwnBase", "at the base"), ("fail_cancelled", "CancelledError", "by itself")],
)
def test_a_base_exception_is_a_failure_of_its_task_too(
    worker: Worker, name: str, kind: str, text: str
) -> None:
    result = worker.send(name)
    error = result.get(timeout=HANG_S, propagate=False)
    assert (result.state, type(error).__name__, str(error)) == ("FAILURE", kind, text)
    eventually(lambda: f"in {name}\n" in worker.log, "where it was raised")
    assert worker.get("add", 1, 1) == 2


def test_an_exception_that_cannot_be_pickled_arrives_as_text(worker: Worker) -> None:
    with pytest.raises(Exception, match="lock"):
        worker.get("fail_local")
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize("name", ["retry", "autoretry"])
def test_a_retry_runs_again_and_ends_well(worker: Worker, name: str) -> None:
    assert worker.get(name, 2) == 2


def test_a_retry_too_many_is_a_failure(worker: Worker) -> None:
    with pytest.raises(ValueError, match="again"):
        worker.get("retry", 9)


def test_an_ignored_task_keeps_the_state_it_set(worker: Worker) -> None:
    result = worker.send("ignore")
    worker.heard(f"ignored:{result.id}")
    worker.get("add", 1, 1)
    assert result.state == "OWN"


def test_a_rejected_message_is_delivered_again(worker: Worker) -> None:
    assert worker.get("reject", unique()) == "done"


def test_a_task_that_exits_is_lost_and_others_go_on(worker: Worker) -> None:
    with pytest.raises(WorkerLostError, match="exitcode 3"):
        worker.get("leave", 3)
    assert worker.get("add", 1, 1) == 2


def test_a_custom_state_is_seen_while_the_task_runs(worker: Worker) -> None:
    key = unique()
    result = worker.send("own_state", key)
    worker.heard(key)
    assert (result.state, result.info) == ("HALF", {"done": 1})
    worker.go(key)
    assert result.get(timeout=HANG_S) == "done"


def test_chains_groups_and_chords(worker: Worker) -> None:
    s = worker.sig
    assert chain(s("add", 1, 2), s("add", 3), s("add", 4), app=worker.app)().get(HANG_S) == 10
    several = group([s("add", n, n) for n in range(10)], app=worker.app)()
    assert several.get(timeout=HANG_S) == [2 * n for n in range(10)]
    summed = chord([s("add", n, n) for n in range(10)], s("total"), app=worker.app)()
    assert summed.get(timeout=HANG_S) == 90


def test_nested_canvas(worker: Worker) -> None:
    s = worker.sig
    inner = chord([s("add", n, 1) for n in range(4)], s("total"), app=worker.app)
    assert chain(s("add", 0, 0), inner.clone(), app=worker.app) is not None
    outer = chord(
        [inner.clone(), chain(s("add", 1, 1), s("add", 2), app=worker.app)],
        s("total"),
        app=worker.app,
    )
    assert outer().get(timeout=HANG_S) == 14


def test_a_chord_whose_header_fails_fails(worker: Worker) -> None:
    s = worker.sig
    broken = chord([s("add", 1, 1), s("fail", "header")], s("total"), app=worker.app)()
    with pytest.raises(Exception, match="header"):
        broken.get(timeout=HANG_S)


def test_links_and_errbacks_are_called(worker: Worker) -> None:
    key = unique()
    worker.send("add", 1, 1, link=worker.sig("own_state", key).set(immutable=True))
    worker.heard(key)
    worker.go(key)
    other = unique()
    worker.send("fail", "x", link_error=worker.sig("own_state", other).set(immutable=True))
    worker.heard(other)
    worker.go(other)


def test_a_task_may_replace_itself(worker: Worker) -> None:
    assert worker.get("replace", 5) == 16


def test_the_request_has_the_fields_of_its_call(worker: Worker) -> None:
    result = worker.sig("request", 1, kwargs={"b": 2}).apply_async()
    request = result.get(timeout=HANG_S)
    assert request["id"] == request["correlation_id"] == request["root_id"] == result.id
    assert (request["args"], request["kwargs"]) == ([1], {"b": 2})
    assert (request["queue"], request["hostname"]) == (worker.queue, worker.name)
    assert request["is_eager"] is False


def test_the_first_task_protocol(worker: Worker) -> None:
    worker.app.conf.task_protocol = 1
    try:
        worker.app.__dict__.pop("amqp", None)
        assert worker.get("add", 20, 2) == 22
        request = worker.send("request", 1, kwargs=None).get(timeout=HANG_S)
        assert request["args"] == [1]
    finally:
        worker.app.conf.task_protocol = 2
        worker.app.__dict__.pop("amqp", None)


def test_countdown_and_expiry(worker: Worker) -> None:
    assert worker.get("add", 1, 2, countdown=0.2) == 3
    with pytest.raises(Exception, match="expired"):
        worker.get("add", 1, 2, expires=-1)


def test_signals_are_sent_where_the_task_runs(worker: Worker) -> None:
    result = worker.send("signalled")
    pid = result.get(timeout=HANG_S)
    assert worker.heard(f"prerun:{result.id}") == str(pid)
    assert worker.heard(f"postrun:{result.id}") == "SUCCESS"


def test_processes_threads_and_loops_of_a_task_work(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("children of prefork are daemons and may not have children")
    assert worker.get("start_things") == [9, 4, 5]


def test_output_and_log_lines_of_a_task_are_in_the_workers_log(worker: Worker) -> None:
    word = unique()
    worker.get("speak", word)
    for said in ("printed", "from a process", "logged", "to stderr"):
        eventually(lambda said=said: f"{said} {word}" in worker.log, said)


def test_settings_made_in_code_reach_the_child(worker: Worker) -> None:
    assert worker.get("conf") == "by the worker"


def test_output_of_a_starting_child_is_in_the_workers_log(worker: Worker) -> None:
    pid = worker.get("signalled")
    eventually(lambda: f"process {pid} begins" in worker.log)
