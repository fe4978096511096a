"""A Celery app in a child. Its tasks are run by Celery's own tracer.

A child that was forked from the worker has the app already (`keep_app_for_forks`). A fresh
interpreter imports the app, applies the settings that only the worker's code made, and refuses to
start if a task is missing: a worker that learns this from a task message would be too late.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.outcomes import message_of
from capsule_tasks.child.executors.tasks import AsyncTaskExecutor, BlockingTaskExecutor
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.io.log_handlers import log_as_session, reopen_handlers
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Registry
from capsule_tasks.child.stopping.interrupts import Interrupter
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.failures import Failure, Raised
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.protocol.values import NotCarried, sendable, to_wire
from capsule_tasks.settings import TaskChildSettings

if "celery" not in sys.modules:
    # Before Celery is imported: it decides by this how `@app.task` binds in a fresh interpreter.
    os.environ["FORKED_BY_MULTIPROCESSING"] = "1"

log = logging.getLogger("capsule_tasks.child")

_STORING_AT_ONCE = 20
"""Coroutines of a child whose results are on their way."""
_MAX_TEXT = 64 * 1024
_MAX_TRACEBACK = 512 * 1024
_MAX_NOTES = 100
_STATE = ("when", "requeue", "is_eager")
"""What Celery reads off its own exceptions in the worker's main process."""

_inherited: list[Any] = []


class AppNotUsable(Exception):
    """The app cannot be had in this child as the worker has it."""


def keep_app_for_forks(app: Any) -> None:
    """Have children forked from now on run the tasks of `app`, as it then is."""
    _inherited[:] = [app]


def make_lane(
    settings: TaskChildSettings,
    registry: Registry,
    outbox: Outbox,
    endings: EndReporter,
    capture: Capture,
    interrupter: Interrupter,
) -> BlockingTaskExecutor | AsyncTaskExecutor:
    """A lane in which the app is ready to work; `worker_process_init` has been sent."""
    from celery.app import trace

    if _inherited:
        app = _inherited[0]
    else:
        with capture.lifted():
            app = _import_app(settings)
    _settle_in(app, settings, capture)
    _tell_missing(app, settings)
    log_as_session(trace.logger, capture)
    tracer = CeleryTracer(app, settings.hostname)
    parts = (registry, outbox, endings, capture, interrupter, tracer)
    lane: BlockingTaskExecutor | AsyncTaskExecutor
    if settings.kind == "async":
        _share_backend(app)
        lane = AsyncTaskExecutor(*parts, limit=settings.async_limit)
        _let_coroutines_run(app, lane.bridge)
    else:
        lane = BlockingTaskExecutor(*parts)
    tracer.prepare()
    return lane


def _import_app(settings: TaskChildSettings) -> Any:
    """The app of a fresh interpreter."""
    from celery.app.utils import find_app

    if not settings.app:
        raise AppNotUsable(
            "the Celery app of this worker belongs to no importable module, and so only a fork of "
            "the worker can run its tasks"
        )
    sys.path.insert(0, os.getcwd())
    app = find_app(settings.app)
    app.conf.update(settings.conf)
    app.loader.import_default_modules()
    app.finalize()
    missing = [name for name in settings.tasks if name not in app.tasks]
    if missing and not settings.is_reloaded:
        raise AppNotUsable(
            f"these tasks are registered in the worker, but not after importing {settings.app!r} "
            f"and what `include` and `imports` name: {', '.join(missing)}"
        )
    return app


def _settle_in(app: Any, settings: TaskChildSettings, capture: Capture) -> None:
    """Make this process a pool process of Celery, as its own pools do."""
    from billiard.process import current_process
    from billiard.util import _run_after_forkers, _run_finalizers
    from celery import platforms
    from celery._state import _set_task_join_will_block, set_default_app
    from celery.app import trace
    from celery.worker import state

    atexit._clear()  # noqa: SLF001 - what the worker registered is the worker's to do
    atexit.register(_run_finalizers)  # such as what sends the rest of a queue
    _forget_worker_processes(current_process())
    _run_after_forkers()
    _set_task_join_will_block(True)
    platforms.signals.reset("SIGTERM", "SIGHUP", "SIGTTIN", "SIGTTOU", "SIGUSR1")
    platforms.signals.ignore("SIGINT")
    platforms.set_mp_process_title("celeryd", hostname=settings.hostname)
    app.loader.init_worker()
    app.loader.init_worker_process()
    _set_up_logging(app, settings, capture)
    if _inherited:
        app.set_current()
        set_default_app(app)
        app.finalize()
    else:
        trace.setup_worker_optimizations(app, settings.hostname)
    state.reset_state()


def _share_backend(app: Any) -> None:
    """Have the threads of many tracers store results over one client, a few at a time.

    Celery makes a backend for each thread, and that a connection, which takes several times as long
    as a short task.
    """
    from celery.backends.redis import RedisBackend

    backend = app._get_backend()  # noqa: SLF001 - one that no process before this has used
    if type(backend) is RedisBackend:  # not one of Sentinels, which has pools of its own
        backend._ConnectionPool = backend.redis.BlockingConnectionPool  # noqa: SLF001 - of its own
        most = backend.connparams.get("max_connections") or _STORING_AT_ONCE
        backend.connparams["max_connections"] = min(most, _STORING_AT_ONCE)
        backend.thread_safe = True
        app._backend = backend  # noqa: SLF001 - as Celery itself has it


def _forget_worker_processes(process: Any) -> None:
    """Give this process a name of its own in logs, and none of the worker's children."""
    import multiprocessing.process as standard

    import billiard.process as patched

    patched._children = set()  # noqa: SLF001 - there is no public way
    standard._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    others: Any = (process, standard.current_process())
    for named in others:
        named._name = f"Session-{os.getpid()}"  # noqa: SLF001 - as above
    threading.main_thread().name = "MainThread"


def _tell_missing(app: Any, settings: TaskChildSettings) -> None:
    """Settings of the worker that this process should have and has not: a fork has them all."""
    missing = [name for name in settings.unsendable if not app.conf.value_set_for(name)]
    if missing and not _inherited:
        log.warning(
            "these settings were made in the worker's code, are not made by importing %r, and have "
            "values that cannot be sent to its children, which go without them: %s",
            settings.app,
            ", ".join(missing),
        )


def _set_up_logging(app: Any, settings: TaskChildSettings, capture: Capture) -> None:
    if _inherited:
        reopen_handlers()
        if "%i" not in (settings.log_file or "").lower():
            return
    app.log.already_setup = False
    app.log.supports_color = lambda *_, **__: settings.log_color
    with capture.lifted():  # as handlers have them in the worker, and in its forks
        app.log.setup(settings.log_level, settings.log_file, hostname=settings.hostname)


def _let_coroutines_run(app: Any, bridge: Callable[[Any], Any]) -> None:
    """Have the tracer's call of an `async def` task return its result.

    Celery keeps the current task and request by thread. Here they belong to a context, which the
    tracer's thread and the coroutine share.
    """
    import contextvars
    from inspect import iscoroutinefunction

    from celery._state import _task_stack

    identity: contextvars.ContextVar[object] = contextvars.ContextVar("capsule_identity")
    CeleryTracer.identity = identity
    thread = threading.get_ident

    def ident() -> object:
        return identity.get(None) or thread()

    _task_stack.__ident_func__ = ident
    for task in app.tasks.values():
        task.request_stack.__ident_func__ = ident
        for name in ("run", "_orig_run"):
            function = getattr(task, name, None)
            function = getattr(function, "capsule_coroutine", function)  # once run eagerly
            if function is not None and iscoroutinefunction(function):
                setattr(task, name, bridge(function))
        if iscoroutinefunction(type(task).__call__):
            called = type(task).__call__
            task.__class__ = type(
                type(task).__name__,
                (type(task),),
                {"__call__": _as_method(bridge(called)), "__module__": type(task).__module__},
            )


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(task: Any, *args: Any, **kwargs: Any) -> Any:
        return function(task, *args, **kwargs)

    return call


class CeleryTracer:
    """Celery's tracer, for one message after another."""

    identity: Any = None
    """Set in a child for coroutines: the context variable that stands for their thread."""

    def __init__(self, app: Any, hostname: str) -> None:
        self._app = app
        self._hostname = hostname

    def prepare(self) -> None:
        """Build the tracer of every task, and tell the app that the process is ready."""
        from celery import signals
        from celery.app.trace import build_tracer
        from kombu.serialization import loads, prepare_accept_content

        app = self._app
        for name, task in app.tasks.items():
            task.__trace__ = build_tracer(name, task, app.loader, self._hostname, app=app)
        self._tasks = app.tasks
        self._loads = loads
        self._accept = prepare_accept_content(app.conf.accept_content)
        signals.worker_process_init.send(sender=self._hostname)
        # What is there now stays, and is looked at no more. A full collection is begun when the
        # young are a quarter of the old, which the copied count of the worker would put off for
        # long: a task that fails leaves a cycle of its traceback behind.
        gc.freeze()
        gc.collect()

    def soft_limit(self) -> BaseException:
        from billiard.exceptions import SoftTimeLimitExceeded

        error: BaseException = SoftTimeLimitExceeded()
        return error

    def farewell(self) -> None:
        from celery import signals

        signals.worker_process_shutdown.send(sender=self._hostname, pid=os.getpid(), exitcode=0)

    def enter_call(self, execution_id: str, call: TaskCall) -> TaskResult:
        if self.identity is not None:
            self.identity.set(object())
        try:
            value, info, runtime_s, text = self.enter_trace(call)
        except ExecutionCancelled:
            raise
        except BaseException as error:
            if self.identity is not None and isinstance(error, asyncio.CancelledError):
                raise  # a coroutine is stopped; of a blocking task it is what the task raised
            failure = describe(error)
            return TaskResult(execution_id=execution_id, failure=failure, escaped_tracer=True)
        if info:
            failure = describe_info(value)
            return TaskResult(execution_id=execution_id, runtime_s=runtime_s, failure=failure)
        said = None if text is None else sendable(str(text))
        return TaskResult(execution_id=execution_id, text=said, runtime_s=runtime_s)

    def enter_trace(self, call: TaskCall) -> tuple[Any, Any, float | None, Any]:
        task = self._tasks[call.name]
        body = call.body.decode("utf-8", "surrogatepass") if call.is_text else call.body
        content = self._loads(body, call.content_type, call.content_encoding, accept=self._accept)
        args, kwargs, embed = _first_protocol(content) if call.protocol == 1 else content
        request = call.request
        request.update(
            {"args": args, "kwargs": kwargs, "hostname": self._hostname, "is_eager": False},
            **embed or {},
        )
        outcome: tuple[Any, Any, float | None, Any] = task.__trace__(
            call.task_id, args, kwargs, request
        )
        return outcome


def _first_protocol(content: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    embed = {name: content.get(name) for name in ("callbacks", "errbacks", "chord")}
    return content.get("args", ()), content.get("kwargs", {}), {**embed, "chain": None}


def describe_info(info: Any) -> Failure:
    """Celery's description of an exception, as data."""
    error = getattr(info.exception, "exc", None)
    is_wrapped = type(info.exception).__name__ == "ExceptionWithTraceback"
    failure = describe(error if is_wrapped and error is not None else info.exception)
    failure.traceback = sendable(str(info.traceback or ""))[-_MAX_TRACEBACK:]
    failure.internal = bool(info.internal)
    return failure


def describe(error: BaseException) -> Failure:
    """An exception as data; never fails, also if the exception cannot say what it is."""
    inner = getattr(error, "exc", None)
    return Failure(
        **_words(error),
        traceback=_traceback(error),
        inner=Raised(**_words(inner)) if isinstance(inner, BaseException) else None,
    )


def _words(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    return {
        "module": sendable(str(getattr(kind, "__module__", ""))),
        "name": sendable(kind.__qualname__),
        "args": _args(error),
        "message": sendable(message_of(error))[:_MAX_TEXT],
        "text": sendable(_repr(error))[:_MAX_TEXT],
        "notes": _notes(error),
        "state": _state(error),
    }


def _args(error: BaseException) -> list[Any] | None:
    try:
        return [to_wire(value) for value in error.args]
    except NotCarried:
        return None


def _state(error: BaseException) -> dict[str, Any]:
    found = {}
    for name in _STATE:
        if (value := getattr(error, name, None)) is not None:
            try:
                found[name] = to_wire(value)
            except NotCarried:
                found[name] = sendable(str(value))
    return found


def _repr(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception as fault:
        return f"<{type(error).__name__} whose repr raised {type(fault).__name__}>"


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    if not isinstance(notes, (list, tuple)):
        return ()
    return tuple(sendable(note)[:_MAX_TEXT] for note in notes[:_MAX_NOTES] if type(note) is str)


def _traceback(error: BaseException) -> str:
    import traceback

    try:
        return sendable("".join(traceback.format_exception(error)))[-_MAX_TRACEBACK:]
    except Exception as fault:
        return f"<no traceback: formatting it raised {type(fault).__name__}>\n"
