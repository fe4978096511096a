"""A Celery app in a child. Its tasks are run by Celery's own tracer.

A child that was forked from the worker has the app already (`keep_app_for_forks`). A fresh
interpreter imports the app, applies the settings that only the worker's code made, and refuses to
start if a task is missing: found out by the first message of that task, it would be too late.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import SocketHandler, SysLogHandler, WatchedFileHandler
from typing import Any

from capsule_tasks.child.executors import tasks
from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.executors.threads import BlockingThreads
from capsule_tasks.child.io.capture import Capture
from capsule_tasks.settings import TaskChildSettings

if "celery" not in sys.modules:
    # Before Celery is imported: it decides by this how `@app.task` binds in a fresh interpreter.
    os.environ["FORKED_BY_MULTIPROCESSING"] = "1"

log = logging.getLogger("capsule_tasks.child")

_MAX_BACKEND_CONNECTIONS = 20
"""Coroutines of a child that store their results at the same time."""

_kept_app: list[Any] = []


class AppNotUsable(Exception):
    """This child cannot have the app as the worker has it."""


def keep_app_for_forks(app: Any) -> None:
    """Have children that are forked from now on run the tasks of `app`, as it is at the fork."""
    _kept_app[:] = [app]


def make_executor(settings: TaskChildSettings, capture: Capture, *parts: Any) -> Executor:
    """An executor whose app is ready to work; `worker_process_init` has been sent."""
    from celery.app import trace

    if _kept_app:
        app = _kept_app[0]
    else:
        with capture.without_capture():
            app = _import_app(settings)
    _prepare_child(app, settings, capture)
    _warn_about_missing_settings(app, settings)
    _log_as_session(trace.logger, capture)
    executor: Executor
    if settings.kind == "async":
        _share_backend(app)
        tracer = _make_tracer(app, settings)
        tracers = ThreadPoolExecutor(settings.async_limit, "capsule-tracer")
        threads = BlockingThreads(settings.async_threads)
        executor = tasks.AsyncTaskExecutor(*parts, tracer=tracer, tracers=tracers, threads=threads)
        _bridge_coroutines(app, executor.bridge)
    else:
        executor = tasks.BlockingTaskExecutor(*parts, tracer=_make_tracer(app, settings))
    _finish_start(app, settings.hostname)
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
    from inspect import iscoroutinefunction

    from celery._state import _task_stack

    thread = threading.get_ident

    def ident() -> object:
        return tasks.current_execution.get() or thread()

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


def _make_tracer(app: Any, settings: TaskChildSettings) -> tasks.Tracer:
    from billiard.exceptions import SoftTimeLimitExceeded
    from celery import signals
    from kombu.serialization import loads, prepare_accept_content

    hostname, shutdown = settings.hostname, signals.worker_process_shutdown
    return tasks.Tracer(
        app.tasks,
        loads,
        prepare_accept_content(app.conf.accept_content),
        hostname,
        is_async=settings.kind == "async",
        soft_limit=SoftTimeLimitExceeded,
        send_shutdown=lambda: shutdown.send(sender=hostname, pid=os.getpid(), exitcode=0),
    )


def _finish_start(app: Any, hostname: str) -> None:
    """Build the tracer of every task, and tell the app that the process is ready."""
    from celery import signals
    from celery.app.trace import build_tracer

    for name, task in app.tasks.items():
        task.__trace__ = build_tracer(name, task, app.loader, hostname, app=app)
    signals.worker_process_init.send(sender=hostname)
    # Objects that exist now stay, and are not scanned again. A full collection starts when
    # young objects are a quarter of the old ones, and the fork has copied the worker's count
    # of old ones: without this the cycles that failed tasks leave behind would pile up.
    gc.freeze()
    gc.collect()


# --- log handlers ------------------------------------------------------------------------------


def reopen_handlers() -> None:
    """Close connections that were forked along; each handler opens its own on its next record."""
    for handler in _handlers():
        if isinstance(handler, logging.FileHandler):
            # A handler that opens its file later must not truncate what other processes wrote.
            handler.mode = handler.mode.replace("w", "a")
        elif isinstance(handler, (SocketHandler, SysLogHandler)):
            name = "sock" if isinstance(handler, SocketHandler) else "socket"
            opened = getattr(handler, name, None)
            setattr(handler, name, None)
            if opened is not None:
                with contextlib.suppress(OSError, ValueError):
                    opened.close()


def _log_as_session(logger: logging.Logger, capture: Capture) -> None:
    """Keep what is logged by `logger` out of the running task's output: it is the session's.

    Records pass through filters, formatters and handlers as usual. Only streams that write to
    descriptors 1 and 2, which the parent reads as the task's output, heed `Capture.as_session`.
    """
    streams = list(capture.originals)  # not only handlers may have stored them
    for handler in _handlers():
        if isinstance(handler, WatchedFileHandler):
            with contextlib.suppress(OSError):
                handler.reopenIfNeeded()  # `--logfile=/dev/stderr` is another file in each process
        streams.append(getattr(handler, "stream", None))
    for stream in {id(stream): stream for stream in streams}.values():
        capture.attribute_by_context(stream)
    # The class's method at the time of the call: error reporting libraries replace it.
    kind = type(logger)
    logger.callHandlers = lambda record: capture.as_session(kind.callHandlers, logger, record)  # type: ignore[method-assign]


def _handlers() -> Iterator[Any]:
    """All handlers of this process."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # noqa: SLF001 - the only list of all
        if (handler := reference()) is not None:
            yield handler
