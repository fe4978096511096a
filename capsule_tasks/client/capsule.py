"""`Capsule(app)`: one line that makes a Celery app's tasks run in sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from celery.concurrency import ALIASES
from celery.utils.imports import symbol_by_name

from capsule_tasks.client.cancelling import CancelAnswer, cancel_all, check_type
from capsule_tasks.client.code import ExecuteCode, register_code_tasks
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.runs.registry import runs_of
from capsule_tasks.client.sessions.forgetting import forget_session, forget_tenant
from capsule_tasks.client.sessions.named_session import DEFAULT_PROFILE, NamedSession, check_id
from capsule_tasks.client.task import Task, mixed
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.storage.sessions.types import NamedSessionInfo, TenantUsage

log = logging.getLogger("capsule_tasks.client")

POOL = "capsule_tasks.taskpool:TaskPool"
_OUR_POOLS = ("capsule_tasks.taskpool.TaskPool", "capsule_tasks.taskpool.pool.TaskPool")
_BUILT_IN = "celery."


class Capsule:
    """Makes the tasks of an app run in sessions. Call it where the app is made.

    `worker_pool` is set as a default, so a value in the app's configuration wins. The app's task
    class is not replaced but mixed with `capsule_tasks.client.Task`. Settings that keep tasks from
    running in sessions are logged when the configuration is read, and listed in `conflicts`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.execute = ExecuteCode(app)
        """Runs source code on a worker: `capsule.execute("6 * 7").get()`."""
        self.runs = runs_of(app)
        """Durable runs of agents: `capsule.runs.register(…)`, `capsule.runs.start(…)`."""
        app.task_cls = mixed(Task, symbol_by_name(app.task_cls))
        app.__dict__.pop("Task", None)  # a cached class, made of the old one
        self._mix_into_tasks()
        register_code_tasks(app)
        app.on_after_configure.connect(self._on_configured, weak=False)
        if app.configured:
            self._on_configured()

    @property
    def conflicts(self) -> list[str]:
        """The settings that keep tasks from running in sessions. Reads the app's configuration."""
        return conflicts(self.app.conf)

    async def aexecute(self, source: str, **options: Any) -> Execution:
        """Send code to a worker, as `execute` does, without blocking the event loop."""

        def send() -> Execution:
            execution = self.execute(source, **options)
            if execution.backend is not None:
                # The thread's own backend has subscribed to the result. An execution that the
                # garbage collector finds after the thread has ended would connect once more, to
                # unsubscribe. Whoever waits for the result subscribes again.
                execution.backend.remove_pending_result(execution)
            return execution

        return await asyncio.to_thread(send)

    async def acancel(
        self, ids: str | Iterable[str], grace_s: float | None = None
    ) -> dict[str, CancelAnswer]:
        """Cancel executions by their ids, one or thousands; the answer for each id.

        As `Execution.cancel`, but all ids share the wait for tasks that are just being claimed.
        Safe to repeat, for example if Redis became unavailable in the middle of it.
        """
        return await cancel_all(self.app, [ids] if isinstance(ids, str) else ids, grace_s)

    cancel = blocking(acancel)

    def session(
        self, session_id: str, *, profile: str = DEFAULT_PROFILE, tenant: str | None = None
    ) -> NamedSession:
        """A named session of the cluster; the first call makes it. Asks nothing of Redis."""
        return NamedSession(self.app, session_id, profile=profile, tenant=tenant)

    async def asessions(
        self, *, profile: str | None = None, tenant: str | None = None, limit: int = 50
    ) -> list[NamedSessionInfo]:
        """Named sessions of a profile or of a tenant, those that were used last first."""
        check_type("limit", limit, int)
        if limit < 1:
            raise ValueError(f"limit = {limit!r}: must be how many sessions, from 1")
        for name, value in (("profile", profile), ("tenant", tenant)):
            if value is not None:
                check_id(name, value)
        store = (await watch_thread.watcher(self.app)).sessions
        return await store.list_sessions(profile=profile, tenant=tenant, limit=limit)

    sessions = blocking(asessions)

    async def ausage(self, tenant: str) -> TenantUsage:
        """Processor time and calls of a tenant's named sessions, and how many of them are live."""
        check_id("tenant", tenant)
        return await (await watch_thread.watcher(self.app)).sessions.tenants.usage(tenant)

    usage = blocking(ausage)

    async def aforget(self, *, session: str | None = None, tenant: str | None = None) -> None:
        """Erase a named session, or all sessions of a tenant: namespace, checkpoint, history, and
        calls with their events and results.

        Calls that had not ended fail with SessionForgotten, the one that runs is stopped, and
        until all is erased new ones are refused with SessionClosing. After an error, or if this
        process dies, call it again. Durable runs of a session are not erased.
        """
        if (session is None) == (tenant is None):
            raise TypeError(f"session = {session!r}, tenant = {tenant!r}: say which one to forget")
        if session is not None:
            check_id("session", session)
            await forget_session(self.app, session)
        else:
            check_id("tenant", tenant)
            await forget_tenant(self.app, str(tenant))

    forget = blocking(aforget)

    def _mix_into_tasks(self) -> None:
        """Mix into tasks that exist and tasks to come, also those with a `base` of their own."""
        registry = self.app._tasks  # noqa: SLF001 - `tasks` would finalize the app
        for task in registry.values():
            _mix_into(task)
        registry.__class__ = mixed(TaskMixin, registry.__class__)

    def _on_configured(self, *_: Any, **__: Any) -> None:
        conf = self.app.conf
        if not conf.value_set_for("worker_pool"):
            # Not before: an added default would win over settings that are read from an object.
            conf.add_defaults({"worker_pool": POOL})
        for conflict in conflicts(conf):
            log.warning("capsule_tasks: %s", conflict)


def _mix_into(task: Any) -> None:
    if not isinstance(task, Task) and not task.name.startswith(_BUILT_IN):
        task.__class__ = mixed(Task, task.__class__)


class TaskMixin:
    """Mixed into an app's task registry, where every task is registered."""

    def __setitem__(self, name: str, task: Any) -> None:
        _mix_into(task)
        super().__setitem__(name, task)  # type: ignore[misc]


def _is_our_pool(pool: Any) -> bool:
    """Whether a value of `worker_pool` names our pool, in any form that Celery takes."""
    if isinstance(pool, type):
        return any(f"{base.__module__}.{base.__qualname__}" in _OUR_POOLS for base in pool.__mro__)
    return str(ALIASES.get(pool, pool)).replace(":", ".") in _OUR_POOLS


def conflicts(conf: Any) -> list[str]:
    """The settings in a configuration that keep tasks from running in sessions."""
    found = []
    accepted = conf.accept_content or ()
    if not _is_our_pool(conf.worker_pool):
        found.append(
            f"worker_pool = {conf.worker_pool!r} stays as it is configured, so tasks do not run in "
            f"sessions; remove it, or set it to {POOL!r}"
        )
    if "pickle" in accepted or "application/x-python-serialize" in accepted:
        found.append(
            "accept_content allows pickle: whoever can write to the broker can run code in the "
            "workers"
        )
    return found
