"""A Celery app in a child. Its tasks are run by Celery's own tracer.

A child that was forked from the worker has the app already (`keep_app_for_forks`). A fresh
interpreter imports the app, applies the settings that only the worker's code made, and refuses to
start if a task is missing: found out by the first message of that task, it would be too late.
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
from capsule_tasks.child.executors.outcomes import (
    message_of,
    notes_of,
    repr_of,
    shortened,
    traceback_of,
)
from capsule_tasks.child.executors.tasks import AsyncTaskExecutor, BlockingTaskExecutor
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.child.io.log_handlers import log_as_session, reopen_handlers
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Registry
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.failures import Failure, Raised
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.protocol.values import NotCarried, sendable, to_wire
from capsule_tasks.settings import TaskChildSettings

if "celery" not in sys.modules:
    # Before Celery is imported: it decides by this how `@app.task` binds in a fresh interpreter.
    os.environ["FORKED_BY_MULTIPROCESSING"] = "1"

log = logging.getLogger("capsule_tasks.child")

_MAX_BACKEND_CONNECTIONS = 20
"""Coroutines of a child that store their results at the same time."""
_MAX_TEXT = 64 * 1024
_MAX_TRACEBACK = 512 * 1024
_STATE = ("when", "requeue", "is_eager")
"""Attributes of Celery's own exceptions that Celery reads in the worker's main process."""

_kept_app: list[Any] = []


class AppNotUsable(Exception):
    """This child cannot have the app as the worker has it."""


def keep_app_for_forks(app: Any) -> None:
    """Have children that are forked from now on run the tasks of `app`, as it is at the fork."""
    _kept_app[:] = [app]


def make_executor(
    settings: TaskChildSettings,
    registry: Registry,
    outbox: Outbox,
    end_reporter: EndReporter,
    capture: Capture,
    interrupter: Interrupter,
) -> BlockingTaskExecutor | AsyncTaskExecutor:
    """An executor whose app is ready to work; `worker_process_init` has been sent."""
    from celery.app import trace

    if _kept_app:
        app = _kept_app[0]
    else:
        with capture.without_capture():
            app = _import_app(settings)
    _prepare_child(app, settings, capture)
    _warn_about_missing_settings(app, settings)
    log_as_session(trace.logger, capture)
    tracer = CeleryTracer(app, settings.hostname)
    parts = (registry, outbox, end_reporter, capture)
    own: dict[str, Any] = {"interrupter": interrupter, "tracer": tracer}
    executor: BlockingTaskExecutor | AsyncTaskExecutor
    if settings.kind == "async":
        _share_backend(app)
        executor = AsyncTaskExecutor(*parts, limit=settings.async_limit, **own)
        _bridge_coroutines(app, executor.bridge)
    else:
        executor = BlockingTaskExecutor(*parts, **own)
    tracer.prepare()
    return executor


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


def _prepare_child(app: Any, settings: TaskChildSettings, capture: Capture) -> None:
    """Make this process a pool process of Celery, as its own pools do."""
    from billiard.process import current_process
    from billiard.util import _run_after_forkers, _run_finalizers
    from celery import platforms
    from celery._state import _set_task_join_will_block, set_default_app
    from celery.app import trace
    from celery.worker import state

    atexit._clear()  # noqa: SLF001 - the exit handlers of the worker are not this process's
    atexit.register(_run_finalizers)  # one of them flushes the queues of multiprocessing
    _forget_worker_processes(current_process())
    _run_after_forkers()
    _set_task_join_will_block(True)
    platforms.signals.reset("SIGTERM", "SIGHUP", "SIGTTIN", "SIGTTOU", "SIGUSR1")
    platforms.signals.ignore("SIGINT")
    platforms.set_mp_process_title("celeryd", hostname=settings.hostname)
    app.loader.init_worker()
    app.loader.init_worker_process()
    _set_up_logging(app, settings, capture)
    if _kept_app:
        app.set_current()
        set_default_app(app)
        app.finalize()
    else:
        trace.setup_worker_optimizations(app, settings.hostname)
    state.reset_state()


def _share_backend(app: Any) -> None:
    """Have the threads of many tracers store results over one client, a few at a time.

    Celery makes a backend for each thread, and each backend a connection, which takes several times
    as long as a short task.
    """
    from celery.backends.redis import RedisBackend

    backend = app._get_backend()  # noqa: SLF001 - not the worker's backend, whose connections were forked
    if type(backend) is RedisBackend:  # not its subclass for Sentinel, which has its own pools
        backend._ConnectionPool = backend.redis.BlockingConnectionPool  # noqa: SLF001 - of its own
        limit = backend.connparams.get("max_connections") or _MAX_BACKEND_CONNECTIONS
        backend.connparams["max_connections"] = min(limit, _MAX_BACKEND_CONNECTIONS)
        backend.thread_safe = True
        app._backend = backend  # noqa: SLF001 - as Celery itself has it


def _forget_worker_processes(process: Any) -> None:
    """Give this process its own name in logs, and forget the worker's children."""
    import multiprocessing.process as standard

    import billiard.process as patched

    patched._children = set()  # noqa: SLF001 - there is no public way
    standard._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    others: Any = (process, standard.current_process())
    for named in others:
        named._name = f"Session-{os.getpid()}"  # noqa: SLF001 - as above
    threading.main_thread().name = "MainThread"


def _warn_about_missing_settings(app: Any, settings: TaskChildSettings) -> None:
    """Log the settings that a fresh interpreter lacks; a fork has them all."""
    missing = [name for name in settings.unsendable if not app.conf.value_set_for(name)]
    if missing and not _kept_app:
        log.warning(
            "children run without these settings, which the worker's code made, importing %r does "
            "not make, and whose values cannot be sent to a child: %s",
            settings.app,
            ", ".join(missing),
        )


def _set_up_logging(app: Any, settings: TaskChildSettings, capture: Capture) -> None:
    if _kept_app:
        reopen_handlers()
        if "%i" not in (settings.log_file or "").lower():
            return
    app.log.already_setup = False
    app.log.supports_color = lambda *_, **__: settings.log_color
    with capture.without_capture():  # handlers get the streams that they have in the worker
        app.log.setup(settings.log_level, settings.log_file, hostname=settings.hostname)


def _bridge_coroutines(app: Any, bridge: Callable[[Any], Any]) -> None:
    """Have the tracer's call of an `async def` task return its result.

    Celery stores the current task and request by thread. Here they belong to a context, which the
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
            function = getattr(function, "capsule_coroutine", function)  # wrapped by an eager call
            if function is not None and iscoroutinefunction(function):
                setattr(task, name, bridge(function))
        if iscoroutinefunction(type(task).__call__):
            called = type(task).__call__
            task.__class__ = type(
                type(task).__name__,
                (type(task),),
                {"__call__": bridge(called), "__module__": type(task).__module__},
            )


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
        # Objects that exist now stay, and are not scanned again. A full collection starts when
        # young objects are a quarter of the old ones, and the fork has copied the worker's count
        # of old ones: without this the cycles that failed tasks leave behind would pile up.
        gc.freeze()
        gc.collect()

    def soft_limit(self) -> BaseException:
        from billiard.exceptions import SoftTimeLimitExceeded

        error: BaseException = SoftTimeLimitExceeded()
        return error

    def send_shutdown(self) -> None:
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
        text = None if text is None else sendable(str(text))
        return TaskResult(execution_id=execution_id, text=text, runtime_s=runtime_s)

    def enter_trace(self, call: TaskCall) -> tuple[Any, Any, float | None, Any]:
        task = self._tasks[call.name]
        body = call.body.decode("utf-8", "surrogatepass") if call.is_text else call.body
        content = self._loads(body, call.content_type, call.content_encoding, accept=self._accept)
        args, kwargs, embed = _parse_protocol_1(content) if call.protocol == 1 else content
        request = call.request
        request.update(
            {"args": args, "kwargs": kwargs, "hostname": self._hostname, "is_eager": False},
            **embed or {},
        )
        outcome: tuple[Any, Any, float | None, Any] = task.__trace__(
            call.task_id, args, kwargs, request
        )
        return outcome


def _parse_protocol_1(content: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
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
    """An exception as data; never fails, even if the exception cannot be formatted."""
    inner = getattr(error, "exc", None)
    return Failure(
        **_fields(error),
        traceback=traceback_of(error),
        inner=Raised(**_fields(inner)) if isinstance(inner, BaseException) else None,
    )


def _fields(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    return {
        "module": sendable(str(getattr(kind, "__module__", ""))),
        "name": sendable(kind.__qualname__),
        "args": _args(error),
        "message": shortened(message_of(error), _MAX_TEXT),
        "text": shortened(repr_of(error), _MAX_TEXT),
        "notes": notes_of(error),
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
