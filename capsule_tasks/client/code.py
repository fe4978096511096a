"""Source code as a Celery task: `capsule.execute`."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import celery

from capsule_tasks.client.cancelling import check_type
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.sessions.named_session import check_source
from capsule_tasks.client.task import Task
from capsule_tasks.errors import CodeFailed, CodeNotRun
from capsule_tasks.settings import DEFAULT_CODE_PROFILE

CODE_TASK = "capsule.execute"

outcome_of_code: ContextVar[Callable[[], Any]] = ContextVar("capsule_outcome_of_code")
"""Set while Celery's tracer ends code that has run: returns its value, or raises its error."""


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


class CodeArguments(NamedTuple):
    """What a producer says about code."""

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


def register_code_task(app: Any) -> None:
    """Give the app its task for code; binding a task would finalize the app."""
    # Celery keeps the app of a task in its class.
    task = type("CodeTask", (CodeTask,), {"__module__": __name__, "_app": app})()
    app._tasks[CODE_TASK] = task  # noqa: SLF001 - as above
    if app.finalized:
        task.bind(app)


class ExecuteCode:
    """`capsule.execute`: runs source code in a fresh session of a worker, and in no other process.

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
        **options: Any,
    ) -> Execution:
        """Send the code to a worker. `options` are those of `apply_async`: `queue`, `countdown`, …

        `.get()` of the execution returns the value, or raises CodeFailed. A value that the result
        serializer cannot write arrives as its `repr`.
        """
        signature = self.s(source, profile=profile, timeout_s=timeout_s)
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
        given = {"source": "", **(kwargs or {})} if not args else kwargs or {}
        arguments_of(*args, **given)  # in a chain the source may still be to come
        return self._app.tasks[CODE_TASK].signature(args, kwargs, **options)
