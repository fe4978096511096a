"""Lanes send executions in order of arrival to children; everything runs on the loop."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from capsule_tasks.errors import CapsuleError
from capsule_tasks.executions.background import Delay
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.messages import (
    Ack,
    Code,
    Message,
    Result,
    TaskCall,
    TaskResult,
    Terminal,
)
from capsule_tasks.sessions.pool.plan import Slot
from capsule_tasks.sessions.pool.session_pool import ProfilePool
from capsule_tasks.sessions.session import Session

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

log = logging.getLogger("capsule_tasks.taskpool")

ASSUME_STARTED_AFTER_S = 0.05
"""An idle child that has not acknowledged a task by then counts as having started it, so that
limits and cancels apply. Code that holds the interpreter from its first line, or stops its own
process, keeps the child from acknowledging."""


class Child(msgspec.Struct, eq=False):
    """A session of a lane, and the executions that were sent to it."""

    kind: str
    slot: Slot
    session: Session
    pid: int
    sent: dict[str, Execution] = {}
    """By execution id."""


class Lane:
    """The queue of one kind of child. A subclass knows the children and chooses among them."""

    def __init__(
        self, kind: str, capacity: int, supervisor: Supervisor, sent: dict[Execution, None]
    ) -> None:
        """Each child takes up to `capacity` executions at once.

        `sent` is shared by all lanes: every execution that a child has.
        """
        self.kind = kind
        self.capacity = capacity
        self.waiting: deque[Execution] = deque()
        self.children: dict[int, Child] = {}
        """By number of the slot."""
        self._supervisor = supervisor
        self._sent = sent
        self._unacknowledged = Delay[Execution](ASSUME_STARTED_AFTER_S, self._on_unacknowledged)

    @abstractmethod
    def retire(self, child: Child, reason: str) -> None:
        """Send the child nothing more, and end it once it has finished what it has."""

    @abstractmethod
    def _take_child(self) -> Child | None:
        """A child that has room for one more execution, which is booked; None if there is none."""

    @abstractmethod
    def _release(self, child: Child) -> None:
        """The child has one execution less."""

    # --- the queue -----------------------------------------------------------------------------

    def enqueue(self, execution: Execution) -> None:
        """Send the execution to a child, now or after those that came before."""
        self.waiting.append(execution)
        self.dispatch()

    def remove(self, execution: Execution) -> bool:
        """Take the execution out of the queue; False if it is not there."""
        try:
            self.waiting.remove(execution)
        except ValueError:
            return False
        return True

    def dispatch(self) -> None:
        """Send the executions that wait while a child has room."""
        waiting = self.waiting
        while waiting:
            child = self._take_child()
            if child is None:
                return
            self._send(child, waiting.popleft())

    def _send(self, child: Child, execution: Execution) -> None:
        call = execution.call
        execution_id = call.task_id
        while execution_id in child.sent:  # the same message, delivered twice
            execution_id += "~"
        child.sent[execution_id] = execution
        self._sent[execution] = None
        execution.child, execution.pid = child, child.pid
        execution.child_execution_id = execution_id
        self._supervisor.feed(execution, Lifecycle.on_sent)
        payload: Code | TaskCall
        if isinstance(call, CodeCall):
            payload, timeout_s = Code(source=call.source), call.timeout_s
        else:
            payload, timeout_s = call, None
        try:
            on_message = partial(self._on_message, child, execution)
            child.session.submit(
                payload, on_message, execution_id=execution_id, timeout_s=timeout_s
            )
        except CapsuleError as error:
            # The child has ended, which its state tells a moment later; or a coroutine that does
            # not stop has condemned it. The execution has not started.
            log.info("task goes to another child: the chosen one takes nothing new: %s", error)
            self._forget(child, execution)
            self.waiting.appendleft(execution)
            self._supervisor.feed(execution, Lifecycle.on_send_refused)
            self._release(child)
            self.retire(child, str(error))
        else:
            if self.capacity == 1:
                self._unacknowledged.add(execution)

    def _forget(self, child: Child, execution: Execution) -> None:
        del child.sent[execution.child_execution_id], self._sent[execution]
        execution.child = None

    # --- messages of children ------------------------------------------------------------------

    def _on_message(self, child: Child, execution: Execution, message: Message) -> bool | None:
        """False if there is no room for more output of this execution."""
        if isinstance(message, Ack):
            self._unacknowledged.discard(execution)
            self._supervisor.feed(execution, Lifecycle.on_child_started, message.accepted_at)
        elif isinstance(message, Terminal):
            self._finish(child, execution, message)
        else:
            return self._supervisor.on_message(execution, message)
        return None

    def _on_unacknowledged(self, unacknowledged: list[Execution]) -> None:
        for execution in unacknowledged:
            if execution.child is not None:
                started_at = time.monotonic() - ASSUME_STARTED_AFTER_S
                self._supervisor.feed(execution, Lifecycle.on_child_started, started_at)

    def _finish(self, child: Child, execution: Execution, end: Terminal) -> None:
        self._forget(child, execution)
        exit_status = None
        if isinstance(end, TaskResult):
            if end.escaped_tracer:
                self.retire(child, "a task tried to end the process")
        elif not isinstance(end, Result):
            exit_status = child.session.exit_status
        try:
            self._supervisor.finished(execution, end, exit_status)
        finally:
            self._release(child)
            self.dispatch()


class PoolLane(Lane):
    """Sends executions to the sessions that `ProfilePool` chooses."""

    def __init__(
        self,
        kind: str,
        pool: ProfilePool,
        capacity: int,
        supervisor: Supervisor,
        sent: dict[Execution, None],
        *,
        max_extra_children: int,
    ) -> None:
        """`max_extra_children`: beyond the size, while they finish what they have."""
        super().__init__(kind, capacity, supervisor, sent)
        self.pool = pool
        self._max_extra_children = max_extra_children
        pool.set_listener(self, capacity)

    def child_ready(self, slot: Slot, session: Session) -> None:
        self.children[slot.number] = Child(self.kind, slot, session, session.pid or 0)
        self.dispatch()

    def child_retired(self, slot: Slot) -> None:
        self.children.pop(slot.number, None)

    def starts_fail(self, error: str) -> None:
        """The executions wait: the next start may succeed."""

    @property
    def size(self) -> int:
        """The number of children that the lane should have."""
        return self.pool.plan.size or 0

    def resize(self, size: int) -> None:
        """Have that many children from now on; surplus children that are busy finish first."""
        self.pool.set_size(size, size + self._max_extra_children)

    @property
    def is_stuck(self) -> bool:
        """Whether executions wait and no child may be started until one ends; any thread."""
        children = list(self.children.values())
        is_full = len(children) >= self.size + self._max_extra_children
        return (
            is_full and all(child.slot.retire_reason for child in children) and bool(self.waiting)
        )

    def retire(self, child: Child, reason: str) -> None:
        self.pool.retire_when_idle(child.slot, reason)

    def _take_child(self) -> Child | None:
        slot = self.pool.plan.assign()
        if slot is None:
            return None
        if slot.retire_reason:  # this execution is its last; a successor may start meanwhile
            self.pool.decide()
        return self.children[slot.number]

    def _release(self, child: Child) -> None:
        plan, slot = self.pool.plan, child.slot
        if plan.settings.max_rss_bytes is not None or not child.session.is_alive:
            self.pool.check_child(slot)
        plan.finished(slot, time.monotonic())
        if slot.retire_reason:
            self.pool.decide()


class RefusingLane(Lane):
    """Has no child: each execution is ended by `refuse`, without running."""

    def __init__(self, supervisor: Supervisor, refuse: Callable[[Execution], object]) -> None:
        super().__init__("refused", 1, supervisor, {})
        self._refuse = refuse

    def dispatch(self) -> None:
        while self.waiting:
            self._refuse(self.waiting.popleft())

    def retire(self, child: Child, reason: str) -> None: ...

    def _take_child(self) -> None: ...

    def _release(self, child: Child) -> None: ...
