"""One execution in a worker: the call, its lifecycle, and its reporter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.calls import AnyCall
from capsule_tasks.executions.ends import End
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.messages import Gap, Output

if TYPE_CHECKING:
    from capsule_tasks.executions.lanes import Child, Lane
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter


class Reporter:
    """Tells the sender of an execution what becomes of it: called on the loop, in this order.

    This one reports nothing; subclasses override what their sender wants to know.
    """

    def accepted(self, pid: int, at: float, *, defers_ack: bool) -> None:
        """A child runs the execution. With `defers_ack`, `acknowledge` follows."""

    def acknowledge(self) -> None:
        """The message may be acknowledged now."""

    def soft_limit(self) -> None:
        """SoftTimeLimitExceeded was raised in the task."""

    def free_slot(self) -> None:
        """The next execution may come."""

    def ended(self, end: End, *, frees_slot: bool) -> None:
        """The last call: everything that belongs to the execution may be forgotten."""

    def task_frames(self, stack: str) -> str:
        """The stack without the frames that are not the task's."""
        return stack


UNREPORTED = Reporter()
"""The reporter of an execution whose end was reported, or need not be."""


class Execution(msgspec.Struct, eq=False):
    """Carries what each adapter knows about one execution; only the lifecycle decides."""

    call: AnyCall
    life: Lifecycle
    reporter: Reporter = UNREPORTED
    lane: Lane | None = None
    """Where the execution waits for a child; None if it will not run."""
    has_output: bool = False
    child: Child | None = None
    """The child that has the execution now."""
    pid: int = 0
    """The process of the child that the execution was sent to last."""
    child_execution_id: str = ""
    """The id that the child knows: followed by `~` if it has the same message twice."""
    stream: StreamWriter | None = None
    timers: dict[Timer, asyncio.TimerHandle] = {}

    def resume_output(self) -> None:
        """There is room for output of the execution again."""
        if self.child is not None:
            self.child.session.resume_output(self.child_execution_id)

    def __repr__(self) -> str:
        return f"<Execution {self.call.name}[{self.call.task_id}] {self.life.run.name}>"


class OutputListener(Protocol):
    """Receives the output of executions, for the worker's own log."""

    def write(self, source: Execution, output: Output | Gap) -> None: ...

    def forget(self, source: Execution) -> None:
        """The execution is over: a line without a newline ends here."""
