"""The executions that a child has accepted, and the stage of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec

from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.protocol.messages import Cancel, Checkpoint, ErrorKind, Execute, Restore

if TYPE_CHECKING:
    import asyncio

    from capsule_tasks.child.executors.code import Cell

PendingStop = Callable[[], BaseException | None]
"""Called on the main thread: the exception to raise in an execution, or None if that is done."""
_MAX_EARLY_CANCELS = 1000


class Stage(Enum):
    """waiting → running → ended; a waiting execution may end at once."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class Execution(msgspec.Struct, eq=False):
    """One accepted piece of work."""

    id: str
    work: Execute | Checkpoint | Restore
    sink: OutputSink
    stage: Stage = Stage.WAITING
    queued: bool = False
    ack_by: float = 0.0
    """Until when its acknowledgement may wait for its result."""
    cpu_at_start_s: float = 0.0
    cancels: list[Cancel] = []
    stop_kind: ErrorKind | None = None
    stop_reason: str = ""
    interrupted: bool = False
    pending_stops: list[PendingStop] = []
    cancelled_for: BaseException | None = None
    pieces: list[bytes] = []
    """The data of a checkpoint, for an execution that restores one."""
    cell: Cell | None = None
    task: asyncio.Task[Any] | None = None
    coroutine: Coroutine[Any, Any, Any] | None = None
    """The coroutine that `task` drives by hand; the task does not seem to await it."""

    @property
    def may_wait(self) -> bool:
        """Whether it may start later; else it is answered `busy`."""
        return getattr(self.work, "on_busy", "wait") == "wait"

    @property
    def seq(self) -> int | None:
        """The number of its `Execute`; None for a checkpoint or a restore."""
        return self.work.seq if isinstance(self.work, Execute) else None


class Registry:
    """All executions between acceptance and end. The lock guards every change of stage."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Execution] = []
        self.blocking: Execution | None = None
        self._known: dict[str, Execution] = {}
        self._early: dict[int, list[Cancel]] = {}
        self._last_seq = 0

    def get(self, execution_id: str) -> Execution | None:
        return self._known.get(execution_id)

    def running(self) -> list[Execution]:
        return [e for e in self.all() if e.stage is Stage.RUNNING]

    def all(self) -> list[Execution]:
        return list(self._known.values())

    def add(self, execution: Execution) -> None:
        with self.lock:
            self._known[execution.id] = execution
            self.waiting.append(execution)

    def target_of(self, cancel: Cancel) -> Execution | None:
        """The execution to cancel, unless a later execution has its id by now."""
        execution = self._known.get(cancel.execution_id)
        return execution if execution and execution.seq in (None, cancel.seq) else None

    def remember_early_cancel(self, cancel: Cancel) -> bool:
        """Remember a cancel that overtook its execute; False if the execution has ended instead."""
        if cancel.seq <= self._last_seq:
            return False
        if len(self._early) >= _MAX_EARLY_CANCELS:
            self._early.pop(next(iter(self._early)))
        self._early.setdefault(cancel.seq, []).append(cancel)
        return True

    def take_early_cancels(self, seq: int) -> list[Cancel]:
        """The cancels that overtook this execute. A later cancel for it is not early."""
        self._last_seq = max(self._last_seq, seq)
        return self._early.pop(seq, [])

    def first_waiting(self) -> Execution | None:
        with self.lock:
            return self.waiting[0] if self.waiting else None

    def start(self, execution: Execution) -> bool:
        """Waiting → running; False if it ended meanwhile."""
        with self.lock:
            if execution.stage is not Stage.WAITING:
                return False
            execution.stage = Stage.RUNNING
            execution.cpu_at_start_s = time.process_time()
            self.waiting.remove(execution)
            return True

    def claim_main_thread(self, execution: Execution) -> list[Execution]:
        """Let nothing else start; the waiting executions to refuse, as they must not wait."""
        with self.lock:
            self.blocking = execution
        return self.refusing_to_wait()

    def refusing_to_wait(self) -> list[Execution]:
        """The waiting executions that were to start at once or not at all."""
        with self.lock:
            return [execution for execution in self.waiting if not execution.may_wait]

    def add_cancel(self, execution: Execution, cancel: Cancel) -> bool:
        """Have `cancel` answered when the execution ends; False if it has ended."""
        with self.lock:
            if execution.stage is Stage.ENDED:
                return False
            execution.cancels.append(cancel)
            return True

    def end(self, execution: Execution, expected: Stage) -> bool:
        """→ ended, exactly once: only the caller that gets True sends the terminal message."""
        with self.lock:
            if execution.stage is not expected:
                return False
            execution.stage = Stage.ENDED
            self._known.pop(execution.id, None)
            if execution in self.waiting:
                self.waiting.remove(execution)
            if self.blocking is execution:
                self.blocking = None
            return True
