"""`Capsule(app)`: one line that makes a Celery app's tasks run in sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from celery.concurrency import ALIASES
from celery.utils.imports import symbol_by_name

from capsule_tasks.client.cancelling import Asked, cancel_all
from capsule_tasks.client.task import Task, mixed
from capsule_tasks.client.watching.watch_thread import watch_thread

log = logging.getLogger("capsule_tasks.client")

POOL = "capsule_tasks.taskpool:TaskPool"
_OUR_POOLS = ("capsule_tasks.taskpool.TaskPool", "capsule_tasks.taskpool.pool.TaskPool")
_BUILT_IN = "celery."


class Capsule:
    """Prepares an app, in its own module, after it was made; before or after its tasks.

    It sets `worker_pool` as a default: whatever the app's configuration says, stays. Its task class
    is not replaced but mixed with `capsule_tasks.client.Task`. What stands in the way is logged
    when the configuration is read, and listed in `conflicts`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._mix_into_class()
        self._mix_into_tasks()
        app.on_after_configure.connect(self._on_configured, weak=False)
        if app.configured:
            self._on_configured()

    @property
    def conflicts(self) -> list[str]:
        """What in the app's configuration stands in the way, as it is now.

        To ask is to have the configuration read, if nothing else has yet.
        """
        return conflicts(self.app.conf)

    async def acancel(
        self, ids: str | Iterable[str], grace_s: float | None = None
    ) -> dict[str, Asked]:
        """Cancel executions by their ids, one or thousands; what was done, of each id.

        As `Execution.cancel`, but the wait for workers that have only just begun some of them is
        shared by all. Safe twice: repeat the call if Redis went away in the middle of it.
        """
        return await cancel_all(self.app, [ids] if isinstance(ids, str) else ids, grace_s)

    def cancel(self, ids: str | Iterable[str], grace_s: float | None = None) -> dict[str, Asked]:
        """As `acancel`, for callers that block."""
        return watch_thread.call(self.acancel(ids, grace_s))

    def _mix_into_class(self) -> None:
        self.app.task_cls = mixed(symbol_by_name(self.app.task_cls))
        self.app.__dict__.pop("Task", None)  # made from the old one, and made again when needed

    def _mix_into_tasks(self) -> None:
        """Tasks that exist and those to come, also with a `base` of their own."""
        registry = self.app._tasks  # noqa: SLF001 - `tasks` would finalize the app
        for task in registry.values():
            _mix_into(task)
        registry.__class__ = _mixing(type(registry))

    def _on_configured(self, *_: Any, **__: Any) -> None:
        conf = self.app.conf
        if not conf.value_set_for("worker_pool"):
            # No sooner: what is added as a default goes before what is read from an object.
            conf.add_defaults({"worker_pool": POOL})
        for conflict in conflicts(conf):
            log.warning("capsule_tasks: %s", conflict)


def _mix_into(task: Any) -> None:
    if not isinstance(task, Task) and not task.name.startswith(_BUILT_IN):
        task.__class__ = mixed(type(task))


class _TaskMixin:
    """Mixed in before an app's registry of tasks, through which each of them comes."""

    def __setitem__(self, name: str, task: Any) -> None:
        _mix_into(task)
        super().__setitem__(name, task)  # type: ignore[misc]


def _mixing(base: type) -> type:
    if issubclass(base, _TaskMixin):
        return base
    return type(base.__name__, (_TaskMixin, base), {"__module__": base.__module__})


def _is_our_pool(pool: Any) -> bool:
    """Whether a value of `worker_pool` is ours, in any form that Celery takes; imports nothing."""
    if isinstance(pool, type):
        return any(f"{base.__module__}.{base.__qualname__}" in _OUR_POOLS for base in pool.__mro__)
    return str(ALIASES.get(pool, pool)).replace(":", ".") in _OUR_POOLS


def conflicts(conf: Any) -> list[str]:
    """What in a configuration keeps tasks from running in sessions as they should."""
    found = []
    if not _is_our_pool(conf.worker_pool):
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
