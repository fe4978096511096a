"""Tasks that Celery discards before they reach the pool: revoked and expired ones.

Each gets an end in its stream and is counted in its group, as if it had been cancelled here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.signals import task_revoked

from capsule_tasks.executions.execution import UNREPORTED, Execution
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.taskpool.calls import group_of


class DiscardedTasks:
    """Reports each discarded task of an app, on the thread that sends Celery's signal."""

    def __init__(self, app: Any, discard: Callable[[Execution, str], object]) -> None:
        self._app = app
        self._discard = discard

    def start(self) -> None:
        task_revoked.connect(self._on_revoked)

    def stop(self) -> None:
        task_revoked.disconnect(self._on_revoked)

    def _on_revoked(
        self, sender: Any, request: Any, terminated: bool, expired: bool, **_: Any
    ) -> None:
        if terminated or sender.app is not self._app:  # a terminated task has been in the pool
            return
        group, index = group_of(vars(request))
        origin = Origin(
            execution_id=request.id,
            task=sender.name,
            group=group,
            index=index,
            acks_late=bool(sender.acks_late),
        )
        call = TaskCall(name=sender.name, task_id=request.id, request={}, body=b"")
        execution = Execution(call, origin, UNREPORTED)
        self._discard(execution, "expired" if expired else "revoked")
