"""Stopping an execution: an exception, raised in the main thread, inside the right frames only.

The control thread aims a request at one execution and sends a real signal to the main thread, so
that a sleep or a read is cut short. The handler raises only if the interrupted stack leads to the
execution's own entry frame and no frame of this package stands between: never in the machinery,
never in another execution. Until a request has been delivered the signal is sent again, a little
later each time; that also covers a handler that could not run (deep recursion) and an exception
that was swallowed where Python can only report it (`__del__`).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from capsule_tasks.child.registry import Execution, Hit, Stage
from capsule_tasks.child.stopping import backjumps
from capsule_tasks.child.stopping.condition import Gate
from capsule_tasks.child.stopping.deferred_stop import INTERRUPTIBLE, landing
from capsule_tasks.errors import ExecutionCancelled

SIGNAL = signal.SIGURG
"""Ignored by default, so a process that outlives its handler is not hurt by it."""

_FIRST_RETRY_S = 0.001
_LAST_RETRY_S = 0.05
_INTERNAL = "capsule_tasks.child."
_ENTRY = "enter_"
"""How functions of this package are named in which user code runs and may be stopped."""
_SAFE_INNERMOST = Gate.wait.__code__
_PURE_MODULES = frozenset(
    {"capsule_tasks.child.executors.outcomes", "capsule_tasks.child.executors.checkpoints"}
)
"""Modules of entry frames that call user code further down and keep no state of their own."""
_uninterruptible: set[CodeType] = set()


def uninterruptible(*functions: Any) -> None:
    """Never stop between two statements of these functions; what they call is stopped as usual."""
    _uninterruptible.update(function.__code__ for function in functions)


class Request:
    """One exception on its way into one execution."""

    __slots__ = ("delay_s", "delivered", "execution", "hit", "raised_id", "retry_at")

    def __init__(self, execution: Execution, hit: Hit) -> None:
        self.execution = execution
        self.hit = hit
        self.delivered = False
        self.raised_id = 0
        self.delay_s = _FIRST_RETRY_S
        self.retry_at = time.monotonic() + self.delay_s


class Interrupter:
    """Delivers requests to the main thread. Made there; `aim` and `tick` belong to control."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._main = threading.main_thread().ident or 0
        self._current: Callable[[], Execution | None] = lambda: None
        self._report_unraisable = sys.unraisablehook

    def install(self, current: Callable[[], Execution | None]) -> None:
        """Take over the signal; `current` names the execution that has the main thread."""
        self._current = current
        landing.connect(self._raise_in)
        signal.signal(SIGNAL, lambda _, frame: self._raise_in(frame))
        sys.unraisablehook = self._on_unraisable

    def aim(self, execution: Execution, hit: Hit) -> Request:
        """Have `hit()` raised in `execution`. A second request for it replaces the first."""
        backjumps.prepare()
        request = Request(execution, hit)
        self._requests[execution.id] = request
        if execution.stage is Stage.ENDED:  # meanwhile, and it may have called `forget` already
            self.forget(execution)
            return request
        self._fire()
        return request

    def forget(self, execution: Execution) -> None:
        """The execution is over; nothing may be raised for it any more."""
        self._requests.pop(execution.id, None)

    def tick(self, now: float) -> float | None:
        """Send again what is due; when to call next, or None."""
        pending = [r for r in list(self._requests.values()) if not r.delivered]
        if not pending:
            return None
        due = [request for request in pending if request.retry_at <= now]
        for request in due:
            request.delay_s = min(request.delay_s * 2, _LAST_RETRY_S)
            request.retry_at = now + request.delay_s
        if due:
            self._fire()
        return min(request.retry_at for request in pending)

    def _fire(self) -> None:
        signal.pthread_kill(self._main, SIGNAL)

    def _raise_in(self, frame: FrameType | None) -> None:
        """Raise what is due for the code that `frame` belongs to, now or as soon as it may be."""
        execution = self._current()
        if execution is None:
            return
        request = self._requests.get(execution.id)
        if request is None or request.delivered:
            return
        if not self.is_inside(frame):
            landing.pending = True
            return
        if frame is not None and backjumps.is_at_jump(frame):
            backjumps.after_jump(frame, lambda: self._deliver(request))
        else:
            self._deliver(request)

    def _deliver(self, request: Request) -> None:
        if request.delivered:
            return
        request.delivered = True
        error = request.hit()
        if error is not None:
            request.raised_id = id(error)
            raise error

    def is_inside(self, frame: FrameType | None) -> bool:
        """Whether the interrupted stack is the execution's own code, not this package's."""
        waiting = frame is not None and frame.f_code is _SAFE_INNERMOST
        if frame is not None and frame.f_code in _uninterruptible:
            return False
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if type(name) is str and name.startswith(_INTERNAL):
                if frame.f_code.co_name.startswith(_ENTRY):
                    return True
                if not (waiting or frame.f_code in INTERRUPTIBLE or name in _PURE_MODULES):
                    return False
            frame = frame.f_back
        return False

    def _on_unraisable(self, report: Any) -> None:
        if isinstance(report.exc_value, ExecutionCancelled):
            for request in list(self._requests.values()):
                if request.raised_id == id(report.exc_value):
                    request.delivered = False
            self._fire()
            return
        self._report_unraisable(report)
