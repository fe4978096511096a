"""Stopping an execution: an exception, raised in the main thread, inside user code only.

The control thread requests the stop of one execution and sends a real signal to the main thread, so
that a sleep or a read is cut short. The handler raises only if the interrupted stack leads to the
execution's own entry frame and no other frame of this package stands between: never inside this
package's own work, never in another execution.

The signal is sent again, a little later each time, until the stop has been delivered. A handler may
have found the main thread in code that defers stops, may not have run at all (deep recursion), or
its exception was raised where Python can only report it (`__del__`).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import msgspec

from capsule_tasks.child.registry import Execution, PendingStop, Stage
from capsule_tasks.child.stopping import backjumps
from capsule_tasks.child.stopping.condition import InterruptibleCondition
from capsule_tasks.child.stopping.deferred_stop import INTERRUPTIBLE, deferred_stop
from capsule_tasks.errors import ExecutionCancelled

SIGNAL = signal.SIGURG
"""Ignored by default, so a process that outlives its handler is not hurt by it."""

_MIN_RETRY_S = 0.001
_MAX_RETRY_S = 0.05
_INTERNAL = "capsule_tasks.child."
_ENTRY = "enter_"
"""Prefix of those functions of this package that run user code, where a stop may be raised."""
_WAIT = InterruptibleCondition.wait.__code__
_PURE_MODULES = frozenset(
    {"capsule_tasks.child.executors.outcomes", "capsule_tasks.child.executors.checkpoints"}
)
"""Modules of entry frames that call user code further down and have no state of their own."""
_uninterruptible: set[CodeType] = set()


def uninterruptible(*functions: Any) -> None:
    """Never stop between two statements of these functions; what they call is stopped as usual."""
    _uninterruptible.update(function.__code__ for function in functions)


class StopRequest(msgspec.Struct, eq=False):
    """One exception on its way into one execution."""

    execution: Execution
    make_error: PendingStop
    retry_at: float
    retry_delay_s: float = _MIN_RETRY_S
    is_delivered: bool = False
    raised_id: int = 0


class Interrupter:
    """Raises stops in the main thread. Control alone calls `request_stop` and `retry_due`."""

    def __init__(self) -> None:
        self._requests: dict[str, StopRequest] = {}
        self._main = threading.main_thread().ident or 0
        self._current: Callable[[], Execution | None] = lambda: None
        self._report_unraisable = sys.unraisablehook

    def install(self, current: Callable[[], Execution | None]) -> None:
        """Take over the signal; `current` names the execution that has the main thread."""
        self._current = current
        deferred_stop.connect(self._raise_in)
        signal.signal(SIGNAL, lambda _, frame: self._raise_in(frame))
        sys.unraisablehook = self._on_unraisable

    def request_stop(self, execution: Execution, make_error: PendingStop) -> StopRequest:
        """Have `make_error()` raised in `execution`. A second request replaces the first."""
        backjumps.prepare()
        request = StopRequest(execution, make_error, time.monotonic() + _MIN_RETRY_S)
        self._requests[execution.id] = request
        # The main thread may have ended the execution, and called `forget`, before the request was
        # stored: then no other thread removes the request.
        if execution.stage is Stage.ENDED:
            self.forget(execution)
        else:
            self._send_signal()
        return request

    def forget(self, execution: Execution) -> None:
        """Raise nothing more in this execution: it has ended."""
        self._requests.pop(execution.id, None)

    def retry_due(self, now: float) -> float | None:
        """Signal again for the requests that are due; when to call next, or None."""
        pending = [r for r in list(self._requests.values()) if not r.is_delivered]
        if not pending:
            return None
        due = [request for request in pending if request.retry_at <= now]
        for request in due:
            request.retry_delay_s = min(request.retry_delay_s * 2, _MAX_RETRY_S)
            request.retry_at = now + request.retry_delay_s
        if due:
            self._send_signal()
        return min(request.retry_at for request in pending)

    def _send_signal(self) -> None:
        signal.pthread_kill(self._main, SIGNAL)

    def _raise_in(self, frame: FrameType | None) -> None:
        """Raise the stop of the execution that `frame` belongs to, or defer it."""
        execution = self._current()
        request = self._requests.get(execution.id) if execution is not None else None
        if request is None or request.is_delivered:
            return
        if not self.is_inside(frame):
            deferred_stop.is_pending = True
            return
        if frame is not None and backjumps.is_at_jump(frame):
            backjumps.after_jump(frame, lambda: self._deliver(request))
        else:
            self._deliver(request)

    def _deliver(self, request: StopRequest) -> None:
        if request.is_delivered:
            return
        request.is_delivered = True
        error = request.make_error()
        if error is not None:
            request.raised_id = id(error)
            raise error

    def is_inside(self, frame: FrameType | None) -> bool:
        """Whether the interrupted stack is the execution's own code, not this package's."""
        is_waiting = frame is not None and frame.f_code is _WAIT
        if frame is not None and frame.f_code in _uninterruptible:
            return False
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if type(name) is str and name.startswith(_INTERNAL):
                if frame.f_code.co_name.startswith(_ENTRY):
                    return True
                if not (is_waiting or frame.f_code in INTERRUPTIBLE or name in _PURE_MODULES):
                    return False
            frame = frame.f_back
        return False

    def _on_unraisable(self, report: Any) -> None:
        if not isinstance(report.exc_value, ExecutionCancelled):
            self._report_unraisable(report)
            return
        for request in list(self._requests.values()):
            if request.raised_id == id(report.exc_value):
                request.is_delivered = False
        self._send_signal()
