"""What one job says, on its way to its stream: claimed, stored in order, ended once.

    claiming ──▶ live ──▶ over
       ▲ │        ▲ │
       │ ▼        │ │
      fresh ──────┘ │
         └──────────┴────▶ mute     another attempt followed, or the execution is over

A job that is new is *fresh*: it begins at once, and is claimed together with what it says first or
with its end, or a few milliseconds later, whatever comes first. Any other is claimed before it
begins. Nothing here ever fails the job: a Redis that does not answer delays its first step for a
while, and what it says waits, up to a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from capsule_tasks.errors import (
    AttemptClosed,
    AttemptStale,
    CapsuleError,
    ExecutionEnded,
    ExecutionUnknown,
    StorageError,
)
from capsule_tasks.protocol.events import Accepted, AttemptEnded, EventMessage, encode_event
from capsule_tasks.protocol.messages import (
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
)
from capsule_tasks.storage.execution_core import NOBODY
from capsule_tasks.storage.execution_types import Claimed
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call
from capsule_tasks.taskpool.endings import Ending, another, lost
from capsule_tasks.taskpool.jobs import Job
from capsule_tasks.taskpool.streams.attempt import Attempt
from capsule_tasks.taskpool.streams.background import AGAIN_S
from capsule_tasks.taskpool.streams.backlog import Backlog
from capsule_tasks.taskpool.streams.line import Line
from capsule_tasks.taskpool.streams.orders import Ear

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.worker import Streams

log = logging.getLogger("capsule_tasks.taskpool")

_PREVIOUS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_MOST_UNKNOWN_S = 0.05
_YOUNG_S = 1.0
"""A worker that stood still for longer takes nothing from who came later."""
_MESSAGES = (Output, Gap, Progress, InputRequest, InputClosed)


class Phase(Enum):
    FRESH = auto()
    CLAIMING = auto()
    LIVE = auto()
    MUTE = auto()
    OVER = auto()


_SPEAKING = (Phase.FRESH, Phase.CLAIMING, Phase.LIVE)


class _Batch(NamedTuple):
    """What is on its way."""

    events: list[bytes]
    size: int
    is_loud: bool
    ending: Ending | None
    is_claim: bool


class Publication:
    """One job's stream, on the runtime's loop."""

    def __init__(self, streams: Streams, job: Job, attempt: Attempt) -> None:
        self.job = job
        self.execution_id: str = job.call.task_id
        self.phase = Phase.CLAIMING
        self.attempt = attempt
        self.backlog = Backlog(streams.settings, streams.room)
        self.questions: dict[str, InputRequest] = {}
        """The requests that wait for an answer, in order."""
        self.has_begun = False
        self.is_held = False
        """Whoever looks at what its worker holds will find it."""
        self._streams = streams
        self._ear = Ear(self.execution_id, streams.store, streams.background, self._obey)
        self._line = Line(streams.connection, streams.store, streams.background, self._on_free)
        self._held_by = ""
        """The incarnation under which it is found already."""
        self._is_accepted = False
        self._is_due = False
        """Also quiet events have waited for long enough."""
        self._is_moving = False
        self._ending: Ending | None = None
        self._claimed_then: Callable[[], object] | None = None
        self._then: Callable[[], object] | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._came_at = asyncio.get_running_loop().time()
        attempt.name_claim(streams.new_claim())

    @property
    def is_live(self) -> bool:
        """Whether its attempt is claimed, and not over."""
        return self.phase is Phase.LIVE

    @property
    def is_heard(self) -> bool:
        """Whether what it says now comes into its stream."""
        return self.phase in _SPEAKING and self._ending is None

    # --- the beginning -------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the job run, whether or not its attempt could be claimed; once."""
        if self.has_begun:
            return
        self.has_begun = True
        self._stop_waiting()
        self._streams.crew.submit(self.job)

    def begin_fresh(self) -> None:
        """It is new: let it run, and claim it soon."""
        if self.phase is not Phase.CLAIMING:
            return
        self.phase = Phase.FRESH
        if self._ending is not None and self._is_unseen(self._ending):
            self._mute()
            return
        self.begin()
        self._flush()

    def wait_at_most(self, seconds: float) -> None:
        self._limit = asyncio.get_running_loop().call_later(seconds, self.begin)

    async def retake(self, owner: str) -> None:
        """Its worker works under a new lease: go on in a new attempt, if nobody else has."""
        self._is_moving = True
        try:
            await self._line.settle()  # what is on its way belongs to the attempt before
        finally:
            self._is_moving = False
        if self.is_live and self.attempt.owner != owner:
            self.phase = Phase.CLAIMING
            self.attempt.name_claim(self._streams.new_claim())
            for question in self.questions.values():  # those of an attempt that is over are closed
                self.backlog.add(question)
            await self.claim(owner, self.attempt.owner)

    async def claim(self, owner: str, held_by: str = "") -> None:
        """Have an attempt; begin the job, or end it if that is what it was told."""
        if self.job.is_retry and not held_by:
            await self._let_previous_end()
        while self.phase is Phase.CLAIMING:
            call = self.attempt.claim_call(owner, held_by=held_by)
            try:
                claimed = self.attempt.claimed(await self._streams.store.make(call))
            except ExecutionEnded as over:
                if held_by:  # it was ended by another while it ran here
                    self._on_refused(over)
                else:
                    self._on_over(over)
                return
            except StorageError as error:
                self._streams.background.say_unavailable(error)
                await asyncio.sleep(AGAIN_S)
            except CapsuleError as error:
                log.warning("task %s has no stream: %s", self.execution_id, error)
                self._mute()
                self.begin()
                return
            else:
                if not held_by:  # said to attempts before, of which only a cancel ends this one too
                    self._ear.hear(claimed.told)
                self._on_claimed(claimed)
                self.begin()
                self._flush()

    async def _let_previous_end(self) -> None:
        """A retry may be here before the attempt that asked for it has said its last words."""
        waited_s = 0.0
        for pause_s in _PREVIOUS_S:
            try:
                state = (await self._streams.store.look(self.execution_id)).state
            except StorageError:
                return
            # It may not have said its first words either.
            if state != "running" and not (state == "unknown" and waited_s < _MOST_UNKNOWN_S):
                return
            await asyncio.sleep(pause_s)
            waited_s += pause_s

    def _on_claimed(self, claimed: Claimed) -> None:
        self.phase = Phase.LIVE
        if self._ending is None:
            self._streams.notes.state(self, "running")
        self._tell_if_held()
        self._ear.hear(claimed.told)
        if self._ear.is_rung:
            self.ring()
        owner = self._streams.tenure.incarnation
        if self.attempt.owner != owner:  # that lease was lost while the claim was on its way
            self._streams.background.spawn(self.retake(owner))

    def _on_over(self, over: ExecutionEnded) -> None:
        """Its end was written: what Celery delivers once more runs unseen, unless cancelled."""
        self._on_repeated()
        if over.outcome == "cancelled" and not self.has_begun:
            self._streams.orders.cancel(self.job)
        self.begin()

    # --- what it says --------------------------------------------------------------------------

    def say(self, message: Message) -> bool | None:
        """One message of the child; False if there is no room for more output now."""
        if not self.is_heard or not isinstance(message, _MESSAGES):
            return None
        if isinstance(message, InputRequest):
            self.questions[message.id] = message
        elif isinstance(message, InputClosed):
            self.questions.pop(message.request_id, None)
        if not isinstance(message, Output):
            self.tell(message)
            return None
        self.backlog.add_output(message)
        self._is_due = self._is_due or self._is_accepted
        self._flush()
        return self._streams.room.has_room(self, message)

    def tell(self, event: EventMessage) -> None:
        """One event, in order with what it says."""
        if self.is_heard:
            self.backlog.add(event)
            self._is_due = True
            self._flush()

    def accepted(self, pid: int, then: Callable[[], object] | None) -> None:
        """Its code runs; `then` is called once its claim is stored, or has had its time."""
        self._is_accepted = True
        self._claimed_then = then
        if self.phase in _SPEAKING:
            self.backlog.add(Accepted(pid=pid))
            self._streams.soon.add(self)
        if self.is_live:
            self._tell_if_held()
        elif self.phase is not Phase.FRESH:
            self._tell_claimed()

    def claim_now(self) -> None:
        """Another attempt follows, whose claim is not to come before this one's."""
        self._ear.is_rung = True
        self.on_due()

    def on_due(self) -> None:
        """Nobody is in a hurry to hear that a task runs; but now it has for a while."""
        self._is_due = True
        self._flush()
        self._limit_claim()

    def on_held(self, incarnation: str) -> None:
        """Whoever looks at what that incarnation holds finds it."""
        self._held_by = incarnation
        if self.is_live:
            self._tell_if_held()

    def _tell_if_held(self) -> None:
        """A claim that no reaper would find, as its lease is lost, is taken anew first."""
        owner = self.attempt.owner
        if self._held_by == owner and self._streams.tenure.is_sure(owner):
            self._tell_claimed()
        else:
            self._limit_claim()

    def _limit_claim(self) -> None:
        if self._claimed_then is not None and self._limit is None:
            limit_s = self._streams.settings.claim_wait_s
            self._limit = asyncio.get_running_loop().call_later(limit_s, self._tell_claimed)

    def _tell_claimed(self) -> None:
        """Have Celery acknowledge its message, if that waits for the claim."""
        then, self._claimed_then = self._claimed_then, None
        if then is not None:
            self._stop_waiting()
            then()

    # --- what it is told -----------------------------------------------------------------------

    def ring(self) -> None:
        """There may be something that it was told."""
        self._ear.is_rung = True
        if self.phase is Phase.FRESH and self._is_accepted:  # its claim will tell
            self.on_due()
        if self.is_live:
            self._ear.listen(lambda: self.is_live)

    def _obey(self, data: bytes) -> None:
        self._streams.orders.obey(self, data)

    # --- to Redis ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what waits, unless something is on its way."""
        has_work = bool(self.backlog) or (self._ear.is_rung and self.phase is Phase.FRESH)
        has_work = has_work and self._is_due
        if self._line.is_busy or self._is_moving or not (has_work or self._ending is not None):
            return
        if self.phase is not Phase.FRESH and self.phase is not Phase.LIVE:
            return
        batch = self._next_batch()
        if batch.is_claim:
            self._send_claim(batch, held_by=NOBODY)
        else:
            call = self.attempt.append_call(batch.events, batch.ending, is_loud=batch.is_loud)
            self._send(batch, call)

    def _next_batch(self) -> _Batch:
        events, size, is_loud = self.backlog.take()
        ending = self._ending if not self.backlog else None
        if ending is not None:
            events.append(encode_event(ending.event, self.backlog.offset))
        return _Batch(events, size, is_loud, ending, is_claim=self.phase is Phase.FRESH)

    def _send_claim(self, batch: _Batch, held_by: str) -> None:
        # What has ended is held only until its group has counted it.
        if not self.is_held and (batch.ending is None or self.job.group[0]):
            self._streams.tenure.hold_soon([self])
        call = self.attempt.claim_call(
            self._streams.tenure.incarnation,
            held_by=held_by,
            events=batch.events,
            ending=batch.ending,
            is_loud=batch.is_loud,
        )
        self._send(batch, call)

    def _send(self, batch: _Batch, call: Call) -> None:
        is_patient = batch.ending is not None or not batch.size
        self._line.send(call, partial(self._take, batch, call), is_patient=is_patient)

    async def _take_over(self, batch: _Batch) -> None:
        """Somebody runs it who may be about to leave it: a task that replaced itself, say."""
        await self._let_previous_end()
        if self.phase is not Phase.CLAIMING:
            return
        if self._ending is not None and self._ending.state == "waiting":
            self._mute()  # who has it now is the attempt that follows
        else:
            self._send_claim(batch, held_by="")

    def _take(self, batch: _Batch, call: Call, reply: Reply) -> None:
        """What was on its way has arrived, or was refused."""
        try:
            if batch.is_claim:
                self._on_claimed(self.attempt.claimed(reply))
            else:
                self.attempt.appended(call, reply)
        except AttemptStale as news:
            age_s = asyncio.get_running_loop().time() - self._came_at
            if batch.is_claim and self.phase is Phase.FRESH and age_s < _YOUNG_S:
                self.phase = Phase.CLAIMING
                self._streams.background.spawn(self._take_over(batch))
            else:
                self._on_refused(news)
        except ExecutionEnded as news:
            if batch.is_claim:
                self._on_repeated()
            else:
                self._on_refused(news)
        except (AttemptClosed, ExecutionUnknown) as news:
            self._on_refused(news)
        except CapsuleError:
            log.exception("what task %s says cannot be stored", self.execution_id)
            self._mute()
        else:
            self.backlog.stored(batch.size)
            if batch.ending is not None:
                self.phase = Phase.OVER
                self._streams.notes.end(self, batch.ending)
                self._streams.forget(self)
                self.call_then()

    def _on_repeated(self) -> None:
        """Its id has had its end: an errback called twice, or a frozen canvas applied again."""
        log.info("task %s runs again after its end: its output is not stored", self.execution_id)
        self._mute()

    def _on_refused(self, news: CapsuleError) -> None:
        """Another attempt has the stream: of a message with the same id, or of this message."""
        is_repeated = isinstance(news, AttemptStale) and not self.attempt.is_robbed_by(news.claim)
        level = logging.INFO if is_repeated else logging.WARNING
        log.log(level, "task %s: its output is no longer stored: %s", self.execution_id, news)
        self._mute()

    def _on_free(self) -> None:
        self._streams.room.may_read_on(self)
        self._flush()

    async def drained(self) -> None:
        """Wait until what was said is stored."""
        while self._line.is_busy:
            await self._line.settle()

    # --- the end -------------------------------------------------------------------------------

    def end(self, ending: Ending, then: Callable[[], object]) -> None:
        """The attempt is over: `then` is called once that is stored, or has had its time."""
        if self._ending is not None or self.phase not in _SPEAKING:
            then()
            return
        self.has_begun = True
        if self._is_unseen(ending):
            self._mute()
            then()
            return
        self._ending = ending
        self._then = then
        self._stop_waiting()
        self._streams.ends.add(self)
        self._flush()

    def leave(self) -> None:
        """Its worker is stopped: it comes again, unless its message is acknowledged already."""
        if self._ending is None:
            is_gone = self._is_accepted and not self.job.acks_late and self._claimed_then is None
            self._claimed_then = None
            why = "its worker was stopped"
            self.end(lost(why) if is_gone else another("requeued", why), lambda: None)

    def _is_unseen(self, ending: Ending) -> bool:
        """Whether it said nothing, nobody knows of it, and it will come again."""
        is_known = self.phase is not Phase.FRESH or self._line.is_busy or bool(self.backlog)
        return isinstance(ending.event, AttemptEnded) and not is_known

    def _mute(self) -> None:
        self.phase = Phase.MUTE
        for request_id in self.questions:
            self._streams.crew.end_input(self.job, request_id)
        self.backlog.clear()
        self._streams.room.may_read_on(self)
        self._streams.forget(self)
        self.call_then()

    def call_then(self) -> None:
        """Celery hears of the end."""
        self._streams.ends.discard(self)
        self._tell_claimed()
        if self.has_begun:
            self._stop_waiting()
        then, self._then = self._then, None
        if then is not None:
            then()

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
