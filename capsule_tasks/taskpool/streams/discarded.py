"""What Celery lets go of before it comes to the pool: tasks that were revoked, or have expired.

Each ends in its stream, and is counted in its group, as if it had been cancelled here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery.signals import task_revoked

from capsule_tasks.taskpool.jobs import Job, group_of


class Discarded:
    """Tells of each discarded task of an app, on the thread where Celery says so."""

    def __init__(self, app: Any, tell: Callable[[Job, str], object]) -> None:
        self._app = app
        self._tell = tell
        task_revoked.connect(self._on_revoked)

    def stop(self) -> None:
        """Safe twice."""
        task_revoked.disconnect(self._on_revoked)

    def _on_revoked(
        self, sender: Any, request: Any, terminated: bool, expired: bool, **_: Any
    ) -> None:
        if terminated or sender.app is not self._app:  # what was terminated has been in the pool
            return
        job = Job.never_called(
            sender.name,
            request.id,
            request=SimpleNamespace(task=sender),
            group=group_of(vars(request)),
        )
        self._tell(job, "expired" if expired else "revoked")
