"""The lane of one named session: its one child runs one call at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from capsule_tasks.executions.ends import MAY_HAVE_RUN, EndKind
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.hosting.outcomes import LOST_WITH_WORKER, refusal, traced
from capsule_tasks.executions.lanes import Child, Lane
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.messages import Error, Result, Terminal
from capsule_tasks.sessions.pool.plan import Slot
from capsule_tasks.sessions.session import Session

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

log = logging.getLogger("capsule_tasks.taskpool")

_SLOT = 0


class SessionLane(Lane):
    """Sends calls to the session's child. Without one they wait until there is another."""

    def __init__(
        self,
        supervisor: Supervisor,
        sent: dict[Execution, None],
        on_child_refused: Callable[[], object],
    ) -> None:
        super().__init__("session", 1, supervisor, sent)
        self.result: Result | None = None
        """The value of the last call, if it has one."""
        self.kill_type = EndKind.LOST.value
        """The name of the error that `kill_reason` explains."""
        self.kill_reason = ""
        """Why the host stops or kills the child; calls that run or wait end with it."""
        self.claim_by = math.inf
        """A call that is claimed later may have run elsewhere: it ends as lost."""
        self._sent_at = 0.0
        self._on_child_refused = on_child_refused

    @property
    def child(self) -> Child | None:
        return self.children.get(_SLOT)

    def use(self, session: Session) -> None:
        """Send calls to this session from now on."""
        self.children[_SLOT] = Child(self.kind, Slot(_SLOT), session, session.pid or 0)
        self.dispatch()

    def enqueue(self, execution: Execution) -> None:
        """Send a call that was claimed just now to the child, as soon as there is one."""
        if asyncio.get_running_loop().time() < self.claim_by:
            super().enqueue(execution)
        else:
            refuse_call(execution, self._supervisor, EndKind.LOST.value, LOST_WITH_WORKER)

    def drop_child(self) -> None:
        """Send nothing more to the child; what it has goes on."""
        self.children.clear()

    def refuse_waiting(self, type_name: str, message: str) -> None:
        """Fail the calls that wait for a child."""
        while self.waiting:
            refuse_call(self.waiting.popleft(), self._supervisor, type_name, message)

    def retire(self, child: Child, reason: str) -> None:
        if self.child is child:
            self.drop_child()
        if self.waiting:
            log.info("a call of a named session waits for another child: %s", reason)
            self._on_child_refused()

    def dispatch(self) -> None:
        if self.kill_reason:  # until there is another child
            self.refuse_waiting(self.kill_type, self.kill_reason)
        super().dispatch()

    def _take_child(self) -> Child | None:
        child = self.child
        if child is None or child.sent:
            return None
        self.result = None
        self._sent_at = time.monotonic()
        return child

    def _release(self, child: Child) -> None:
        if not child.session.is_alive and self.child is child:
            self.drop_child()

    def _finish(self, child: Child, execution: Execution, end: Terminal) -> None:
        if isinstance(end, Result):
            self.result = end
        if isinstance(end, Error) and self.kill_reason:
            why = f"{self.kill_reason}; {MAY_HAVE_RUN}"
            end = refusal(execution.call.task_id, self.kill_type, why)
        super()._finish(child, execution, traced(end, time.monotonic() - self._sent_at))


def refuse_call(execution: Execution, supervisor: Supervisor, type_name: str, message: str) -> None:
    """End a claimed call with an error, without running it."""
    supervisor.feed(execution, Lifecycle.on_sent)
    supervisor.finished(execution, refusal(execution.call.task_id, type_name, message), None)
