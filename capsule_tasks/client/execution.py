"""What `.delay()` returns."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult, EagerResult

from capsule_tasks.client.revokes import keep_revoked


class Execution(AsyncResult):
    """An `AsyncResult` of a task that runs in a session; its id is the execution's."""

    def cancel(self, *, signal: str = "SIGTERM") -> None:
        """Stop the task wherever it is: waiting, or running, then with this signal.

        It ends as REVOKED, unless it comes to an end of its own all the same. A task that has ended
        stays as it is.
        """
        self.revoke(terminate=True, signal=signal)

    def revoke(self, *args: Any, **options: Any) -> None:
        """As Celery's; and known to workers that are not there to hear it."""
        keep_revoked(self.app, self.id)
        super().revoke(*args, **options)


class EagerExecution(EagerResult, Execution):
    """The same for a task that ran where it was called (`task_always_eager`); needs no Redis."""

    @classmethod
    def of(cls, result: Any) -> EagerExecution:
        made = cls.__new__(cls)
        made.__dict__.update(vars(result))
        return made

    def cancel(self, *, signal: str = "SIGTERM") -> None:
        """It has ended already."""
