"""Celery's tracer for code: it ends the task of an execution whose code has run elsewhere.

The tracer stores the result, calls what is linked and counts chords. It runs on threads of the
worker's main process: never on the loop, because a result backend blocks, and never in the session
of the code, which must not know how to reach a backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.trace import build_tracer
from celery.utils.saferepr import saferepr
from kombu.serialization import dumps, loads, prepare_accept_content

from capsule_tasks.child.executors.outcomes import repr_of
from capsule_tasks.child.executors.tasks import Tracer
from capsule_tasks.client.code import CODE_TASK, outcome_of_code
from capsule_tasks.client.sessions.as_task import SESSION_TASK
from capsule_tasks.errors import CodeFailed
from capsule_tasks.protocol.messages import Error, Result, TaskCall, TaskResult, Terminal

_THREADS = 8
"""Ends that are stored at the same time."""


def _failure(end: Error) -> CodeFailed:
    """Notes that are not of the exception itself say which limit it means."""
    added = [f"{note}\n" for note in end.notes if note not in end.traceback]
    return CodeFailed(end.type, end.message, "".join((end.traceback, *added)), str(end.kind))


class CodeTracer:
    """Threads, each with a tracer of its own: result backends may belong to a thread."""

    def __init__(self, app: Any, hostname: str) -> None:
        self._app = app
        self._hostname = hostname
        self._local = threading.local()
        self.threads = ThreadPoolExecutor(_THREADS, "capsule-code-tracer")

    def trace(self, call: TaskCall, outcome: Callable[[], Any]) -> TaskResult:
        """Everything that Celery does around a task which returns or raises this outcome."""
        token = outcome_of_code.set(outcome)
        try:
            return self._tracer().enter_call(call.task_id, call)
        finally:
            outcome_of_code.reset(token)

    def outcome(self, end: Terminal) -> Callable[[], Any]:
        """A function that returns or raises, in the task, what the code did."""

        def give() -> Any:
            if isinstance(end, Error):
                raise _failure(end)
            assert isinstance(end, Result)
            return storable(self._app, end.value)

        return give

    def _tracer(self) -> Tracer:
        tracer: Tracer | None = getattr(self._local, "tracer", None)
        if tracer is None:
            app = self._app
            traces = {
                name: build_tracer(name, app.tasks[name], app.loader, self._hostname, app=app)
                for name in (CODE_TASK, SESSION_TASK)
            }
            tracer = self._local.tracer = Tracer(
                {name: SimpleNamespace(__trace__=trace) for name, trace in traces.items()},
                loads,
                prepare_accept_content(app.conf.accept_content),
                self._hostname,
                is_async=False,
                soft_limit=SoftTimeLimitExceeded,
                send_shutdown=lambda: None,
            )
        return tracer


def storable(app: Any, value: Any) -> Any:
    """Plain data as it is, or its repr if the app's result serializer cannot write it."""
    try:
        saferepr(value)  # Celery logs it, and Python writes no number of 5,000 digits
        dumps(value, app.conf.result_serializer)
    except Exception:  # noqa: BLE001 - a serializer of anybody's
        return repr_of(value)
    return value
