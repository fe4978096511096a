"""The executions a child knows, and where each of them stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from capsule_tasks.child.executors.cells import Cell
from capsule_tasks.child.io.output import Sink
from capsule_tasks.protocol.messages import Cancel, Checkpoint, ErrorKind, Execute, Restore

if TYPE_CHECKING:
    import asyncio

Work = Execute | Checkpoint | Restore
Hit = Callable[[], BaseException | None]
"""Called on the main thread: what to raise in an execution, or None if that was done already."""
_REMEMBERED_CANCELS = 1000


class Stage(Enum):
    """waiting → running → ended; a waiting one may end at once."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class Execution:
    """One accepted piece of work."""

    __slots__ = (
        "ack_by",
        "cancelled_for",
        "cancels",
        "cell",
        "coroutine",
        "cpu_begun_s",
        "hits",
        "id",
        "interrupted",
        "queued",
        "sink",
        "stage",
        "stop_kind",
        "stop_reason",
        "task",
        "work",
    )

    def __init__(self, execution_id: str, work: Work, sink: Sink) -> None:
        self.id = execution_id
        self.work = work
        self.sink = sink
        self.stage = Stage.WAITING
        self.queued = False
        self.ack_by = 0.0
        """Until when its acknowledgement may wait for its result."""
        self.cpu_begun_s = 0.0
        self.cancels: list[Cancel] = []
        self.stop_kind: ErrorKind | None = None
        self.stop_reason = ""
        self.interrupted = False
        self.hits: list[Hit] = []
        self.cancelled_for: BaseException | None = None
        self.cell: Cell | None = None
        self.task: asyncio.Task[None] | None = None
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """The one that `task` drives by hand, so that nothing says that it awaits it."""

    @property
    def may_wait(self) -> bool:
        """Whether its turn may come later; else it is answered `busy`."""
        return getattr(self.work, "on_busy", "wait") == "wait"

    @property
    def seq(self) -> int | None:
        """Of its `Execute`, if it came by one."""
        return self.work.seq if isinstance(self.work, Execute) else None


class Registry:
    """All executions between acceptance and end. Every change of stage happens under its lock."""

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
        return [e for e in list(self._known.values()) if e.stage is Stage.RUNNING]

    def all(self) -> list[Execution]:
        return list(self._known.values())

    def add(self, execution: Execution) -> None:
        with self.lock:
            self._known[execution.id] = execution
            self.waiting.append(execution)

    def note_seq(self, seq: int) -> None:
        self._last_seq = max(self._last_seq, seq)

    def target_of(self, cancel: Cancel) -> Execution | None:
        """The execution to be cancelled, not a later one that has its name."""
        execution = self._known.get(cancel.execution_id)
        if execution is None or not isinstance(execution.work, Execute):
            return execution
        return execution if execution.work.seq == cancel.seq else None

    def remember_early_cancel(self, cancel: Cancel) -> bool:
        """Keep a cancel that overtook its execute; False if that execution is over instead."""
        if cancel.seq <= self._last_seq:
            return False
        if len(self._early) >= _REMEMBERED_CANCELS:
            self._early.pop(next(iter(self._early)))
        self._early.setdefault(cancel.seq, []).append(cancel)
        return True

    def take_early_cancels(self, seq: int) -> list[Cancel]:
        """The cancels that overtook this execute."""
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
            execution.cpu_begun_s = time.process_time()
            self.waiting.remove(execution)
            return True

    def claim_main_thread(self, execution: Execution) -> list[Execution]:
        """From now on nothing else runs; those that would not wait for that are returned."""
        with self.lock:
            self.blocking = execution
        return self.unwilling()

    def unwilling(self) -> list[Execution]:
        """Those in the queue that were not to wait for anything."""
        with self.lock:
            return [execution for execution in self.waiting if not execution.may_wait]

    def note_cancel(self, execution: Execution, cancel: Cancel) -> bool:
        """Have `cancel` answered when the execution ends; False if it has ended."""
        with self.lock:
            if execution.stage is Stage.ENDED:
                return False
            execution.cancels.append(cancel)
            return True

    def end(self, execution: Execution, expected: Stage) -> bool:
        """→ ended, exactly once: only the caller that gets True may say how it ended."""
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
