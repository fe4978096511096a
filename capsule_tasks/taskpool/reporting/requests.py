"""What Celery does about one message: told only when it is known how its task ended.

Celery's own request announces a terminated task as REVOKED when it asks for the signal, and what
the task does meanwhile contradicts it. Here the pool says how the task ended, and before the worker
stores an end of its own, the result backend is asked which end the child has stored. So the last
event, the stored state and what happened are one.
"""

from __future__ import annotations

import contextlib
import functools
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

from capsule_tasks.errors import reason_of
from capsule_tasks.taskpool.reporting.exception_info import info_of
from capsule_tasks.taskpool.stock_redis.batched_acks import leave_for_redelivery

log = logging.getLogger("capsule_tasks.taskpool")

_MAX_ATTEMPTS = 3
"""To read a stored state; the hub thread waits for it, as it does when it stores one."""
_ENDS_OF_THE_POOL = (Terminated, TimeLimitExceeded, WorkerLostError)
_CLOCK_SLACK_S = 1.0
_NOT_READ = (DisabledBackend, RPCBackend)
"""They keep nothing, or keep it where only the caller may read it."""


class PoolRequest:
    """Mixed in before the request class of a task, be it Celery's or the application's own."""

    _is_reported = False
    """Its end was in the result backend already, and was told so."""
    defers_ack = False
    """Its message is acknowledged when its stream is claimed, and not before."""

    def acknowledge(self: Any) -> None:
        if not self.defers_ack:
            super().acknowledge()  # type: ignore[misc]

    def on_claimed(self: Any) -> None:
        """If the message is gone and the worker too, the reaper finds the task from now on."""
        self.defers_ack = False
        self.acknowledge()

    def terminate(self: Any, pool: Any, signal: Any = None) -> None:
        """Have the task stopped; what it ended as is told at its end."""
        if not self._stop(pool, signal, "a remote control command (revoke)"):
            self._terminate_on_ack = pool, signal

    def cancel(self: Any, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """The same, of a worker that leaves: the message goes back."""
        self._stop(pool, signal, "the worker, which lets go of its tasks", is_worker_stopping=True)
        if self.time_start:
            self._announce_cancelled(emit_retry=emit_retry)

    def _stop(
        self: Any, pool: Any, signal: Any, requested_by: str, *, is_worker_stopping: bool = False
    ) -> bool:
        """Tell the pool once: by what it gave for the task, if that is there; else by the pid."""
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
        """`return_ok` says that it is the task's own failure, which the child has stored."""
        with self._left_if_unreported():
            return self._on_failure(exc_info, send_failed_event, return_ok)

    def _on_failure(self: Any, exc_info: Any, send_failed_event: bool, return_ok: bool) -> Any:
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        if isinstance(error, _ENDS_OF_THE_POOL) and not return_ok:
            stored = self._stored_end()
            if stored is not None and not self._runs_again(error, stored):
                self._report_as_stored(stored, error)
                return None
            if isinstance(error, TimeLimitExceeded) and self._is_reported_by_timeout():
                return None
        return super().on_failure(  # type: ignore[misc]
            exc_info, send_failed_event=send_failed_event, return_ok=return_ok
        )

    def _runs_again(self: Any, error: Exception, stored: dict[str, Any]) -> bool:
        """Whether a failure is left to the next delivery, as Celery has it.

        Its child may have died before what follows of a failure: for the chord or the chain that it
        is in, and for errbacks.
        """
        return (
            isinstance(error, WorkerLostError)
            and stored["status"] == states.FAILURE
            and self.task.acks_late
            and self.task.reject_on_worker_lost
        )

    def _worker_lost_info(self: Any, exc: BaseException) -> Any:
        """Celery's, without the place in Celery where it was made."""
        lost = super()._worker_lost_info(exc).exception  # type: ignore[misc]
        return info_of(lost.exc if isinstance(lost, ExceptionWithTraceback) else lost)

    def on_timeout(self: Any, soft: bool, timeout: float) -> None:
        """Of a hard limit Celery tells here all that `on_failure` has told already."""
        if soft or not self._is_reported:
            with self._left_if_unreported():
                super().on_timeout(soft, timeout)  # type: ignore[misc]

    @contextlib.contextmanager
    def _left_if_unreported(self: Any) -> Iterator[None]:
        """A message whose end cannot be told is for another delivery, not held for ever."""
        try:
            yield
        except MemoryError:
            raise
        except Exception:
            comes_again = not self.acknowledged and leave_for_redelivery(self.message)
            later = " now; its message comes again" if comes_again else ""
            log.exception("how %s[%s] ended cannot be told%s", self.name, self.id, later)

    def _is_reported_by_timeout(self: Any) -> bool:
        """Whether `on_timeout` comes next and does all, so that errbacks are called only once.

        Not in a worker that is leaving, where it stores nothing; and a request class of the
        application's own is told of both, as under prefork.
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
        """The SUCCESS or FAILURE that the task has stored, if the result backend can say it."""
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
        """Whether a failure is of an attempt before this one, so that it may be replaced."""
        try:
            done = datetime.fromisoformat(date_done) if isinstance(date_done, str) else date_done
            if done.tzinfo is None:  # Celery means UTC
                done = done.replace(tzinfo=UTC)
            return bool(done.timestamp() < (self.time_start or 0) - _CLOCK_SLACK_S)
        except (AttributeError, TypeError, ValueError):
            return False

    def _report_as_stored(self: Any, stored: dict[str, Any], reason: object) -> None:
        """The task has ended, whatever became of its process: settle its message accordingly."""
        self._is_reported = True
        has_succeeded = stored["status"] == states.SUCCESS
        log.info("%s[%s] has ended as %s before: %s", self.name, self.id, stored["status"], reason)
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
        """A child stores its end and then counts it in the chord, and may have died in between.

        Only Redis knows parts apart, so that counting one twice does no harm.
        """
        backend = self.task.backend
        if self._context.chord and isinstance(backend, RedisBackend):
            try:
                backend.on_chord_part_return(self._context, stored["status"], stored.get("result"))
            except Exception as fault:  # noqa: BLE001 - a result backend may raise anything
                why = reason_of(fault)
                log.warning("the chord of %s[%s] may not end: %s", self.name, self.id, why)


def _signal_of(signum: Any) -> Any:
    """Celery passes on what `Terminated` says: the text of a negative number."""
    try:
        return abs(int(signum))
    except (TypeError, ValueError):
        return signum


@functools.cache
def pool_request(base: Any) -> Any:
    """A request class that is `base` with our part before it."""
    if issubclass(base, PoolRequest):
        return base
    return type(base.__name__, (PoolRequest, base), {"__module__": base.__module__})


def add_to_tasks(app: Any) -> None:
    """Before a consumer starts, which then remembers each task's class of requests."""
    for task in (app.Task, *app.tasks.values()):
        task.Request = pool_request(symbol_by_name(task.Request))
