"""What a job is told to have ended of, whose child did not bring it to its end."""

from __future__ import annotations

import signal

import pytest
from billiard.exceptions import Terminated, WorkerLostError

from capsule_tasks.protocol.messages import Error, ErrorKind
from capsule_tasks.taskpool.jobs import Job, is_killed_at_limit, why_lost

TERM, KILL, INT, SEGV = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV


def job_of(signum: int | None, *, is_over_limit: bool = False) -> Job:
    job = Job.never_called("task", "id")
    job.signum, job.is_over_limit = signum, is_over_limit
    return job


def lost(kind: ErrorKind, message: str = "") -> Error:
    return Error(execution_id="id", kind=kind, type="SessionLost", message=message)


@pytest.mark.parametrize(
    ("signum", "status", "kind"),
    [
        (TERM, -TERM, Terminated),
        (TERM, -KILL, Terminated),
        (SEGV, -SEGV, Terminated),
        (TERM, None, Terminated),
        (INT, -SEGV, WorkerLostError),
        (TERM, -SEGV, WorkerLostError),
        (None, -KILL, WorkerLostError),
    ],
)
def test_a_crash_is_no_signal_that_was_sent_before(
    signum: int | None, status: int | None, kind: type[Exception]
) -> None:
    assert type(why_lost(job_of(signum), lost(ErrorKind.KILLED), status)) is kind


@pytest.mark.parametrize(
    ("signum", "status", "is_limit"),
    [(None, -KILL, True), (TERM, -KILL, True), (TERM, -TERM, False), (KILL, -KILL, False)],
)
def test_a_signal_that_was_refused_until_the_hard_limit_is_not_what_ended_it(
    signum: int | None, status: int, is_limit: bool
) -> None:
    assert is_killed_at_limit(job_of(signum, is_over_limit=True), status) is is_limit
    assert not is_killed_at_limit(job_of(signum), status)


def test_who_is_lost_with_a_neighbour_is_told_why() -> None:
    said = "its child was killed because one did not stop (the main thread was in two (hold))"
    error = why_lost(job_of(None), lost(ErrorKind.LOST_WITH_NEIGHBOUR, said), -KILL)
    assert str(error).endswith(f" I{said[1:]}.")
