"""Why executions ended, and which last event reports it to watchers."""

from __future__ import annotations

import signal

import pytest
from billiard.common import human_status as human_status_of_billiard
from billiard.exceptions import TimeLimitExceeded

from capsule_tasks.errors import TaskNotCarried
from capsule_tasks.executions.ends import (
    End,
    EndKind,
    LastEvent,
    call_in_part,
    end_of_traced,
    end_of_unfinished,
    failure_of,
    human_status,
    last_event,
    lost,
    outcome_of,
    state_of,
)
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.events import (
    RUN_CANCELLED,
    RUN_ELSEWHERE,
    RUN_PARKED,
    AttemptEnded,
    Ended,
    Outcome,
)
from capsule_tasks.protocol.messages import Error, ErrorKind, Failure, TaskResult

TERM, KILL, INT, SEGV = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV
ORIGIN = Origin(execution_id="id", task="app.task")


def error(kind: ErrorKind, message: str = "", **changes: int) -> Error:
    return Error(execution_id="id", kind=kind, type="SessionLost", message=message, **changes)


def failed(name: str, message: str = "", module: str = "celery.exceptions", **state: object) -> End:
    failure = Failure(module=module, name=name, message=message, state=state, traceback="trace")
    return end_of_traced(
        TaskResult(execution_id="id", failure=failure, runtime_s=0.5, stdout_bytes=7)
    )


# --- what a child did not bring to its end -----------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "status", "kind"),
    [
        (TERM, -TERM, EndKind.STOPPED),
        (TERM, -KILL, EndKind.STOPPED),
        (SEGV, -SEGV, EndKind.STOPPED),
        (TERM, None, EndKind.STOPPED),
        (INT, -SEGV, EndKind.LOST),
        (TERM, -SEGV, EndKind.LOST),
        (None, -KILL, EndKind.LOST),
        (None, None, EndKind.LOST),
    ],
)
def test_a_crash_is_no_signal_that_was_sent_before(
    signum: int | None, status: int | None, kind: EndKind
) -> None:
    end = end_of_unfinished(signum, error(ErrorKind.KILLED, stdout_bytes=3, stderr_bytes=4), status)
    assert end.kind is kind
    assert (end.stdout_bytes, end.stderr_bytes) == (3, 4)
    assert end.signum == (signum if kind is EndKind.STOPPED else 0)


def test_a_task_lost_with_a_neighbour_is_given_the_reason() -> None:
    said = "its child was killed because one did not stop (the main thread was in two (hold))"
    end = end_of_unfinished(None, error(ErrorKind.LOST_WITH_NEIGHBOUR, said), -KILL)
    assert end.message == f"Worker exited prematurely: signal 9 (SIGKILL). I{said[1:]}."


def test_a_lost_call_may_have_run_and_a_cancelled_one_says_nothing() -> None:
    end = call_in_part(end_of_unfinished(None, error(ErrorKind.KILLED), -KILL))
    why = "Worker exited prematurely: signal 9 (SIGKILL). The call may have run in part."
    assert (end.kind, end.message) == (EndKind.LOST, why)
    stopped = end_of_unfinished(TERM, error(ErrorKind.KILLED), -TERM)
    assert call_in_part(stopped) == stopped


def test_a_lost_task_in_a_live_child_has_a_reason() -> None:
    end = end_of_unfinished(None, error(ErrorKind.TIMEOUT, "too late"), None)
    assert end.message == "The task did not come to its end: SessionLost: too late."


@pytest.mark.parametrize("status", [0, 1, -TERM, -KILL, -SEGV, -77])
def test_an_exit_status_is_described_as_by_prefork(status: int) -> None:
    assert human_status(status) == human_status_of_billiard(status)


@pytest.mark.parametrize("kind", [ErrorKind.TOO_LARGE, ErrorKind.RAISED])
def test_a_task_too_large_for_a_frame_is_no_lost_child(kind: ErrorKind) -> None:
    """Another delivery would end in the same way."""
    origin = Origin(execution_id="id", task="app.task", continues_after_loss=True)
    end = end_of_unfinished(None, error(kind, "2 GiB"), None)
    assert end == End(EndKind.NOT_CARRIED, "SessionLost: 2 GiB")
    message = str(TaskNotCarried("app.task", "id", "SessionLost: 2 GiB"))
    expected = Ended(outcome=Outcome.FAILED, type="TaskNotCarried", message=message)
    assert last_event(end, origin) == expected


# --- last events -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (failed("Retry", "in 1s"), "retry"),
        (failed("Ignore", "Replaced by new task"), "replaced"),
        (failed("Reject", requeue=True), "requeued"),
        (failed("Retry", RUN_PARKED), "parked"),
        (failed("Ignore", RUN_ELSEWHERE), "requeued"),
    ],
)
def test_another_attempt_follows(end: End, how: str) -> None:
    event = last_event(end, ORIGIN)
    assert isinstance(event, AttemptEnded)
    assert event.outcome == how
    assert (state_of(event), outcome_of(event), failure_of(event)) == ("waiting", "", "")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (failed("Ignore"), Outcome.IGNORED),
        (failed("Reject"), Outcome.REJECTED),
        (failed("Retry", module="app"), Outcome.FAILED),
        (failed("ValueError", "no", module="builtins"), Outcome.FAILED),
    ],
)
def test_the_result_of_the_tracer_decides_the_outcome(end: End, outcome: Outcome) -> None:
    event = last_event(end, ORIGIN)
    assert isinstance(event, Ended)
    assert event.outcome is outcome
    assert (event.traceback, event.runtime_s, event.stdout_bytes) == ("trace", 0.5, 7)
    assert (state_of(event), outcome_of(event)) == ("ended", str(outcome))
    assert failure_of(event) == f"{event.type}: {event.message}"


STOPPED = End(EndKind.STOPPED, signum=TERM)
OVER_LIMIT = End(EndKind.OVER_LIMIT, str(TimeLimitExceeded(3.0)))
LOST = End(EndKind.LOST, "Worker exited prematurely: exitcode 1.")
TOO_OFTEN = End(EndKind.TOO_MANY_LOSSES, "five")


@pytest.mark.parametrize(
    ("end", "promise", "is_worker_stopping", "detail"),
    [
        (STOPPED, "acks_late", True, "its worker was stopped"),
        (LOST, "continues_after_loss", False, LOST.message),
        (OVER_LIMIT, "redelivers_over_limit", False, "TimeLimitExceeded(3.0,)"),
    ],
    ids=["requeued", "lost", "over limit"],
)
def test_an_attempt_that_celery_delivers_again_is_no_end(
    end: End, promise: str, is_worker_stopping: bool, detail: str
) -> None:
    origin = Origin(execution_id="id", task="app.task", **{promise: True})
    event = last_event(end, origin, is_worker_stopping=is_worker_stopping)
    assert event == AttemptEnded(outcome="requeued", detail=detail)
    assert isinstance(last_event(end, ORIGIN, is_worker_stopping=is_worker_stopping), Ended)


PROMISED = Origin(
    execution_id="id",
    task="app.task",
    acks_late=True,
    redelivers_when_lost=True,
    continues_after_loss=True,
    redelivers_over_limit=True,
)


@pytest.mark.parametrize(
    ("end", "event"),
    [
        (
            STOPPED,
            Ended(outcome=Outcome.CANCELLED, type="Terminated", message="it was cancelled"),
        ),
        (TOO_OFTEN, Ended(outcome=Outcome.FAILED, type="TooManyLosses", message="five")),
        (
            End(EndKind.DISCARDED, "revoked"),
            Ended(outcome=Outcome.CANCELLED, type="TaskRevokedError", message="revoked"),
        ),
        (End(EndKind.REQUEUED, "no broker"), AttemptEnded(outcome="requeued", detail="no broker")),
    ],
    ids=lambda one: one.kind.name if isinstance(one, End) else "",
)
def test_these_ends_are_the_same_whatever_the_message_promises(end: End, event: LastEvent) -> None:
    assert last_event(end, PROMISED) == event


def test_a_cancelled_run_is_reported_as_any_cancelled_task() -> None:
    end = failed("Ignore", RUN_CANCELLED)
    assert end == End(EndKind.STOPPED, signum=TERM, stdout_bytes=7)
    event = last_event(end, ORIGIN)
    assert isinstance(event, Ended)
    assert event.outcome is Outcome.CANCELLED
    assert failed("Ignore", RUN_CANCELLED, module="app").kind is EndKind.TRACED


def test_long_words_are_cut() -> None:
    event = last_event(failed("ValueError", "x" * 10_000, module="builtins"), ORIGIN)
    assert isinstance(event, Ended)
    assert len(event.message) == 4096
    again = last_event(failed("Retry", "x" * 10_000), ORIGIN)
    assert isinstance(again, AttemptEnded)
    assert len(again.detail) == 4096


def test_an_execution_whose_message_and_worker_are_gone_is_lost() -> None:
    event = lost("its worker was stopped")
    assert (outcome_of(event), event.type) == ("lost", "WorkerLostError")
