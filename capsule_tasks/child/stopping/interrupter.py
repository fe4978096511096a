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

import functools
import sched
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from opcode import opmap
from types import CodeType, FrameType
from typing import Any

import msgspec

from capsule_tasks.child.registry import Execution, PendingStop, Stage
from capsule_tasks.child.stopping.deferred_stop import (
    INTERRUPTIBLE,
    InterruptibleCondition,
    deferred_stop,
)
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
    {
        "capsule_tasks.child.executors.outcomes",
        "capsule_tasks.child.checkpoints.saving",
        "capsule_tasks.child.checkpoints.restoring",
    }
)
"""Modules of entry frames that call user code further down and have no state of their own."""
_uninterruptible: set[CodeType] = set()
_BACKWARD_JUMPS = frozenset(number for name, number in opmap.items() if "JUMP_BACKWARD" in name)


def uninterruptible(*functions: Any) -> None:
    """Never stop between two statements of these functions; what they call is stopped as usual."""
    _uninterruptible.update(function.__code__ for function in functions)


class StopRequest(msgspec.Struct, eq=False):
    """One exception on its way into one execution."""

    execution: Execution
    make_error: PendingStop
    is_delivered: bool = False
    raised_id: int = 0


class Interrupter:
    """Raises stops in the main thread. Control alone calls `request_stop`, and runs the timers."""

    def __init__(self, timers: sched.scheduler) -> None:
        self._timers = timers
        self._requests: dict[str, StopRequest] = {}
        self._main = threading.main_thread().ident or 0
        self._current: Callable[[], Execution | None] = lambda: None
        self._report_unraisable = sys.unraisablehook

    def install(self, current: Callable[[], Execution | None]) -> None:
        """Take over the signal; `current` names the execution that has the main thread."""
        self._current = current
        deferred_stop.main, deferred_stop.raise_in = self._main, self._raise_in
        signal.signal(SIGNAL, lambda _, frame: self._raise_in(frame))
        sys.unraisablehook = self._on_unraisable
        _patch_subprocess()

    def request_stop(self, execution: Execution, make_error: PendingStop) -> StopRequest:
        """Have `make_error()` raised in `execution`. A second request replaces the first."""
        request = StopRequest(execution, make_error)
        self._requests[execution.id] = request
        # The main thread may have ended the execution, and called `forget`, before the request was
        # stored: then no other thread removes the request.
        if execution.stage is Stage.ENDED:
            self.forget(execution)
        self._signal_until_delivered(request)
        return request

    def forget(self, execution: Execution) -> None:
        """Raise nothing more in this execution: it has ended."""
        self._requests.pop(execution.id, None)

    def _signal_until_delivered(
        self, request: StopRequest, retry_delay_s: float = _MIN_RETRY_S
    ) -> None:
        if request.is_delivered or self._requests.get(request.execution.id) is not request:
            return
        self._send_signal()
        again = (request, min(retry_delay_s * 2, _MAX_RETRY_S))
        self._timers.enter(retry_delay_s, 0, self._signal_until_delivered, again)

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
        if frame is not None and _is_at_jump(frame):
            _after_jump(frame, lambda: self._deliver(request))
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
                self._signal_until_delivered(request)


def _patch_subprocess() -> None:
    """Have a stop leave no process behind, and not wait for one.

    A stop that is raised between the fork and the assignment of the Popen object would lose the
    process. So these steps are not interrupted; for `__init__` the frame of `start_uninterrupted`
    sees to that. After an interrupt Popen waits 0.25 s for the process to react to the same Ctrl-C;
    the signal of a session reaches this process alone.
    """
    popen: Any = subprocess.Popen
    start = popen.__init__

    @functools.wraps(start)
    def start_uninterrupted(*args: Any, **options: Any) -> None:
        start(*args, **options)

    popen.__init__ = start_uninterrupted
    popen._sigint_wait_secs = property(lambda _: 0, lambda *_: None)  # noqa: SLF001 - no public knob
    uninterruptible(subprocess.run, subprocess.call, popen.__enter__)


# --- jumps backwards ---------------------------------------------------------------------------
#
# A busy loop handles a signal at its jump backwards. CPython (3.11 to 3.13, each for other loops)
# takes an exception that a handler raises there for one raised before the loop. If the loop is the
# first statement of a `try`, its `finally` and `except` are then skipped. An exception that is
# raised one instruction later finds them.


def _is_at_jump(frame: FrameType) -> bool:
    """Whether a handler that interrupted `frame` should let one instruction pass."""
    # A debugger's trace function would be replaced, and lost.
    return frame.f_code.co_code[frame.f_lasti] in _BACKWARD_JUMPS and sys.gettrace() is None


def _after_jump(frame: FrameType, act: Callable[[], None]) -> None:
    """Have `act` called before the next instruction of `frame`; it may raise into it."""

    def on_event(_frame: FrameType, _event: str, _arg: Any) -> None:
        sys.settrace(None)
        frame.f_trace = None
        frame.f_trace_opcodes = False
        act()

    frame.f_trace_opcodes = True
    frame.f_trace = on_event
    sys.settrace(lambda *_: None)
