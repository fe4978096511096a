"""Runs one call of a named session from its beginning to its result.

Each call is an execution that needs a claim. So it runs at most once, whichever workers believe
that they own the session. A call that is not claimed has ended, was ended by a cancel, or belongs
to an owner that died; the record of its execution tells.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from capsule_tasks.errors import reason_of
from capsule_tasks.executions.background import RETRY_DELAY_S
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.ends import End, EndKind, lost, outcome_of
from capsule_tasks.executions.execution import UNREPORTED, Execution, Reporter
from capsule_tasks.executions.hosting.lane import SessionLane, refuse_call
from capsule_tasks.executions.hosting.outcomes import (
    LOST_WITH_WORKER,
    CallOutcome,
    outcome_of_end,
    outcome_of_event,
)
from capsule_tasks.executions.hosting.results import ResultWriter
from capsule_tasks.executions.lanes import Lane, RefusingLane
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.calls import SessionCall, decode_call, task_of_session
from capsule_tasks.protocol.events import Ended, Outcome, SessionRestored
from capsule_tasks.storage.executions.types import Record
from capsule_tasks.storage.sessions.types import BegunCall

log = logging.getLogger("capsule_tasks.taskpool")


class CallReporter(Reporter):
    """Keeps the end of one call for whoever runs it."""

    def __init__(self) -> None:
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def ended(self, end: End, *, frees_slot: bool) -> None:  # noqa: ARG002 - it has no slot
        if not self.end.done():
            self.end.set_result(end)


class CallRunner:
    """The calls of one session, one after the other."""

    def __init__(
        self,
        session_id: str,
        publisher: Publisher,
        supervisor: Supervisor,
        results: ResultWriter,
        lane: SessionLane,
    ) -> None:
        self._session_id = session_id
        self._publisher = publisher
        self._supervisor = supervisor
        self._results = results
        self._lane = lane
        self.execution: Execution | None = None
        """The call that runs now, or waits for its claim."""
        self._was_sent = False
        """Whether the child was sent the latest call."""

    async def run(
        self, begun: BegunCall, restored: SessionRestored | None, *, claim_by: float
    ) -> bool:
        """Run the call, or find out how it ended. Its end and its result are stored on return.

        `claim_by`: when Redis may have forgotten how a call ended that another owner has begun, by
        the loop's clock. A claim that is granted later does not say that the call has not run, so
        the call ends as lost. False if the call did not run here, as one that was cancelled before
        the child had it.
        """
        self._lane.claim_by = claim_by
        while True:
            end = await self._execute(begun, self._lane, restored)
            if end.kind is not EndKind.NOT_CLAIMED:
                result = self._lane.result if self._was_sent else None
                await self._results.store(begun.call_id, outcome_of_end(end, result))
                return self._was_sent
            if await self._ended_elsewhere(begun.call_id):
                return False
            await asyncio.sleep(RETRY_DELAY_S)  # so much waits for Redis that there was no room

    def stop(self, reason: str) -> None:
        """End the call that runs with a reason, in order: the namespace stays.

        A call that the child does not have yet ends with the reason, too, without being sent.
        """
        if self.execution is None:
            return
        self._lane.kill_reason = reason
        if self.execution.life.is_with_child:
            self._supervisor.feed(self.execution, Lifecycle.on_cancel_requested, None, reason)
        else:
            self._lane.dispatch()

    async def refuse(self, begun: BegunCall, type_name: str, message: str) -> None:
        """End the call with an error, without running it."""
        lane = self._refusing_lane(type_name, message)
        end = await self._execute(begun, lane, None)
        while end.kind is EndKind.NOT_CLAIMED and not await self._ended_elsewhere(begun.call_id):
            await asyncio.sleep(RETRY_DELAY_S)
            end = await self._execute(begun, lane, None)
        if end.kind is not EndKind.NOT_CLAIMED:
            await self._results.store(begun.call_id, outcome_of_end(end, None))

    def _refusing_lane(self, type_name: str, message: str) -> Lane:
        refuse = partial(
            refuse_call, supervisor=self._supervisor, type_name=type_name, message=message
        )
        return RefusingLane(self._supervisor, refuse)

    async def _execute(self, begun: BegunCall, lane: Lane, restored: SessionRestored | None) -> End:
        call = _decoded(begun)
        name = call.task or task_of_session(self._session_id)
        reporter = CallReporter()
        origin = Origin(
            execution_id=begun.call_id,
            task=name,
            group=call.group,
            index=call.index,
            needs_claim=True,
        )
        code = CodeCall(
            name=name, task_id=begun.call_id, source=call.source, timeout_s=call.timeout_s
        )
        execution = Execution(code, Lifecycle(origin), reporter, lane)
        self.execution = execution
        try:
            self._supervisor.admit(execution)
            if restored is not None and execution.stream is not None:
                execution.stream.publish(restored)
            return await reporter.end
        finally:
            self._was_sent = execution.pid > 0
            self.execution = None
            execution.reporter = UNREPORTED

    # --- calls that were not claimed -------------------------------------------------------------

    async def _ended_elsewhere(self, call_id: str) -> bool:
        """Make sure of the end and of the result of a call; False if it has to be run after all."""
        record = await self._record(call_id)
        while record.state == "running":
            if await self._is_owner_dead(record.owner):
                await self._end_as_lost(call_id, record)
            else:
                await asyncio.sleep(RETRY_DELAY_S)
            record = await self._record(call_id)
        if record.state != "ended":
            return False
        await self._results.store_if_missing(call_id, await self._outcome(call_id, record))
        return True

    async def _end_as_lost(self, call_id: str, record: Record) -> None:
        """End a call of a dead owner, as a reaper does, which may come first."""
        event = lost(LOST_WITH_WORKER)
        reap = partial(
            self._publisher.store.reap,
            call_id,
            record.owner,
            record.attempt,
            event,
            outcome_of(event),
        )
        await self._publisher.background.call_until_answered(reap)

    async def _is_owner_dead(self, owner: str) -> bool:
        left = partial(self._publisher.lease.hold_store.lease_left_s, owner)
        return not await self._publisher.background.call_until_answered(left)

    async def _outcome(self, call_id: str, record: Record) -> CallOutcome:
        ended = await self._last_event(call_id)
        if ended is not None:
            return outcome_of_event(ended)
        outcome = Outcome(record.outcome)
        if outcome is Outcome.SUCCEEDED:
            return outcome_of_event(Ended(outcome=outcome))
        return CallOutcome(outcome, None, EndKind.LOST.value, f"the call {outcome}")

    async def _last_event(self, call_id: str) -> Ended | None:
        store, until_answered = self._publisher.store, self._publisher.background
        page = await until_answered.call_until_answered(partial(store.read, call_id, count=1))
        if page is None:
            return None
        before = f"{page.attempt}-{max(0, page.seq - 1)}"
        page = await until_answered.call_until_answered(partial(store.read, call_id, before))
        message = page.events[-1].message if page is not None and page.events else None
        return message if isinstance(message, Ended) else None

    async def _record(self, call_id: str) -> Record:
        read = partial(self._publisher.store.read_record, call_id)
        return await self._publisher.background.call_until_answered(read)


def _decoded(begun: BegunCall) -> SessionCall:
    try:
        return decode_call(begun.payload)
    except msgspec.MsgspecError as fault:
        # A newer producer's, say. The call ends with an error, and those behind it go on.
        log.warning("call %s cannot be read: %s", begun.call_id, reason_of(fault))
        source = f"raise ValueError({f'this worker cannot read the call: {fault}'!r})"
        return SessionCall(source=source)
