"""`Capsule(app)`: one line that makes a Celery app's tasks run in sessions."""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.imports import symbol_by_name

from capsule_tasks.client.task import Task, mixed

log = logging.getLogger("capsule_tasks.client")

POOL = "capsule_tasks.taskpool:TaskPool"
_BUILT_IN = "celery."


class Capsule:
    """Prepares an app, in its own module, after it was made; before or after its tasks.

    It sets `worker_pool` as a default: whatever the app's configuration says, stays. Its task class
    is not replaced but mixed with `capsule_tasks.client.Task`. What stands in the way is logged
    when the configuration is read, and listed in `conflicts`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.conflicts: list[str] = []
        app.add_defaults({"worker_pool": POOL})
        self._mix_into_class()
        self._mix_into_tasks()
        app.on_after_finalize.connect(self._on_finalized, weak=False)
        app.on_after_configure.connect(self._on_configured, weak=False)
        if app.configured:
            self._on_configured()

    def _mix_into_class(self) -> None:
        self.app.task_cls = mixed(symbol_by_name(self.app.task_cls))
        self.app.__dict__.pop("Task", None)  # made from the old one, and made again when needed

    def _mix_into_tasks(self) -> None:
        """Tasks that exist, also those with a `base` of their own."""
        for task in dict(self.app._tasks).values():  # noqa: SLF001 - `tasks` would finalize the app
            if not isinstance(task, Task) and not task.name.startswith(_BUILT_IN):
                task.__class__ = mixed(type(task))

    def _on_finalized(self, *_: Any, **__: Any) -> None:
        self._mix_into_tasks()

    def _on_configured(self, *_: Any, **__: Any) -> None:
        self.conflicts = conflicts(self.app.conf)
        for conflict in self.conflicts:
            log.warning("capsule_tasks: %s", conflict)


def conflicts(conf: Any) -> list[str]:
    """What in a configuration keeps tasks from running in sessions as they should."""
    found = []
    if conf.worker_pool != POOL:
        found.append(
            f"worker_pool = {conf.worker_pool!r} stays as it is configured, so tasks do not run in "
            f"sessions; remove it, or set it to {POOL!r}"
        )
    if "pickle" in (conf.accept_content or ()) or "application/x-python-serialize" in (
        conf.accept_content or ()
    ):
        found.append(
            "accept_content allows pickle: whoever can write to the broker can run code in the "
            "workers"
        )
    return found
