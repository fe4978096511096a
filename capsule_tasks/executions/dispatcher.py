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
import signal
from collections.abc import Coroutine
from typing import Any, Generic

from capsule_tasks.errors import CapsuleError, UnknownInputRequest
from capsule_tasks.executions.lane import Child, DispatchListener, Kind, Lane, Sent, W
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.stopping import StopOutcome


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

    def take_waiting(self) -> list[W]:
        """Empty the queues: all that no child has."""
        waiting = [work for lane in self.lanes.values() for work in lane.waiting]
        for lane in self.lanes.values():
            lane.waiting.clear()
        return waiting

    # --- looking -------------------------------------------------------------------------------

    def is_sent(self, work: W) -> bool:
        """Whether a child has the work: from `sent` to `finished` or `refused`."""
        return work in self._sent

    def session_of(self, work: W) -> Session | None:
        sent = self._sent.get(work)
        return sent.child.session if sent is not None else None

    def in_hand(self) -> list[W]:
        """What children have; on any thread."""
        return list(self._sent)

    def work_of(self, pid: int) -> W | None:
        """What the blocking child with this process has."""
        for child in self.lanes["blocking"].children.values():
            if child.pid == pid:
                return next((sent.work for sent in child.sent.values()), None)
        return None

    def children(self) -> list[Child[W]]:
        """Those that are ready, and not being ended; on any thread."""
        return [child for lane in self.lanes.values() for child in list(lane.children.values())]

    # --- what is done to work that a child has; nothing happens if none has it -------------------

    def signal(self, work: W, signum: int, why: str) -> None:
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
        self._doom(sent.child, why)
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

    def read_on(self, work: W) -> None:
        """There is room for output of the work again."""
        sent = self._sent.get(work)
        if sent is not None:
            sent.child.session.read_on(sent.execution_id)

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

    def free_count(self) -> int:
        """Blocking children that have no work and get none, those on their way included.

        On any thread.
        """
        lane = self.lanes["blocking"]
        busy = sum(bool(child.sent) for child in list(lane.children.values()))
        return lane.size - busy - len(lane.waiting)

    def replace_all(self, why: str) -> None:
        """Replace every child, once it has finished what it has."""
        for lane in self.lanes.values():
            lane.replace_all(why)

    def kill_busy(self) -> None:
        """Kill every child that has work."""
        for child in self.children():
            if child.sent:
                self._kill(child)

    def stop(self) -> None:
        """Wait for nothing more. What children have finishes when the pool of sessions stops."""
        for task in self._tasks:
            task.cancel()

    def _kill(self, child: Child[W]) -> None:
        self._doom(child, "it was killed")
        self._spawn(child.session.terminate())

    def _doom(self, child: Child[W], why: str) -> None:
        self.lanes[child.kind].doom(child, why)

    async def _end_input(self, work: W, request_id: str) -> None:
        with contextlib.suppress(CapsuleError):  # the work has ended, or its child has
            await self.respond(work, request_id, "", eof=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
