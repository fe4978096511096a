"""Source code as Celery tasks: `capsule.execute`, in a fresh session or in a named one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import celery

from capsule_tasks.client.cancelling import check_type
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.options import check_options
from capsule_tasks.client.runs.task import RunTask
from capsule_tasks.client.sessions.as_task import (
    SESSION_TASK,
    SessionArguments,
    session_arguments,
    submit_as_task,
)
from capsule_tasks.client.sessions.named_session import check_source
from capsule_tasks.client.task import Task
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import CodeFailed, CodeNotRun
from capsule_tasks.settings import DEFAULT_CODE_PROFILE

CODE_TASK = "capsule.execute"

outcome_of_code: ContextVar[Callable[[], Any]] = ContextVar("capsule_outcome_of_code")
"""Set while Celery's tracer ends code that has run: returns its value, or raises its error."""


_ARGUMENTS = ("source", "profile", "timeout_s", "session", "tenant")


class CodeTask(Task, celery.Task):
    """Stands for code in an app's registry. The pool runs the code, and Celery traces its end."""

    name = CODE_TASK
    throws = (CodeFailed, CodeNotRun)
    """Expected, so that the log of a worker has no traceback of its own for each."""

    def run(
        self, source: str, *, profile: str = DEFAULT_CODE_PROFILE, timeout_s: float | None = None
    ) -> Any:
        """Return or raise what the code did; the arguments are for the pool, which has run it."""
        arguments_of(source, profile=profile, timeout_s=timeout_s)
        outcome = outcome_of_code.get(None)
        if outcome is None:
            raise CodeNotRun(
                "code runs in a worker whose pool is capsule_tasks.taskpool:TaskPool, and neither "
                "in another pool nor eagerly"
            )
        return outcome()


class SessionTask(Task, celery.Task):
    """Stands for code in a named session. Our pool waits for its call without a slot."""

    name = SESSION_TASK
    throws = (CodeFailed, CodeNotRun)
    acks_late = True
    """A message that is delivered again finds the call of the first delivery."""

    def run(self, source: str, *, session: str, **options: Any) -> Any:
        """Return or raise what the call did; other pools, and eager calls, wait for it here."""
        arguments = session_arguments(source, session=session, **options)
        outcome = outcome_of_code.get(None)
        if outcome is not None:
            return outcome()
        return watch_thread.call(self._run_here(arguments, self.request.id))

    async def _run_here(self, arguments: SessionArguments, task_id: str) -> Any:
        execution = await submit_as_task(self.app, task_id, arguments)
        return await execution.aget()


class CodeArguments(NamedTuple):
    """The arguments of one `capsule.execute`."""

    source: str
    profile: str
    timeout_s: float | None


def arguments_of(
    source: str, *, profile: str = DEFAULT_CODE_PROFILE, timeout_s: float | None = None
) -> CodeArguments:
    """The arguments of a call; TypeError or ValueError names a value with which no code can run."""
    check_source(source, timeout_s, "wait")
    check_type("profile", profile, str)
    return CodeArguments(source, profile, timeout_s)


def register_code_tasks(app: Any) -> None:
    """Give the app its tasks for code; binding a task would finalize the app."""
    for kind in (CodeTask, SessionTask, RunTask):
        # Celery keeps the app of a task in its class.
        task = type(kind.__name__, (kind,), {"__module__": __name__, "_app": app})()
        app._tasks[kind.name] = task  # noqa: SLF001 - as above
        if app.finalized:
            task.bind(app)


class ExecuteCode:
    """`capsule.execute`: runs source code in a fresh session of a worker, and in no other process.

    With `session=` it runs in a named session, as a call of it; the id of the call is the task id.
    The session has the semantics of a REPL: the value is that of the last expression. With `.s()`,
    `.si()` and `.signature()` it takes part in chains, groups and chords.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(
        self,
        source: str,
        *,
        profile: str = DEFAULT_CODE_PROFILE,
        timeout_s: float | None = None,
        session: str | None = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Execution:
        """Send the code to a worker. `options` are those of `apply_async`: `queue`, `countdown`, …

        `.get()` of the execution returns the value, or raises CodeFailed. A value that the result
        serializer cannot write arrives as its `repr`.
        """
        check_options("capsule.execute", options, _ARGUMENTS)
        signature = self.s(
            source, profile=profile, timeout_s=timeout_s, session=session, tenant=tenant
        )
        return cast("Execution", signature.apply_async(**options))

    def delay(self, *args: Any, **kwargs: Any) -> Execution:
        """Send the code as `execute(…)` does; every argument is one of the code."""
        return cast("Execution", self.s(*args, **kwargs).apply_async())

    def s(self, *args: Any, **kwargs: Any) -> Any:
        """A signature; in a chain without a source, the source is the value before."""
        return self.signature(args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Any:
        """A signature that ignores the value before."""
        return self.signature(args, kwargs, immutable=True)

    def signature(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """A signature, as that of any task."""
        given = dict(kwargs or {})
        for name in ("session", "tenant"):
            if given.get(name, ...) is None:
                del given[name]
        known = given if args else {"source": "", **given}  # in a chain it may still be to come
        if "session" in given:
            session_arguments(*args, **known)
            return self._app.tasks[SESSION_TASK].signature(args, given, **options)
        if "tenant" in given:
            raise ValueError(
                f"tenant = {given['tenant']!r}: belongs to a session, which is not given"
            )
        arguments_of(*args, **known)
        return self._app.tasks[CODE_TASK].signature(args, given, **options)
