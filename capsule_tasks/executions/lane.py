"""The children of one kind, and the queue of work for them."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

from capsule_tasks.errors import CapsuleError
from capsule_tasks.executions.delay import Delay
from capsule_tasks.protocol.messages import Ack, Message, Result, TaskCall, Terminal, Traced
from capsule_tasks.sessions.info import PoolInfo
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.slot import Slot
from capsule_tasks.sessions.subpool import SubPool

log = logging.getLogger("capsule_tasks.executions")

Kind = Literal["blocking", "async"]

_LEAVING: dict[Kind, int] = {"blocking": 1, "async": 9}
"""Children that may be there beside the size, while they finish what they have.

The place of a blocking child is taken until its one task has ended, so that only the process that
is being ended is beside the others. The coroutines of an async child may go on for hours, and those
that wait do not depend on them.
"""
ASSUME_STARTED_AFTER_S = 0.05
"""An idle child that has not acknowledged a task by then counts as having started it, so that
limits and cancels apply. Code that holds the interpreter from its first line, or stops its own
process, keeps the child from acknowledging."""


class Work(Protocol):
    """What is known of a piece of work here. Two are the same only if they are one object."""

    @property
    def call(self) -> TaskCall:
        """What the child is sent."""

    @property
    def is_async(self) -> bool:
        """Whether it runs beside others in one child."""


W = TypeVar("W", bound=Work)
W_contra = TypeVar("W_contra", bound=Work, contravariant=True)


class DispatchListener(Protocol[W_contra]):
    """Hears what becomes of each piece of work; called on the loop, from within the dispatcher."""

    def sent(self, work: W_contra, pid: int, execution_id: str) -> None:
        """The child gets the work now, and knows it as `execution_id`.

        That is the task id, with `~` behind it if the child has the same message twice.
        """

    def refused(self, work: W_contra) -> None:
        """The child takes nothing new: the work is at the front of the queue again."""

    def started(self, work: W_contra, at: float) -> None:
        """The child said so, or it is assumed; at most once, `at` on the monotonic clock.

        If the child has ended before it said anything, this is told right before `finished`: the
        work may have begun.
        """

    def said(self, work: W_contra, message: Message) -> bool | None:
        """Output, Gap, Progress, InputRequest or InputClosed.

        False if there is no room for more output; `read_on` says when there is.
        """

    def finished(self, work: W_contra, end: Terminal, exit_status: int | None) -> None:
        """Exactly once for each `sent`, unless it was refused.

        `exit_status` is that of the child, if the child has ended and the work did not by itself.
        The child is sent its next work when this returns.
        """


@dataclass(eq=False, slots=True)
class Child(Generic[W]):
    """A session of the pool, and the work that was sent to it."""

    kind: Kind
    slot: Slot
    session: Session
    pid: int
    sent: dict[str, Sent[W]] = field(default_factory=dict)
    """By execution id."""


@dataclass(eq=False, slots=True)
class Sent(Generic[W]):
    """A piece of work that a child has."""

    work: W
    child: Child[W]
    execution_id: str
    is_started: bool = False


class Lane(Generic[W]):
    """Sends work in order of arrival to the sessions that `SubPool` chooses, and hears them."""

    def __init__(
        self,
        kind: Kind,
        pool: SubPool,
        capacity: int,
        listener: DispatchListener[W],
        sent: dict[W, Sent[W]],
    ) -> None:
        """`sent` is kept up to date here: all that children have."""
        self.kind: Kind = kind
        self.size = 0
        self.waiting: deque[W] = deque()
        self.children: dict[int, Child[W]] = {}
        """By number of the slot."""
        self._pool = pool
        self._listener = listener
        self._sent = sent
        self._unheard = Delay[Sent[W]](ASSUME_STARTED_AFTER_S, self._on_unheard)
        pool.employ(self, capacity)

    # --- children ------------------------------------------------------------------------------

    def resize(self, size: int) -> None:
        self.size = size
        self._pool.keep(size, self._most)

    def replace_all(self, why: str) -> None:
        self._pool.replace_all(why)

    def doom(self, child: Child[W], why: str) -> None:
        """Send the child nothing new, and replace it."""
        self._pool.doom(child.slot, why)

    def joined(self, slot: Slot, session: Session) -> None:
        self.children[slot.number] = Child(self.kind, slot, session, session.pid or 0)
        self.dispatch()

    def left(self, slot: Slot) -> None:
        self.children.pop(slot.number, None)

    def info(self) -> PoolInfo:
        return self._pool.info()

    @property
    def is_stuck(self) -> bool:
        """Whether work waits and there may be no other child until one has finished; any thread."""
        children = list(self.children.values())
        is_full = len(children) >= self._most and all(child.slot.doomed for child in children)
        return is_full and bool(self.waiting)

    @property
    def _most(self) -> int:
        return self.size + _LEAVING[self.kind]

    # --- sending -------------------------------------------------------------------------------

    def enqueue(self, work: W) -> None:
        self.waiting.append(work)
        self.dispatch()

    def dispatch(self) -> None:
        """Send what waits while there is room for it."""
        waiting = self.waiting
        while waiting:
            slot = self._pool.assign()
            if slot is None:
                return
            self._send(self.children[slot.number], waiting.popleft())

    def _send(self, child: Child[W], work: W) -> None:
        call = work.call
        execution_id = call.task_id
        while execution_id in child.sent:  # the same message, delivered twice
            execution_id += "~"
        sent = Sent(work, child, execution_id)
        child.sent[execution_id] = self._sent[work] = sent
        self._listener.sent(work, child.pid, execution_id)
        try:
            child.session.submit(call, partial(self._on_said, sent), execution_id=execution_id)
        except CapsuleError as error:
            # The child has ended, which its state says a moment later; or it is condemned by a
            # coroutine that does not stop. The work has not begun.
            log.info("a task goes to another session: %s", error)
            del child.sent[execution_id], self._sent[work]
            self.waiting.appendleft(work)
            self._listener.refused(work)
            self._pool.finished(child.slot)
            self._pool.doom(child.slot, str(error))
        else:
            if self.kind == "blocking":
                self._unheard.add(sent)

    # --- hearing -------------------------------------------------------------------------------

    def _on_said(self, sent: Sent[W], message: Message) -> bool | None:
        """False if there is no room for more output of this work."""
        if isinstance(message, Ack):
            self._start(sent, message.accepted_at)
        elif isinstance(message, Terminal):
            self._finish(sent, message)
        else:
            return self._listener.said(sent.work, message)
        return None

    def _start(self, sent: Sent[W], at: float) -> None:
        if not sent.is_started:
            sent.is_started = True
            self._unheard.discard(sent)
            self._listener.started(sent.work, at)

    def _on_unheard(self, unheard: list[Sent[W]]) -> None:
        for sent in unheard:
            if self._sent.get(sent.work) is sent:
                self._start(sent, time.monotonic() - ASSUME_STARTED_AFTER_S)

    def _finish(self, sent: Sent[W], end: Terminal) -> None:
        child = sent.child
        del child.sent[sent.execution_id], self._sent[sent.work]
        exit_status = None
        if isinstance(end, Traced):
            if end.escaped:
                self._pool.doom(child.slot, "a task tried to end the process")
        elif not isinstance(end, Result):
            exit_status = child.session.exit_status
            if exit_status is not None:
                self._start(sent, time.monotonic())
        try:
            self._listener.finished(sent.work, end, exit_status)
        finally:
            self._pool.finished(child.slot)
            self.dispatch()
