"""Stops a message that kills every child it is given to, and is delivered again each time."""

from __future__ import annotations

from typing import Any

from capsule_tasks.errors import LostTooOften
from capsule_tasks.protocol.messages import TaskCall

_MOST_KNOWN = 10_000


class Losses:
    """How many children each message has cost this worker; the oldest are forgotten first.

    A task with `reject_on_worker_lost` is delivered again when its child dies, with any number of
    others behind it. What runs out of memory once does so again, and would never end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[tuple[str, Any], int] = {}

    def judge(self, call: TaskCall, lost: Exception) -> Exception:
        """Count one more; `lost` itself, or the error after which Celery does not deliver again."""
        key = _key(call)
        count = self._counts.pop(key, 0) + 1
        if count >= self._most:
            return LostTooOften(call.name, call.task_id, count, lost)
        self._counts[key] = count
        if len(self._counts) > _MOST_KNOWN:
            del self._counts[next(iter(self._counts))]
        return lost

    def forget(self, call: TaskCall) -> None:
        """It came to its end."""
        self._counts.pop(_key(call), None)


def _key(call: TaskCall) -> tuple[str, Any]:
    """A retry has the same id, and is counted by Celery itself."""
    return call.task_id, call.request.get("retries")
