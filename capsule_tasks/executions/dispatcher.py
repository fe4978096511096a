"""Which child has which execution. Everything here runs on the runtime's loop.

Executions wait in one queue for each kind of child and are sent in order of arrival. `ProfilePool`
decides how many children there are and which of them gets the next execution. The dispatcher sends
it there, remembers where it is, and tells the supervisor what becomes of it:

    enqueue ──▶ waiting ──sent──▶ with a child ──started──▶ running ──finished──▶ (forgotten)
                   ▲                    │ └───────────finished──────────────────────▲
                   └──────refused───────┘
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from capsule_tasks.errors import CapsuleError, UnknownInputRequest
from capsule_tasks.executions.background import BackgroundTasks, Delay
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.messages import Ack, Message, Result, TaskResult, Terminal
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.pool.plan import Slot
from capsule_tasks.sessions.pool.session_pool import ProfilePool
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.stopping import StopOutcome

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

log = logging.getLogger("capsule_tasks.taskpool")

Kind = Literal["blocking", "async"]

MAX_EXTRA_CHILDREN: dict[Kind, int] = {"blocking": 1, "async": 9}
"""Children beyond the size of the pool, while they finish what they have.

A blocking child keeps its place until its one task has ended, so only the process that is being
ended is extra. The coroutines of an async child may go on for hours, and executions that wait must
not depend on them.
"""
ASSUME_STARTED_AFTER_S = 0.05
"""An idle child that has not acknowledged a task by then counts as having started it, so that
limits and cancels apply. Code that holds the interpreter from its first line, or stops its own
process, keeps the child from acknowledging."""


class Child(msgspec.Struct, eq=False):
    """A session of the pool, and the executions that were sent to it."""

    kind: Kind
    slot: Slot
    session: Session
    pid: int
    sent: dict[str, Execution] = {}
    """By execution id."""


class Lane:
    """Sends executions in order of arrival to the sessions that `ProfilePool` chooses."""

    def __init__(
        self,
        kind: Kind,
        pool: ProfilePool,
        capacity: int,
        supervisor: Supervisor,
        sent: dict[Execution, None],
    ) -> None:
        """`sent` is shared by all lanes: every execution that a child has."""
        self.kind: Kind = kind
        self.pool = pool
        self.waiting: deque[Execution] = deque()
        self.children: dict[int, Child] = {}
        """By number of the slot."""
        self._supervisor = supervisor
        self._sent = sent
        self._unacknowledged = Delay[Execution](ASSUME_STARTED_AFTER_S, self._on_unacknowledged)
        pool.set_listener(self, capacity)

    def child_ready(self, slot: Slot, session: Session) -> None:
        self.children[slot.number] = Child(self.kind, slot, session, session.pid or 0)
        self.dispatch()

    def child_retired(self, slot: Slot) -> None:
        self.children.pop(slot.number, None)

    @property
    def size(self) -> int:
        """The number of children that the lane should have."""
        return self.pool.plan.size or 0

    @property
    def is_stuck(self) -> bool:
        """Whether executions wait and no child may be started until one ends; any thread."""
        children = list(self.children.values())
        is_full = len(children) >= self.size + MAX_EXTRA_CHILDREN[self.kind]
        return (
            is_full and all(child.slot.retire_reason for child in children) and bool(self.waiting)
        )

    # --- sending -------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send the executions that wait while a child has room."""
        waiting, plan = self.waiting, self.pool.plan
        while waiting:
            slot = plan.assign()
            if slot is None:
                return
            if slot.retire_reason:  # this execution is its last; a successor may start meanwhile
                self.pool.decide()
            self._send(self.children[slot.number], waiting.popleft())

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
        try:
            on_message = partial(self._on_message, child, execution)
            child.session.submit(call, on_message, execution_id=execution_id)
        except CapsuleError as error:
            # The child has ended, which its state tells a moment later; or a coroutine that does
            # not stop has condemned it. The execution has not started.
            log.info("task goes to another child: the chosen one takes nothing new: %s", error)
            self._forget(child, execution)
            self.waiting.appendleft(execution)
            self._supervisor.feed(execution, Lifecycle.on_send_refused)
            self._release(child)
            self.pool.retire_when_idle(child.slot, str(error))
        else:
            if self.kind == "blocking":
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
                self.pool.retire_when_idle(child.slot, "a task tried to end the process")
        elif not isinstance(end, Result):
            exit_status = child.session.exit_status
        try:
            self._supervisor.finished(execution, end, exit_status)
        finally:
            self._release(child)
            self.dispatch()

    def _release(self, child: Child) -> None:
        """The child has one execution less."""
        plan, slot = self.pool.plan, child.slot
        if plan.settings.max_rss_bytes is not None or not child.session.is_alive:
            self.pool.check_child(slot)
        plan.finished(slot, time.monotonic())
        if slot.retire_reason:
            self.pool.decide()


class Dispatcher:
    """Two lanes, one for each kind of child, and the ways to act on an execution in a child."""

    def __init__(self, sessions: SessionPool, supervisor: Supervisor, *, async_limit: int) -> None:
        """The profiles `blocking` and `async` say how children are started and when replaced.

        A blocking child has one execution at a time, an async child up to `async_limit`.
        """
        self._sent: dict[Execution, None] = {}
        self._background = BackgroundTasks()
        capacities: dict[Kind, int] = {"blocking": 1, "async": async_limit}
        self.lanes: dict[Kind, Lane] = {
            kind: Lane(kind, sessions.profile_pool(kind), capacity, supervisor, self._sent)
            for kind, capacity in capacities.items()
        }

    # --- the queue -----------------------------------------------------------------------------

    def enqueue(self, execution: Execution) -> None:
        """Send the execution to a child, now or after those that came before."""
        lane = self._lane_of(execution)
        lane.waiting.append(execution)
        lane.dispatch()

    def remove(self, execution: Execution) -> bool:
        """Take the execution out of the queue; False if it is not there."""
        try:
            self._lane_of(execution).waiting.remove(execution)
        except ValueError:
            return False
        return True

    def _lane_of(self, execution: Execution) -> Lane:
        return self.lanes["async" if execution.life.origin.is_async else "blocking"]

    # --- lists ---------------------------------------------------------------------------------

    def sent_executions(self) -> list[Execution]:
        """All executions that children have; any thread."""
        return list(self._sent)

    def execution_of(self, pid: int) -> Execution | None:
        """The execution of the blocking child with this process."""
        for child in self.lanes["blocking"].children.values():
            if child.pid == pid:
                return next(iter(child.sent.values()), None)
        return None

    def children(self) -> list[Child]:
        """The children that are ready and not being ended; any thread."""
        return [child for lane in self.lanes.values() for child in list(lane.children.values())]

    # --- an execution that a child has; nothing happens if no child has it -----------------------

    def signal(self, execution: Execution, signum: int, reason: str) -> None:
        """Send the execution's child a signal, and nothing new.

        The signal cannot hit another task: a blocking child has one at a time, and is sent the next
        one only when this thread has received the end of the last. SIGKILL, which an async child
        may be sent, too, kills the child with its descendants and all of its executions.
        """
        if (child := execution.child) is None:
            return
        is_kill = signum == signal.SIGKILL
        reason = "it was killed" if is_kill else reason
        self.lanes[child.kind].pool.retire_when_idle(child.slot, reason)
        if is_kill:
            self._background.spawn(child.session.terminate())
        else:
            child.session.signal(signum)

    def cancel(self, execution: Execution, grace_s: float) -> None:
        """End the execution in order; after the grace its child is killed."""
        if (child := execution.child) is not None:
            self._background.spawn(child.session.cancel(execution.child_execution_id, grace_s))

    def soft_limit(self, execution: Execution) -> bool:
        """Raise SoftTimeLimitExceeded in the execution; False if no child has it."""
        child = execution.child
        return child is not None and child.session.soft_limit(execution.child_execution_id)

    async def end_input(self, execution: Execution, request_id: str) -> None:
        """Have `input()` raise EOFError: the question cannot reach anyone."""
        with contextlib.suppress(CapsuleError):  # the execution has ended, or its child has
            await self.respond(execution, request_id, "", eof=True)

    async def respond(
        self, execution: Execution, request_id: str, text: str, *, eof: bool = False
    ) -> None:
        """Answer `input()`; UnknownInputRequest if no such question is open."""
        if execution.child is None:
            raise UnknownInputRequest(request_id, execution.call.task_id)
        await execution.child.session.input_response(
            text, request_id=request_id, execution_id=execution.child_execution_id, eof=eof
        )

    async def interrupt(self, execution: Execution) -> StopOutcome:
        """Raise KeyboardInterrupt in the execution."""
        child = execution.child
        if child is None:
            return "not_running"
        return await child.session.interrupt(execution.child_execution_id)

    async def stack(self, execution: Execution) -> str | None:
        """The stack of the execution's code; None if no child has the execution."""
        if execution.child is None:
            return None
        return await execution.child.session.stack(execution.child_execution_id)

    # --- children ------------------------------------------------------------------------------

    def resize(self, kind: Kind, size: int) -> None:
        """Have that many children from now on; surplus children that are busy finish first."""
        self.lanes[kind].pool.set_size(size, size + MAX_EXTRA_CHILDREN[kind])

    def free_slots(self) -> int:
        """Blocking children without an execution, now or soon, including those that start.

        Any thread.
        """
        lane = self.lanes["blocking"]
        busy = sum(bool(child.sent) for child in list(lane.children.values()))
        return lane.size - busy - len(lane.waiting)

    def replace_all(self, reason: str) -> None:
        """Replace every child, once it has finished what it has."""
        for lane in self.lanes.values():
            lane.pool.replace_all(reason)

    async def stop(self) -> None:
        """Send nothing more. What children have finishes when the pool of sessions stops."""
        await self._background.stop()
