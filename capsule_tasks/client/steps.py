"""`step`: an effect of a task that happens at most once, however often the task is delivered."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from capsule_tasks.client.configuration import retention_settings
from capsule_tasks.client.redis_location import (
    STORE_SETTING,
    app_of_task,
    current_execution_id,
    needed_redis_url,
)
from capsule_tasks.errors import CapsuleError, StepMisused, StorageError
from capsule_tasks.settings import StepSettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.awaiting import to_the_end
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, drive, drive_blocking
from capsule_tasks.storage.executions.steps import (
    StepCore,
    StepDone,
    StepStarted,
    check_name,
    fingerprint_of,
)
from capsule_tasks.storage.operations import Operation

T = TypeVar("T")

NoEffect = tuple[type[BaseException], ...]


def step(
    name: str,
    function: Callable[..., T],
    /,
    *args: Any,
    retry: bool = False,
    no_effect: NoEffect = (),
    execution_id: str | None = None,
    **kwargs: Any,
) -> T:
    """Call the function once for this task, and return its stored result from then on.

    When the task is redelivered or retried, a step that has finished returns its stored result, and
    the function is not called. A step that has started and not finished, because its process was
    lost or the function raised, raises EffectUncertain: the effect may have happened. Set
    `retry=True` if calling the function twice does no harm; list in `no_effect` the errors after
    which the effect has certainly not happened.

    The result of a coroutine function is awaited. Each step of a task needs a name of its own. The
    arguments `retry`, `no_effect` and `execution_id` are not passed on: a function with parameters
    of these names needs `functools.partial`.
    """
    settings = StepSettings(prefix=retention_settings(app_of_task()).prefix)
    steps = Steps(execution_id=execution_id, settings=settings)
    return steps.step(name, function, *args, retry=retry, no_effect=no_effect, **kwargs)


class Steps:
    """Steps of one execution, stored at a URL or in a store; `step` uses the app's Redis."""

    def __init__(
        self,
        store: Any = None,
        *,
        execution_id: str | None = None,
        settings: StepSettings | None = None,
    ) -> None:
        self._store = store
        self._execution_id = execution_id
        self._settings = settings or StepSettings()

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        retry: bool = False,
        no_effect: NoEffect = (),
        **kwargs: Any,
    ) -> T:
        """Like the function `step`."""
        check_name(name)
        if not callable(function):
            raise StepMisused(name, f"pass a function and its arguments, not {function!r}")
        if _has_code(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            raise StepMisused(name, "a generator does nothing when it is called; pass a function")
        _check_policy(name, retry, no_effect)
        # Read now, not when the result is awaited: another task may be the current one by then.
        core = StepCore(self._execution_id_for(name), self._settings)
        start = core.start(name, fingerprint_of(args, kwargs), retry=retry)
        call: Callable[[], Any] = functools.partial(function, *args, **kwargs)
        is_async = _has_code(function, inspect.iscoroutinefunction)
        store = self._store_of(AsyncConnections if is_async else SyncConnections)
        value: Any = (_run_async if is_async else _run)(core, store, start, call, no_effect)
        return cast("T", value)

    def _execution_id_for(self, name: str) -> str:
        given = self._execution_id
        execution_id = current_execution_id() if given is None else given
        if execution_id is None:
            raise StepMisused(name, "no task is running here; give an execution_id")
        return execution_id

    def _store_of(self, kind: Callable[[str], Any]) -> Any:
        app = app_of_task()
        store = self._store or app.conf.get(STORE_SETTING) or needed_redis_url(app)
        return _shared(kind, store) if isinstance(store, str) else store


def _check_policy(name: str, retry: object, no_effect: object) -> None:
    """Check before the call: an invalid policy found after it could not be applied any more."""
    if not isinstance(retry, bool):
        raise StepMisused(name, f"retry must be True or False, not {retry!r:.100}")
    errors = no_effect if isinstance(no_effect, tuple) else (None,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in errors):
        raise StepMisused(
            name, f"no_effect must be a tuple of exception types, not {no_effect!r:.100}"
        )


def _run(
    core: StepCore,
    store: SyncStore,
    start: Operation[StepStarted | StepDone],
    call: Callable[[], Any],
    no_effect: NoEffect,
) -> Any:
    started = drive_blocking(start, store)
    if isinstance(started, StepDone):
        return started.value
    try:
        value = call()
    except no_effect:
        drive_blocking(core.undo(started), store)
        raise
    except BaseException as error:
        try:
            drive_blocking(core.fail(started, _describe(error)), store)
        except StorageError as storage:
            error.add_note(f"the failure of step {started.name!r} could not be stored: {storage}")
        raise
    if inspect.isawaitable(value):
        drive_blocking(core.undo(started), store)
        _refuse_awaitable(started.name, value)
    try:
        return drive_blocking(core.finish(started, value), store)
    except CapsuleError:
        raise
    except BaseException:
        # A cancel or a soft time limit interrupted the write. The step is done, so its result is
        # stored before the task ends: without it, the next attempt would raise EffectUncertain.
        drive_blocking(core.finish(started, value), store)
        raise


async def _run_async(
    core: StepCore,
    store: AsyncStore,
    start: Operation[StepStarted | StepDone],
    call: Callable[[], Awaitable[Any]],
    no_effect: NoEffect,
) -> Any:
    started = await drive(start, store)
    if isinstance(started, StepDone):
        return started.value
    try:
        value = await call()
    except no_effect:
        await drive(core.undo(started), store)
        raise
    except BaseException as error:
        try:
            await drive(core.fail(started, _describe(error)), store)
        except StorageError as storage:
            error.add_note(f"the failure of step {started.name!r} could not be stored: {storage}")
        raise
    finishing = drive(core.finish(started, value), store)
    return await to_the_end(finishing, "the result of the step could not be stored")


def _describe(error: BaseException) -> str:
    """The type of an error without its text, which may contain secrets."""
    return f"it raised {type(error).__qualname__}"


def _has_code(function: Callable[..., Any], *kinds: Callable[[Any], bool]) -> bool:
    """Whether the code that a call of the function runs is of one of these kinds."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004  its code is inspected
    return any(kind(function) or kind(call) for kind in kinds)


def _refuse_awaitable(name: str, value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()
    raise StepMisused(name, "it returned an awaitable; pass the coroutine function itself")


_connections: dict[tuple[Any, str], Any] = {}


def _shared(kind: Callable[[str], T], url: str) -> T:
    """One set of connections for each Redis and process; they handle forks and loops themselves.

    There is no lock, which a fork could copy while it is taken. Two threads may therefore create a
    set each; both use the first that was stored.
    """
    shared: T = _connections.get((kind, url)) or _connections.setdefault((kind, url), kind(url))
    return shared
