"""The ends of executions in the result backend, for executions without a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from celery.backends.base import DisabledBackend

from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.connections.faults import FAULTS, to_storage_error

_OUTCOMES = {
    "SUCCESS": Outcome.SUCCEEDED,
    "FAILURE": Outcome.FAILED,
    "REVOKED": Outcome.CANCELLED,
    "REJECTED": Outcome.REJECTED,
    "IGNORED": Outcome.IGNORED,
}
_MOST_TEXT = 4096
_RECENT_S = 5.0


def stored_end(app: Any, task_id: str) -> tuple[Ended | None, bool]:
    """The end that the backend has stored, and whether it was stored within some seconds.

    The end is None if the backend has none or cannot say.
    """
    meta = _meta_of(app, task_id)
    return end_from_meta(meta), _is_recent(meta.get("date_done"))


def stored_ends(app: Any, task_ids: Sequence[str]) -> dict[str, Ended]:
    """The ends that the backend has stored, read in one call if the backend can."""
    backend = app.backend
    if len(task_ids) > 1 and backend.supports_native_join:
        with translated_faults():
            # An interval of zero and one iteration: read once, without waiting.
            found = list(backend.get_many(task_ids, interval=0, max_iterations=1))
        ends = {task_id: end_from_meta(meta) for task_id, meta in found}
    else:
        ends = {task_id: stored_end(app, task_id)[0] for task_id in task_ids}
    return {task_id: ended for task_id, ended in ends.items() if ended is not None}


def keeps_results(app: Any) -> bool:
    """Whether the app has a result backend."""
    return not isinstance(app.backend, DisabledBackend)


def _meta_of(app: Any, task_id: str) -> dict[str, Any]:
    if not keeps_results(app):
        return {}
    with translated_faults():
        try:
            meta: dict[str, Any] = app.backend.get_task_meta(task_id, cache=False)
        except TypeError:  # a backend of the app's own, without that option
            meta = app.backend.get_task_meta(task_id)
    return meta


@contextlib.contextmanager
def translated_faults() -> Iterator[None]:
    """Translate errors of a Redis backend into StorageError."""
    try:
        yield
    except FAULTS as error:
        fault = to_storage_error(error, was_sent=False)
        raise type(fault)(f"the result backend is unavailable: {fault}") from error


def _is_recent(done: Any) -> bool:
    try:
        at = done if isinstance(done, datetime) else datetime.fromisoformat(done)
    except (TypeError, ValueError):
        return True
    age = datetime.now(UTC) - (at if at.tzinfo is not None else at.replace(tzinfo=UTC))
    return abs(age.total_seconds()) < _RECENT_S


def end_from_meta(meta: dict[str, Any]) -> Ended | None:
    outcome = _OUTCOMES.get(str(meta.get("status")))
    if outcome is None:
        return None
    result = meta.get("result")
    is_error = isinstance(result, BaseException)
    return Ended(
        outcome=outcome,
        type=type(result).__name__ if is_error else "",
        message=str(result)[:_MOST_TEXT] if is_error else "",
        traceback=str(meta.get("traceback") or "")[-_MOST_TEXT:],
        result_text="" if is_error else repr(result)[:_MOST_TEXT],
    )
