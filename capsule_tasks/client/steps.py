"""`step`: a part of a task that is made at most once, however often the task is delivered."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from capsule_tasks.client.configuration import retention_settings
from capsule_tasks.client.redis_location import (
    app_of_task,
    current_execution_id,
    given_store,
    needed_redis_url,
)
from capsule_tasks.errors import CapsuleError, StepMisused, StorageError
from capsule_tasks.settings import StepSettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, drive, drive_blocking
from capsule_tasks.storage.executions.steps import StepCore, StepDone, check_name, fingerprint_of

P = ParamSpec("P")
T = TypeVar("T")

NoEffect = tuple[type[BaseException], ...]


@overload
def step(
    name: str,
    function: Callable[..., Coroutine[Any, Any, T]],
    /,
    *args: Any,
    retry: bool = False,
    no_effect: NoEffect = (),
    execution_id: str | None = None,
    **kwargs: Any,
) -> Awaitable[T]: ...


@overload
def step(
    name: str,
    function: Callable[..., T],
    /,
    *args: Any,
    retry: bool = False,
    no_effect: NoEffect = (),
    execution_id: str | None = None,
    **kwargs: Any,
) -> T: ...


def step(
    name: str,
    function: Callable[..., Any],
    /,
    *args: Any,
    retry: bool = False,
    no_effect: NoEffect = (),
    execution_id: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call the function once for this task, and return what it gave, then and ever after.

    When the task is delivered or retried again, a step that was made gives its recorded output
    without being made. One that was begun and did not end, because its process was lost or it
    raised, raises EffectUncertain: nobody knows whether it happened. `retry=True` says that making
    it twice does no harm; `no_effect` names the errors that say that it did not happen.

    For a coroutine function the result is awaited. Within a task each step has a name of its own.
    The arguments `retry`, `no_effect` and `execution_id` are never the function's: use
    `functools.partial` for those.
    """
    settings = StepSettings(prefix=retention_settings(app_of_task()).prefix)
    owner = Steps(execution_id=execution_id, settings=settings)
    return owner.step(name, function, *args, retry=retry, no_effect=no_effect, **kwargs)


class Steps:
    """Steps of one execution, kept at a URL or in a store; `step` uses the app's Redis."""

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
        function: Callable[..., Any],
        /,
        *args: Any,
        retry: bool = False,
        no_effect: NoEffect = (),
        **kwargs: Any,
    ) -> Any:
        """As the function `step`."""
        check_name(name)
        if not callable(function):
            raise StepMisused(name, f"it is given a function and its arguments, not {function!r}")
        if _has_code(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            raise StepMisused(name, "a generator does nothing when it is called; give a function")
        _check_policy(name, retry, no_effect)
        # Found here and not where it is awaited: another task may be the current one by then.
        core = StepCore(self._found_execution(name), self._settings)
        call = functools.partial(function, *args, **kwargs)
        about = (name, fingerprint_of(args, kwargs), retry, no_effect)
        if _is_async(function):
            return _made_async(core, self._async_store(), call, *about)
        return _made(core, self._sync_store(), call, *about)

    def _found_execution(self, name: str) -> str:
        given = self._execution_id
        found = current_execution_id() if given is None else given
        if found is None:
            raise StepMisused(name, "no task is running here; give an execution_id")
        return found

    def _async_store(self) -> AsyncStore:
        store: AsyncStore = self._kept_in(AsyncConnections)
        return store

    def _sync_store(self) -> SyncStore:
        store: SyncStore = self._kept_in(SyncConnections)
        return store

    def _kept_in(self, kind: Callable[[str], Any]) -> Any:
        store = self._store or given_store() or needed_redis_url()
        return _shared(kind, store) if isinstance(store, str) else store


def _check_policy(name: str, retry: object, no_effect: object) -> None:
    """Before anything is made: afterwards, nobody could tell what such a policy means."""
    if not isinstance(retry, bool):
        raise StepMisused(name, f"retry is True or False, not {retry!r:.100}")
    errors = no_effect if isinstance(no_effect, tuple) else (None,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in errors):
        raise StepMisused(name, f"no_effect is a tuple of errors' types, not {no_effect!r:.100}")


def _made(
    core: StepCore,
    store: SyncStore,
    call: Callable[[], Any],
    name: str,
    fingerprint: str,
    retry: bool,
    no_effect: NoEffect,
) -> Any:
    not_made: NoEffect = (StepMisused, *no_effect)
    begun = drive_blocking(core.start(name, fingerprint, retry=retry), store)
    if isinstance(begun, StepDone):
        return begun.value
    try:
        value = call()
        if inspect.isawaitable(value):
            _refuse_awaitable(name, value)
    except not_made:
        drive_blocking(core.undo(begun), store)
        raise
    except BaseException as error:
        try:
            drive_blocking(core.fail(begun, _told(error)), store)
        except StorageError as storage:
            error.add_note(f"that the step {name!r} failed could not be recorded: {storage}")
        raise
    try:
        return drive_blocking(core.finish(begun, value), store)
    except CapsuleError:
        raise
    except BaseException:
        # A cancel or a soft time limit came too late for the step, so what it gave is kept first.
        drive_blocking(core.finish(begun, value), store)
        raise


async def _made_async(
    core: StepCore,
    store: AsyncStore,
    call: Callable[[], Awaitable[Any]],
    name: str,
    fingerprint: str,
    retry: bool,
    no_effect: NoEffect,
) -> Any:
    begun = await drive(core.start(name, fingerprint, retry=retry), store)
    if isinstance(begun, StepDone):
        return begun.value
    try:
        value = await call()
    except no_effect:
        await drive(core.undo(begun), store)
        raise
    except BaseException as error:
        try:
            await drive(core.fail(begun, _told(error)), store)
        except StorageError as storage:
            error.add_note(f"that the step {name!r} failed could not be recorded: {storage}")
        raise
    return await _unhurried(drive(core.finish(begun, value), store))


async def _unhurried(finishing: Coroutine[Any, Any, T]) -> T:
    """Its outcome, also for a caller who is cancelled meanwhile: who hears of that afterwards."""
    task = asyncio.ensure_future(finishing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if lost := task.exception():
            cancelled.add_note(f"and what it had given could not be kept: {lost}")
        raise cancelled
    return task.result()


def _told(error: BaseException) -> str:
    """The kind of an error and not its text, which may hold what should not be stored."""
    return f"it raised {type(error).__qualname__}"


def _is_async(function: Callable[..., Any]) -> bool:
    return _has_code(function, inspect.iscoroutinefunction)


def _has_code(function: Callable[..., Any], *kinds: Callable[[Any], bool]) -> bool:
    """Whether what a call of it would run is of one of these kinds."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004  its code is looked at
    return any(kind(function) or kind(call) for kind in kinds)


def _refuse_awaitable(name: str, value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()
    raise StepMisused(name, "it returned an awaitable; give the coroutine function itself")


_connections: dict[tuple[Any, str], Any] = {}


def _shared(kind: Callable[[str], T], url: str) -> T:
    """One set of connections for each Redis and process; they see to forks and loops themselves.

    Without a lock, which a fork could find held: two threads may make one each, and keep the first.
    """
    found: T = _connections.get((kind, url)) or _connections.setdefault((kind, url), kind(url))
    return found
