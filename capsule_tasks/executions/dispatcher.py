"""Which child has which execution. Everything here runs on the runtime's loop.

Executions wait in one lane for each kind of child and are sent in order of arrival. `ProfilePool`
decides how many children there are and which of them gets the next execution. The lane sends
it there, remembers where it is, and tells the supervisor what becomes of it:

    enqueue ──▶ waiting ──sent──▶ with a child ──started──▶ running ──finished──▶ (forgotten)
                   ▲                    │ └───────────finished──────────────────────▲
                   └──────refused───────┘
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Literal

from capsule_tasks.errors import CapsuleError, UnknownInputRequest
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lanes import Child, PoolLane
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.stopping import StopOutcome

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

Kind = Literal["blocking", "async"]

MAX_EXTRA_CHILDREN: dict[Kind, int] = {"blocking": 1, "async": 9}
"""Children beyond the size of the pool, while they finish what they have.

A blocking child keeps its place until its one task has ended, so only the process that is being
ended is extra. The coroutines of an async child may go on for hours, and executions that wait must
not depend on them.
"""


class Dispatcher:
    """The lanes of tasks, one for each kind of child, and the ways to act on any execution."""

    def __init__(self, sessions: SessionPool, supervisor: Supervisor, *, async_limit: int) -> None:
        """The profiles `blocking` and `async` say how children are started and when replaced.

        A blocking child has one execution at a time, an async child up to `async_limit`.
        """
        self.sent: dict[Execution, None] = {}
        """Every execution that a child has; all lanes share it."""
        self._background = BackgroundTasks()
        capacities: dict[Kind, int] = {"blocking": 1, "async": async_limit}
        self.lanes: dict[str, PoolLane] = {
            kind: PoolLane(
                kind,
                sessions.profile_pool(kind),
                capacity,
                supervisor,
                self.sent,
                max_extra_children=MAX_EXTRA_CHILDREN[kind],
            )
            for kind, capacity in capacities.items()
        }

    # --- the queue -----------------------------------------------------------------------------

    def enqueue(self, execution: Execution) -> None:
        """Send the execution to a child of its lane, now or after those that came before."""
        assert execution.lane is not None, "an execution that is to run has a lane"
        execution.lane.enqueue(execution)

    def remove(self, execution: Execution) -> bool:
        """Take the execution out of its lane's queue; False if it is not there."""
        return execution.lane is not None and execution.lane.remove(execution)

    # --- lists ---------------------------------------------------------------------------------

    def sent_executions(self) -> list[Execution]:
        """All executions that children have; any thread."""
        return list(self.sent)

    def execution_of(self, pid: int) -> Execution | None:
        """The execution of the process, if it runs one at a time."""
        for lane in self.lanes.values():
            for child in lane.children.values():
                if child.pid == pid and lane.capacity == 1:
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
        child, lane = execution.child, execution.lane
        if child is None or lane is None:
            return
        is_kill = signum == signal.SIGKILL
        reason = "it was killed" if is_kill else reason
        lane.retire(child, reason)
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
        self.lanes[kind].resize(size)

    def free_slots(self) -> int:
        """Blocking children without an execution, now or soon, including those that start.

        Code takes the place of a task, in a child of its own. Any thread.
        """
        busy = 0
        for lane in list(self.lanes.values()):
            if lane.capacity == 1:
                busy += sum(bool(child.sent) for child in list(lane.children.values()))
                busy += len(lane.waiting)
        return self.lanes["blocking"].size - busy

    def replace_all(self, reason: str) -> None:
        """Replace every child, once it has finished what it has."""
        for lane in self.lanes.values():
            lane.pool.replace_all(reason)

    async def stop(self) -> None:
        """Send nothing more. What children have finishes when the pool of sessions stops."""
        await self._background.stop()
