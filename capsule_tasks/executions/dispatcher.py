"""Which child has which piece of work. Everything here runs on the runtime's loop.

Work waits in one queue for each kind of child, and is sent in order of arrival. `SubPool` decides
how many children there are and which of them gets the next piece. The dispatcher sends it there,
remembers where it is, and tells its listener what becomes of it:

    enqueue ──▶ waiting ──sent──▶ with a child ──started──▶ running ──finished──▶ (forgotten)
                   ▲                    │ └───────────finished──────────────────────▲
                   └──────refused───────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Generic

import msgspec

from capsule_tasks.errors import CapsuleError, UnknownInputRequest
from capsule_tasks.executions.delay import Delay
from capsule_tasks.executions.work import DispatchListener, Kind, W
from capsule_tasks.protocol.messages import Ack, Message, Result, TaskResult, Terminal
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.info import PoolInfo
from capsule_tasks.sessions.pool.profile_pool import SubPool
from capsule_tasks.sessions.pool.slot import Slot
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.stopping import StopOutcome

log = logging.getLogger("capsule_tasks.taskpool")

MAX_EXTRA_CHILDREN: dict[Kind, int] = {"blocking": 1, "async": 9}
"""Children that may be there beside the size, while they finish what they have.

The place of a blocking child is taken until its one task has ended, so that only the process that
is being ended is beside the others. The coroutines of an async child may go on for hours, and those
that wait do not depend on them.
"""
ASSUME_STARTED_AFTER_S = 0.05
"""An idle child that has not acknowledged a task by then counts as having started it, so that
limits and cancels apply. Code that holds the interpreter from its first line, or stops its own
process, keeps the child from acknowledging."""


class Child(msgspec.Struct, Generic[W], eq=False):
    """A session of the pool, and the work that was sent to it."""

    kind: Kind
    slot: Slot
    session: Session
    pid: int
    sent: dict[str, Sent[W]] = {}
    """By execution id."""


class Sent(msgspec.Struct, Generic[W], eq=False):
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
        self._plan = pool.plan
        self._listener = listener
        self._sent = sent
        self._unacknowledged = Delay[Sent[W]](ASSUME_STARTED_AFTER_S, self._on_unacknowledged)
        pool.set_listener(self, capacity)

    # --- children ------------------------------------------------------------------------------

    def resize(self, size: int) -> None:
        self.size = size
        self._pool.set_size(size, self._most)

    def replace_all(self, reason: str) -> None:
        self._pool.replace_all(reason)

    def doom(self, child: Child[W], reason: str) -> None:
        """Send the child nothing new, and replace it."""
        self._pool.retire_when_idle(child.slot, reason)

    def child_ready(self, slot: Slot, session: Session) -> None:
        self.children[slot.number] = Child(self.kind, slot, session, session.pid or 0)
        self.dispatch()

    def child_retired(self, slot: Slot) -> None:
        self.children.pop(slot.number, None)

    def info(self) -> PoolInfo:
        return self._pool.info()

    @property
    def is_stuck(self) -> bool:
        """Whether work waits and there may be no other child until one has finished; any thread."""
        children = list(self.children.values())
        is_full = len(children) >= self._most and all(
            child.slot.retire_reason for child in children
        )
        return is_full and bool(self.waiting)

    @property
    def _most(self) -> int:
        return self.size + MAX_EXTRA_CHILDREN[self.kind]

    # --- sending -------------------------------------------------------------------------------

    def enqueue(self, work: W) -> None:
        self.waiting.append(work)
        self.dispatch()

    def dispatch(self) -> None:
        """Send what waits while there is room for it."""
        waiting = self.waiting
        while waiting:
            slot = self._plan.assign()
            if slot is None:
                return
            if slot.retire_reason:  # this work is its last; a successor may start beside it
                self._pool.decide()
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
            child.session.submit(call, partial(self._on_message, sent), execution_id=execution_id)
        except CapsuleError as error:
            # The child has ended, which its state says a moment later; or it is condemned by a
            # coroutine that does not stop. The work has not begun.
            log.info("a task goes to another session: %s", error)
            del child.sent[execution_id], self._sent[work]
            self.waiting.appendleft(work)
            self._listener.refused(work)
            self._release(child)
            self.doom(child, str(error))
        else:
            if self.kind == "blocking":
                self._unacknowledged.add(sent)

    # --- hearing -------------------------------------------------------------------------------

    def _on_message(self, sent: Sent[W], message: Message) -> bool | None:
        """False if there is no room for more output of this work."""
        if isinstance(message, Ack):
            self._start(sent, message.accepted_at)
        elif isinstance(message, Terminal):
            self._finish(sent, message)
        else:
            return self._listener.on_message(sent.work, message)
        return None

    def _start(self, sent: Sent[W], at: float) -> None:
        if not sent.is_started:
            sent.is_started = True
            self._unacknowledged.discard(sent)
            self._listener.started(sent.work, at)

    def _on_unacknowledged(self, unheard: list[Sent[W]]) -> None:
        for sent in unheard:
            if self._sent.get(sent.work) is sent:
                self._start(sent, time.monotonic() - ASSUME_STARTED_AFTER_S)

    def _finish(self, sent: Sent[W], end: Terminal) -> None:
        child = sent.child
        del child.sent[sent.execution_id], self._sent[sent.work]
        exit_status = None
        if isinstance(end, TaskResult):
            if end.escaped_tracer:
                self.doom(child, "a task tried to end the process")
        elif not isinstance(end, Result):
            exit_status = child.session.exit_status
            if exit_status is not None:
                self._start(sent, time.monotonic())
        try:
            self._listener.finished(sent.work, end, exit_status)
        finally:
            self._release(child)
            self.dispatch()

    def _release(self, child: Child[W]) -> None:
        """The child has a piece of work less."""
        plan, slot = self._plan, child.slot
        if plan.settings.max_rss_bytes is not None or not child.session.is_alive:
            self._pool.check_child(slot)
        plan.finished(slot, time.monotonic())
        if slot.retire_reason:
            self._pool.decide()


class Dispatcher(Generic[W]):
    """Two lanes, one for each kind of child, and what is done to work wherever it is."""

    def __init__(
        self, sessions: SessionPool, listener: DispatchListener[W], *, async_limit: int
    ) -> None:
        """The profiles `blocking` and `async` say how children are started and when replaced.

        A blocking child has one piece of work at a time, an async one up to `async_limit`.
        """
        self._sent: dict[W, Sent[W]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        capacities: dict[Kind, int] = {"blocking": 1, "async": async_limit}
        self.lanes: dict[Kind, Lane[W]] = {
            kind: Lane(kind, sessions.subpool(kind), capacity, listener, self._sent)
            for kind, capacity in capacities.items()
        }

    # --- the queue -----------------------------------------------------------------------------

    def enqueue(self, work: W) -> None:
        """Send the work to a child, at once or in its turn."""
        self.lanes["async" if work.is_async else "blocking"].enqueue(work)

    def remove(self, work: W) -> bool:
        """Take the work out of the queue; False if it is not there."""
        try:
            self.lanes["async" if work.is_async else "blocking"].waiting.remove(work)
        except ValueError:
            return False
        return True

    # --- looking -------------------------------------------------------------------------------

    def sent_executions(self) -> list[W]:
        """All work that children have; on any thread."""
        return list(self._sent)

    def execution_of(self, pid: int) -> W | None:
        """The work of the blocking child with this process."""
        for child in self.lanes["blocking"].children.values():
            if child.pid == pid:
                return next((sent.work for sent in child.sent.values()), None)
        return None

    def children(self) -> list[Child[W]]:
        """Those that are ready, and not being ended; on any thread."""
        return [child for lane in self.lanes.values() for child in list(lane.children.values())]

    # --- what is done to work that a child has; nothing happens if none has it -------------------

    def signal(self, work: W, signum: int, reason: str) -> None:
        """Send the child of a blocking work a signal, and nothing new; SIGKILL is `kill`.

        It cannot hit another task: a blocking child has one at a time, and gets the next one only
        when this thread has heard the end of the last.
        """
        sent = self._sent.get(work)
        if sent is None:
            return
        if signum == signal.SIGKILL:
            self._kill(sent.child)
            return
        self._doom(sent.child, reason)
        sent.child.session.signal(signum)

    def kill(self, work: W) -> None:
        """Kill the child with its descendants, and so its other work as well."""
        sent = self._sent.get(work)
        if sent is not None:
            self._kill(sent.child)

    def cancel(self, work: W, grace_s: float) -> None:
        """End the work in order; after the grace its child is killed."""
        sent = self._sent.get(work)
        if sent is not None:
            self._spawn(sent.child.session.cancel(sent.execution_id, grace_s))

    def soft_limit(self, work: W) -> bool:
        """Raise in the work that its soft time limit has passed; False if no child has it."""
        sent = self._sent.get(work)
        return sent is not None and sent.child.session.soft_limit(sent.execution_id)

    def resume_output(self, work: W) -> None:
        """There is room for output of the work again."""
        sent = self._sent.get(work)
        if sent is not None:
            sent.child.session.resume_output(sent.execution_id)

    def end_input(self, work: W, request_id: str) -> None:
        """Have `input()` raise EOFError: nobody can hear what it asks."""
        if work in self._sent:
            self._spawn(self._end_input(work, request_id))

    async def respond(self, work: W, request_id: str, text: str, *, eof: bool = False) -> None:
        """Answer `input()`; UnknownInputRequest if nothing waits for that."""
        sent = self._sent.get(work)
        if sent is None:
            raise UnknownInputRequest(request_id, work.call.task_id)
        await sent.child.session.input_response(
            text, request_id=request_id, execution_id=sent.execution_id, eof=eof
        )

    async def interrupt(self, work: W) -> StopOutcome:
        """Raise KeyboardInterrupt in the work."""
        sent = self._sent.get(work)
        if sent is None:
            return "not_running"
        return await sent.child.session.interrupt(sent.execution_id)

    async def stack(self, work: W) -> str | None:
        """Where the code of the work is; None if no child has it."""
        sent = self._sent.get(work)
        return await sent.child.session.stack(sent.execution_id) if sent is not None else None

    # --- children ------------------------------------------------------------------------------

    def resize(self, kind: Kind, size: int) -> None:
        """Have so many children from now on; busy ones that are too many finish first."""
        self.lanes[kind].resize(size)

    def free_slots(self) -> int:
        """Blocking children that have no work and get none, those on their way included.

        On any thread.
        """
        lane = self.lanes["blocking"]
        busy = sum(bool(child.sent) for child in list(lane.children.values()))
        return lane.size - busy - len(lane.waiting)

    def replace_all(self, reason: str) -> None:
        """Replace every child, once it has finished what it has."""
        for lane in self.lanes.values():
            lane.replace_all(reason)

    async def stop(self) -> None:
        """Send nothing more. What children have finishes when the pool of sessions stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _kill(self, child: Child[W]) -> None:
        self._doom(child, "it was killed")
        self._spawn(child.session.terminate())

    def _doom(self, child: Child[W], reason: str) -> None:
        self.lanes[child.kind].doom(child, reason)

    async def _end_input(self, work: W, request_id: str) -> None:
        with contextlib.suppress(CapsuleError):  # the work has ended, or its child has
            await self.respond(work, request_id, "", eof=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
