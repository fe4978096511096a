"""`Task`, which is mixed into an app's own task class."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import celery
from celery.result import EagerResult

from capsule_tasks.client.execution import EagerExecution, Execution
from capsule_tasks.protocol.cancelled import as_failure


class Task:
    """Mixed into the task class of an app: calls return an `Execution`."""

    abstract = True
    name: str
    app: Any
    backend: Any

    def AsyncResult(self, task_id: str, **options: Any) -> Execution:  # noqa: N802 - Celery's
        """The execution of an id; also an instance of the task class's own result class."""
        theirs: Any = super().AsyncResult  # type: ignore[misc]
        if theirs.__func__ is celery.Task.AsyncResult:
            return Execution(
                task_id, backend=self.backend, task_name=self.name, app=self.app, **options
            )
        result: Any = theirs(task_id, **options)
        kind: Any = type(result)
        result.__class__, result.app = _execution(kind), self.app
        return cast("Execution", result)

    def apply(self, *args: Any, **options: Any) -> Any:
        """Run the task in the caller; `async def` tasks too."""
        _let_run_eagerly(self)
        result = super().apply(*args, **options)  # type: ignore[misc]
        return EagerExecution.of(result) if type(result) is EagerResult else result


@functools.cache
def mixed(mixin: type, base: type) -> type:
    """A class with the name of `base` that derives from `mixin` and `base`."""
    if issubclass(base, mixin):
        return base
    return type(base.__name__, (mixin, base), {"__module__": base.__module__})


_execution = functools.partial(mixed, Execution)


def _let_run_eagerly(task: Any) -> None:
    """Make an `async def` task callable by Celery's tracer, which awaits nothing."""
    for name in ("run", "_orig_run"):
        function = getattr(task, name, None)
        if inspect.iscoroutinefunction(function):
            setattr(task, name, _eagerly(task, function))


def _eagerly(task: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        if not task.request.is_eager:
            return coroutine
        try:
            return _run_on_thread(task, coroutine) if _is_in_loop() else asyncio.run(coroutine)
        except asyncio.CancelledError as error:
            failure = as_failure(error)
        raise failure

    run.capsule_coroutine = function  # type: ignore[attr-defined]
    return run


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_on_thread(task: Any, coroutine: Any) -> Any:
    """Run the coroutine on a thread's loop: the caller's loop runs and cannot be entered again."""
    request, context = task.request_stack.top, contextvars.copy_context()

    def run() -> Any:
        task.request_stack.push(request)
        try:
            return asyncio.run(coroutine)
        finally:
            task.request_stack.pop()

    with ThreadPoolExecutor(1, "capsule-eager") as executor:
        return executor.submit(context.run, run).result()
