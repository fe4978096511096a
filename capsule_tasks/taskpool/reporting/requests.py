"""Requests whose end is reported only when it is known how the task ended.

Celery's own request announces a terminated task as REVOKED as soon as it sends the signal, and the
task may still end in another way. Here the pool reports how the task ended, and before the worker
stores an end of its own, it reads which end the child has stored. So the last event and the stored
state agree with what happened.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.backends.rpc import RPCBackend
from celery.platforms import signals
from celery.utils.imports import symbol_by_name
from celery.utils.saferepr import saferepr
from celery.worker import state
from celery.worker.request import Request
from celery.worker.state import task_ready

from capsule_tasks.client.task import mixed
from capsule_tasks.errors import reason_of
from capsule_tasks.taskpool.reporting.exception_info import info_of
from capsule_tasks.taskpool.stock_redis.batched_acks import leave_for_redelivery

log = logging.getLogger("capsule_tasks.taskpool")

_MAX_ATTEMPTS = 3
"""Attempts to read a stored state. The hub thread waits for it, as when it stores a state."""
_ENDS_OF_THE_POOL = (Terminated, TimeLimitExceeded, WorkerLostError)
_CLOCK_SLACK_S = 1.0
_NOT_READ = (DisabledBackend, RPCBackend)
"""Backends that store nothing, or where only the caller can read it."""


class PoolRequest:
    """Mixed in before the request class of a task, Celery's or the application's own."""

    _is_reported = False
    """The end was in the result backend already, and was reported as stored."""
    defers_ack = False
    """The message is acknowledged once its stream is claimed, and not before."""

    def acknowledge(self: Any) -> None:
        if not self.defers_ack:
            super().acknowledge()  # type: ignore[misc]

    def on_claimed(self: Any) -> None:
        """Acknowledge: from now on a reaper finds the task should the worker die."""
        self.defers_ack = False
        self.acknowledge()

    def terminate(self: Any, pool: Any, signal: Any = None) -> None:
        """Have the task stopped; how it ended is reported at its end."""
        if not self._stop(pool, signal, "a remote control command (revoke)"):
            self._terminate_on_ack = pool, signal

    def cancel(self: Any, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """The same, for a worker that stops: the message is requeued."""
        self._stop(pool, signal, "the worker, which is stopping", is_worker_stopping=True)
        if self.time_start:
            self._announce_cancelled(emit_retry=emit_retry)

    def _stop(
        self: Any, pool: Any, signal: Any, requested_by: str, *, is_worker_stopping: bool = False
    ) -> bool:
        """Ask the pool to stop the task: by its reporter if there is one, else by its pid."""
        signum = signals.signum(signal or TERM_SIGNAME)
        task = self._apply_result() if self._apply_result is not None else None
        if task is not None:
            task.terminate(
                signum,
                requested_by,
                is_worker_stopping=is_worker_stopping and bool(self.time_start),
            )
        elif self.time_start:
            pool.terminate_job(self.worker_pid, signum)
        return task is not None or bool(self.time_start)

    def on_failure(
        self: Any, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """With `return_ok` the failure is the task's own, which the child has stored."""
        with self._left_if_unreported():
            error = exc_info.exception
            error = error.exc if isinstance(error, ExceptionWithTraceback) else error
            if isinstance(error, _ENDS_OF_THE_POOL) and not return_ok:
                stored = self._stored_end()
                if stored is not None and not self._runs_again(error, stored):
                    return self._report_as_stored(stored, error)
                if isinstance(error, TimeLimitExceeded) and self._is_reported_by_timeout():
                    return None
            return super().on_failure(  # type: ignore[misc]
                exc_info, send_failed_event=send_failed_event, return_ok=return_ok
            )

    def _runs_again(self: Any, error: Exception, stored: dict[str, Any]) -> bool:
        """Whether a failure is left to the next delivery, as Celery has it.

        The child may have died before it updated the chord or the chain, and before errbacks.
        """
        return (
            isinstance(error, WorkerLostError)
            and stored["status"] == states.FAILURE
            and self.task.acks_late
            and self.task.reject_on_worker_lost
        )

    def _worker_lost_info(self: Any, exc: BaseException) -> Any:
        """Celery's info, without the traceback inside Celery."""
        lost = super()._worker_lost_info(exc).exception  # type: ignore[misc]
        return info_of(lost.exc if isinstance(lost, ExceptionWithTraceback) else lost)

    def on_timeout(self: Any, soft: bool, timeout: float) -> None:
        """Report a hard limit, unless `on_failure` has reported the stored end."""
        if soft or not self._is_reported:
            with self._left_if_unreported():
                super().on_timeout(soft, timeout)  # type: ignore[misc]

    @contextlib.contextmanager
    def _left_if_unreported(self: Any) -> Iterator[None]:
        """Abandon a message to redelivery if its end cannot be reported."""
        try:
            yield
        except MemoryError:
            raise
        except Exception:
            is_redelivered = not self.acknowledged and leave_for_redelivery(self.message)
            later = " now; its message is redelivered" if is_redelivered else ""
            log.exception("the end of %s[%s] could not be reported%s", self.name, self.id, later)

    def _is_reported_by_timeout(self: Any) -> bool:
        """Whether `on_timeout` comes next and does all, so that errbacks are called only once.

        Not in a worker that is stopping, where `on_timeout` stores nothing. A request class of the
        application's own gets both calls, as under prefork.
        """
        following = super().on_failure.__func__  # type: ignore[misc]
        return following is Request.on_failure and not state.should_terminate

    def _announce_revoked(
        self: Any, reason: str, terminated: bool, signum: Any, expired: bool
    ) -> None:
        stored = self._stored_end()
        if stored is None:
            signum = _signal_of(signum)
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        else:
            self._already_revoked = True
            self._report_as_stored(stored, reason)

    def _stored_end(self: Any) -> dict[str, Any] | None:
        """The SUCCESS or FAILURE that the task has stored, if the result backend can be read."""
        backend = self.task.backend
        if self.ignore_result or isinstance(backend, _NOT_READ):
            return None
        try:
            meta: dict[str, Any] = backend._ensure_retryable(  # noqa: SLF001 - as Celery's own does
                backend._get_task_meta_for,  # noqa: SLF001 - the cached one may be old
                fallback_exc=LookupError,
                fallback_msg="no meta",
                task_id=self.id,
                max_retries=min(backend.max_retries, _MAX_ATTEMPTS),
            )
        except Exception as fault:  # noqa: BLE001 - a result backend may raise anything
            why = reason_of(fault)
            log.warning("the stored state of %s[%s] cannot be read: %s", self.name, self.id, why)
            return None
        is_over = meta["status"] == states.SUCCESS or (
            meta["status"] == states.FAILURE and not self._is_older(meta.get("date_done"))
        )
        return meta if is_over else None

    def _is_older(self: Any, date_done: Any) -> bool:
        """Whether a failure is of an earlier attempt, so that it may be replaced."""
        try:
            done = datetime.fromisoformat(date_done) if isinstance(date_done, str) else date_done
            if done.tzinfo is None:  # Celery means UTC
                done = done.replace(tzinfo=UTC)
            return bool(done.timestamp() < (self.time_start or 0) - _CLOCK_SLACK_S)
        except (AttributeError, TypeError, ValueError):
            return False

    def _report_as_stored(self: Any, stored: dict[str, Any], reason: object) -> None:
        """Report the stored end, and acknowledge or reject the message accordingly."""
        self._is_reported = True
        has_succeeded = stored["status"] == states.SUCCESS
        log.info("%s[%s] had already stored %s: %s", self.name, self.id, stored["status"], reason)
        task_ready(self, successful=has_succeeded)
        self._return_chord_part(stored)
        if self.task.acks_late and not (has_succeeded or self.task.acks_on_failure):
            self.reject(requeue=False)
        else:
            self.acknowledge()
        result = stored.get("result")
        if has_succeeded:
            text = saferepr(result, self.task.resultrepr_maxsize)
            self.send_event("task-succeeded", result=text, runtime=None)
        else:
            traceback = stored.get("traceback")
            self.send_event("task-failed", exception=saferepr(result), traceback=traceback)

    def _return_chord_part(self: Any, stored: dict[str, Any]) -> None:
        """Count the task in its chord: the child may have died after it stored the result.

        Only Redis distinguishes the parts, so that counting one twice does no harm.
        """
        backend = self.task.backend
        if self._context.chord and isinstance(backend, RedisBackend):
            try:
                backend.on_chord_part_return(self._context, stored["status"], stored.get("result"))
            except Exception as fault:  # noqa: BLE001 - a result backend may raise anything
                why = reason_of(fault)
                log.warning(
                    "chord part of %s[%s] could not be counted; the chord may not finish: %s",
                    self.name,
                    self.id,
                    why,
                )


def _signal_of(signum: Any) -> Any:
    """The signal's number; Celery passes on the text of `Terminated`, a negative number."""
    try:
        return abs(int(signum))
    except (TypeError, ValueError):
        return signum


def add_to_tasks(app: Any) -> None:
    """Call this before a consumer starts, which then keeps each task's request class."""
    for task in (app.Task, *app.tasks.values()):
        task.Request = mixed(PoolRequest, symbol_by_name(task.Request))
