"""Writes the stream of one execution: its claims, its events in order, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from capsule_tasks.errors import AttemptStale, CapsuleError, ExecutionEnded
from capsule_tasks.executions.claims import Refusal
from capsule_tasks.executions.ends import LastEvent, outcome_of, state_of
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Event, Lifecycle, P
from capsule_tasks.executions.publishing.event_buffer import EventBatch, EventBuffer
from capsule_tasks.executions.states import Claim
from capsule_tasks.protocol.events import (
    Accepted,
    EventMessage,
    Outcome,
    decode_command,
    encode_event,
)
from capsule_tasks.protocol.messages import Output, RunEvent
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions.store import (
    UNCLAIMED,
    attempt_details,
    end_of_previous,
    execution_append,
    execution_claim,
    limits_of,
)
from capsule_tasks.storage.executions.types import Claimed, CommandEntry
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.publisher import Publisher

log = logging.getLogger("capsule_tasks.taskpool")

_REDELIVERED = "again-"
"""Begins the ids of claims for messages that were delivered before."""
_YOUNG_S = 1.0
"""A worker that stood still for longer takes nothing from an attempt that came later."""


_NO_EVENTS = EventBatch()


class StreamWriter:
    """Decides nothing about the execution: the lifecycle says when to claim and when to close.

    One call at a time is on its way, so that events keep their order. A call is made again until
    Redis answers.
    """

    def __init__(
        self,
        publisher: Publisher,
        execution: Execution,
        retention: ExecutionSettings,
        claimed_event: bytes,
    ) -> None:
        origin = execution.life.origin
        self.execution = execution
        self.execution_id = origin.execution_id
        self.attempt = 0
        self.buffer: EventBuffer | None = None
        """Made with the first event: most tasks end without one."""
        self.is_held = False
        """The execution is recorded as held by this worker, or will be soon."""
        self.previous_released: asyncio.Event | None = None
        """Set when this worker has released the previous attempt of the same execution."""
        self.released: asyncio.Event | None = None
        """Set when this attempt is released, for the next attempt of the same execution."""
        self.publisher = publisher
        self._limits = limits_of(retention)
        self._keys = ExecutionKeys(origin.execution_id, publisher.retention.prefix)
        ack = "late" if origin.acks_late else "early"
        worker, group, index = publisher.worker, origin.group, origin.index
        self._details = attempt_details(ack, origin.task, worker, group, index, retention)
        self._claimed_event = claimed_event
        self._mark = _REDELIVERED if origin.is_redelivered else ""
        self._claim_id = self._mark + publisher.new_claim_id()
        self._owner = ""
        self._seq = 0
        self._last_command_id = ""
        self._is_rung: bool | None = None
        """None while no commands are being read; else whether the doorbell rang since."""
        self._batch: EventBatch | None = None
        self._ending: LastEvent | None = None
        self._may_append = False
        """The attempt is claimed, and its lease is not known to be lost."""
        self._start: Accepted | None = None
        """That the code runs, until the event is sent."""
        self._has_published = False
        self._awaits_run = origin.claims_with_output
        """Output is kept until an event says that this attempt has its run."""
        self._is_started = False
        self._is_due = False
        """Events that watchers need not see at once are sent now, too."""
        self.is_busy = False
        """A call is on its way."""
        self._is_closed = False
        self._awaits_in_flight = False
        self._came_at = asyncio.get_running_loop().time()

    @property
    def _young_s(self) -> float:
        """The age from which the attempt takes nothing from one that came later.

        A run that another worker could have by now has stood still for most of its lease.
        """
        if self.execution.life.origin.claims_with_output:
            return self.publisher.lease.settings.lease_s / 2
        return _YOUNG_S

    @property
    def is_unclaimed(self) -> bool:
        """Whether the claim is still to come."""
        return self.execution.life.claim is Claim.UNCLAIMED

    # --- events --------------------------------------------------------------------------------

    def write(self, output: Output | RunEvent) -> bool | None:
        """One piece of output, or event of a run; False if there is no room for more now."""
        if self._is_closed or self._ending is not None:
            return None
        if isinstance(output, Output):
            self._filled().add_output(output)
        else:
            self._filled().add(output)
            self._awaits_run = False
        if self._is_started and not self._awaits_run:
            self._is_due = True
        self._on_new_event()
        return self.publisher.budget.has_room(self, output)

    def publish(self, event: EventMessage) -> None:
        """One event, in order with the output."""
        if not self._is_closed and self._ending is None:
            self._filled().add(event)
            self._is_due = True
            self._on_new_event()

    def publish_start(self) -> None:
        """The code runs; the event goes with the first output, or when the claim is due."""
        self._is_started = True
        self._start = Accepted(pid=self.execution.pid)
        if not self.execution.life.origin.claims_with_output:
            self.publisher.claimer.due.add(self.execution)
        if self.buffer is not None:
            self._filled()

    def publish_end(self, event: LastEvent) -> None:
        self._ending = event
        self.publisher.claimer.due.discard(self.execution)
        self.publisher.ends_waiting.add(self.execution)
        self._send_next()

    def flush(self) -> None:
        self._is_due = True
        self._send_next()

    def _filled(self) -> EventBuffer:
        """The buffer, with the start in it if that was not sent."""
        if self.buffer is None:
            self.buffer = EventBuffer(self.publisher.settings, self.publisher.budget)
        if self._start is not None:
            self.buffer.add(self._start)
            self._start = None
        return self.buffer

    def _on_new_event(self) -> None:
        if not self._is_due:
            return
        if self._may_append:
            self._send_next()
        elif not self._has_published:
            self._has_published = True
            self.feed(Lifecycle.on_first_output)

    # --- claims --------------------------------------------------------------------------------

    def claim_with_events(self, takes_over: bool) -> None:
        """Claim the execution, together with all of its events until now."""
        self._has_published = self._is_due = True
        if self.previous_released is not None:
            claim = partial(self.claim_with_events, takes_over)
            self.publisher.claimer.call_after_previous(self, claim)
        elif self.execution.life.origin.claims_with_output and not takes_over:
            self.publisher.present(self)
            self._came_at = asyncio.get_running_loop().time()
            self.publisher.claimer.call_once_held(
                self, partial(self._claim_with_events, takes_over)
            )
        else:
            self._claim_with_events(takes_over)

    def _claim_with_events(self, takes_over: bool) -> None:
        batch = (self._batch if takes_over else None) or self._next_batch(is_claim=True)
        # An execution that is over is held only until its group has counted it.
        is_brief = batch.ending is not None and not self.execution.life.origin.group
        if not self.is_held and not is_brief:
            self.publisher.lease.hold_soon([self])
        held_by = "" if takes_over else UNCLAIMED
        self._send(batch, self._claim_call(held_by, batch))

    async def claim_first(self) -> None:
        """Claim the execution before it starts, from any owner or, if it needs that, from none."""
        held_by = UNCLAIMED if self.execution.life.origin.needs_claim else ""
        await self._claim_alone(self._claim_call(held_by), is_first=True)

    def reclaim(self, owner_before: str) -> None:
        """Claim the execution under the present lease, if the owner before still has it."""
        self._claim_id = self._mark + self.publisher.new_claim_id()
        call = self._claim_call(owner_before)
        self.publisher.background.spawn(self._claim_alone(call, is_first=False))

    async def _claim_alone(self, call: Call, *, is_first: bool) -> None:
        reply = await self.publisher.call_until_answered(call)
        try:
            claimed = self._claimed(reply)
        except CapsuleError as news:
            self._on_claim_refused(news)
            return
        if is_first:  # all but a cancel were meant for earlier attempts
            self._take_commands(claimed.commands)
        self._on_claimed(claimed)

    def _claim_call(self, held_by: str, batch: EventBatch = _NO_EVENTS) -> Call:
        """A claim under the present lease; `held_by` is the owner that the execution may have."""
        self._owner = self.publisher.lease.incarnation
        return execution_claim.call(
            self._keys,
            claim=self._claim_id,
            owner=self._owner,
            held_by=held_by,
            details=self._details,
            state=state_of(batch.ending),
            outcome=outcome_of(batch.ending),
            has_stream_content=int(batch.has_stream_content),
            lost=end_of_previous(held_by),
            events=[self._claimed_event, *batch.events],
        )

    def _claimed(self, reply: Reply) -> Claimed:
        claimed = self.publisher.store.claimed(self.execution_id, reply)
        self.attempt, self._seq = claimed.attempt, claimed.seq
        return claimed

    def _on_claimed(self, claimed: Claimed) -> None:
        self._may_append = True
        self.feed(Lifecycle.on_claim_stored, self._owner, self.publisher.lease.incarnation)
        self._take_commands(claimed.commands)

    def _on_claim_refused(self, news: CapsuleError, *, may_take_over: bool = False) -> None:
        why = Refusal.CLOSED
        if isinstance(news, AttemptStale):
            age_s = asyncio.get_running_loop().time() - self._came_at
            if may_take_over and age_s < self._young_s:
                why = Refusal.RUNS_ELSEWHERE
            else:
                self._log_refusal(news)
        elif isinstance(news, ExecutionEnded) and self.attempt:
            self._log_refusal(news)  # a reaper ended the execution while it ran here
        elif isinstance(news, ExecutionEnded):
            # The id has ended before: an errback called twice, a frozen canvas applied again.
            log.info("task %s was delivered again after its end: no stream", self)
            if news.outcome == Outcome.CANCELLED:
                why = Refusal.CANCELLED
        else:
            log.warning("task %s has no stream: %s", self, news)
        self.feed(Lifecycle.on_claim_refused, why)

    def _log_refusal(self, news: CapsuleError) -> None:
        """Log that another attempt has the stream; a fault if it is a run of the same message.

        Without a redelivery there are two messages with one task id, as the application sent them.
        """
        is_fault = (
            not isinstance(news, AttemptStale)
            or news.claim == self._claim_id  # a reaper's attempt makes no claim of its own
            or bool(self._mark)
            or news.claim.startswith(_REDELIVERED)
        )
        level = logging.WARNING if is_fault else logging.INFO
        log.log(level, "another attempt owns the stream of task %s: %s", self, news)

    # --- calls ---------------------------------------------------------------------------------

    def _send_next(self) -> None:
        """Append the events that wait, if the attempt is claimed and no call is on its way."""
        waits = self._start is not None or bool(self.buffer)
        has_work = self._ending is not None or (self._is_due and waits)
        if self.is_busy or not self._may_append or self._is_closed or not has_work:
            return
        batch = self._next_batch(is_claim=False)
        ending = batch.ending
        call = execution_append.call(
            self._keys,
            attempt=self.attempt,
            first_seq=self._seq + 1,
            state=state_of(ending),
            outcome=outcome_of(ending),
            has_stream_content=int(batch.has_stream_content),
            limits=self._limits,
            events=batch.events,
        )
        self._send(batch, call)

    def _next_batch(self, *, is_claim: bool) -> EventBatch:
        buffer = self.buffer
        batch = buffer.take() if buffer is not None else EventBatch()
        batch.is_claim = is_claim
        if self._start is not None:
            batch.events.append(encode_event(self._start))
            self._start = None
        if self._ending is not None and not buffer:
            batch.ending = self._ending
            offset = buffer.offset if buffer is not None else 0
            batch.events.append(encode_event(batch.ending, offset))
        return batch

    def _send(self, batch: EventBatch, call: Call) -> None:
        self.is_busy = True
        self._batch = batch
        may_batch = batch.ending is not None or not batch.size
        self.publisher.send(call, self._on_reply, may_batch=may_batch)

    def _on_reply(self, call: Call, reply: Reply) -> None:
        """Redis has done or refused the call."""
        batch = self._batch
        assert batch is not None, "a reply belongs to a batch"
        self.is_busy = False
        try:
            if batch.is_claim:
                self._on_claim_reply(batch, reply)
            else:
                self._on_append_reply(batch, call, reply)
        finally:
            if self._awaits_in_flight and not self.is_busy:
                self._in_flight_done()
        if self.buffer is not None:
            self.publisher.budget.resume_output(self)

    def _on_claim_reply(self, batch: EventBatch, reply: Reply) -> None:
        try:
            claimed = self._claimed(reply)
        except CapsuleError as news:
            self._on_claim_refused(news, may_take_over=True)
            return
        self._on_batch_stored(batch)
        if batch.ending is None:
            self._on_claimed(claimed)

    def _on_append_reply(self, batch: EventBatch, call: Call, reply: Reply) -> None:
        try:
            self._seq = self.publisher.store.appended(self.execution_id, call, reply)
        except CapsuleError as news:
            self._log_refusal(news)
            self.feed(Lifecycle.on_append_refused)
            return
        self._on_batch_stored(batch)
        self._send_next()

    def _on_batch_stored(self, batch: EventBatch) -> None:
        self._batch = None
        if self.buffer is not None:
            self.buffer.stored(batch.size)
        if batch.ending is not None:
            self._is_closed = True
            self.feed(Lifecycle.on_end_stored)

    # --- under another lease, and the end ------------------------------------------------------

    def await_in_flight(self) -> None:
        """Send nothing until a new claim; feed `on_in_flight_done` once all calls are answered."""
        self._may_append = False
        if self.is_busy:
            self._awaits_in_flight = True
        else:
            self._in_flight_done()

    def _in_flight_done(self) -> None:
        self._awaits_in_flight = False
        self.feed(Lifecycle.on_in_flight_done)

    def close(self) -> None:
        """Discard events that are not stored, and all that come from now on."""
        self._is_closed = True
        self._may_append = False
        if self.buffer is not None:
            self.buffer.clear()
            self.publisher.budget.resume_output(self)
        self.publisher.release(self)

    def record_end(self, event: LastEvent) -> None:
        """The last event is stored."""
        self.publisher.index.record_end(self, event)
        self.publisher.release(self)

    # --- commands ------------------------------------------------------------------------------

    def feed(self, event: Event[P], *args: P.args, **kwargs: P.kwargs) -> None:
        self.publisher.supervisor.feed(self.execution, event, *args, **kwargs)

    def _take_commands(self, entries: Iterable[CommandEntry]) -> None:
        """Hand on the commands that are new, each once and in order."""
        for entry in entries:
            if not self._last_command_id or _parts(entry.id) > _parts(self._last_command_id):
                self._last_command_id = entry.id
                command = decode_command(entry.data)
                if command is None:
                    log.warning("task %s was sent an unknown command", self)
                else:
                    self.feed(Lifecycle.on_command_received, command)

    def read_commands(self) -> None:
        """Read new commands until the doorbell is quiet."""
        is_reading = self._is_rung is not None
        self._is_rung = True
        if not is_reading:
            self.publisher.background.spawn(self._read_commands())

    async def _read_commands(self) -> None:
        publisher = self.publisher
        try:
            while self._is_rung and self._may_append and not self._is_closed:
                self._is_rung = False
                read = partial(
                    publisher.store.read_commands, self.execution_id, self._last_command_id
                )
                self._take_commands(await publisher.background.call_until_answered(read))
        finally:
            self._is_rung = None

    def __str__(self) -> str:
        return self.execution_id


def _parts(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
