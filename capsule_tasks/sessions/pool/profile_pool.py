"""The pool of one profile: carries out what its plan decides, and reports events to the plan."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import msgspec

from capsule_tasks.errors import PoolUnavailable, SessionBusy, reason_of
from capsule_tasks.protocol.messages import Heartbeat
from capsule_tasks.sessions.arguments import check_loop
from capsule_tasks.sessions.health import Health
from capsule_tasks.sessions.info import PoolInfo
from capsule_tasks.sessions.pool.plan import (
    Action,
    Assign,
    PoolPlan,
    Refuse,
    Retire,
    Slot,
    Stage,
    Start,
)
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import OVER, SessionState
from capsule_tasks.settings import Profile, SessionConfig
from capsule_tasks.system.usage import resident_bytes

log = logging.getLogger("capsule_tasks.sessions")

_MAX_REASONS = 100
_OTHER_REASONS = "other reasons"


class PoolListener(Protocol):
    """Assigns work to the sessions of a pool; called on the event loop."""

    def child_ready(self, slot: Slot, session: Session) -> None:
        """A session is ready for work."""

    def child_retired(self, slot: Slot) -> None:
        """A session has no work any more and gets none; its process is being stopped."""


def _config(profile: Profile) -> SessionConfig:
    """The settings of its sessions, which do not replace a killed child: the pool does."""
    return msgspec.structs.replace(profile.session, replace_killed=False)


class ProfilePool:
    """Feeds the plan with events and carries out its actions; owns every session it starts."""

    def __init__(
        self,
        name: str,
        profile: Profile,
        spawner: TemplateSpawner | None,
        on_new: Callable[[Session], object] | None,
    ) -> None:
        self._name = name
        self._on_new = on_new
        self._stops_gracefully = profile.stop_mode == "graceful"
        self._config = _config(profile)
        self.plan = PoolPlan(profile.pool)
        """Callers that assign work ask the plan, and call `decide` if the slot is to be retired."""
        self._is_spawner_own = spawner is None
        self.spawner = spawner or TemplateSpawner(profile)
        self._sessions: dict[int, Session] = {}
        self._numbers: dict[Session, int] = {}
        self._waiters: dict[int, asyncio.Future[int]] = {}
        self._tickets = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._deciding = False
        self._totals: Counter[str] = Counter()
        self._retired: Counter[str] = Counter()
        self._last_error = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: PoolListener | None = None

    # --- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        self._check_loop("start()")
        if self.plan.stopping:
            raise PoolUnavailable(self._name, "it was stopped; make a new pool")
        if self._running:
            return
        self._running = True
        self._loop = asyncio.get_running_loop()
        if self._is_spawner_own:
            await self.spawner.start()
        self.decide()

    async def stop(self) -> None:
        self._check_loop("stop()")
        self.plan.stopping = True
        self.decide()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._is_spawner_own:
            await self.spawner.stop()
        if self._timer is not None:
            self._timer.cancel()

    # --- lending -------------------------------------------------------------------------------

    async def acquire(self, name: str | None) -> Session:
        if not self._running:
            raise PoolUnavailable(self._name, "it has not been started")
        self._check_loop("acquire()")
        ticket = next(self._tickets)
        self._waiters[ticket] = waiter = asyncio.get_running_loop().create_future()
        self.plan.wait(ticket, name)
        self.decide()
        try:
            number = await waiter
        except asyncio.CancelledError:
            self._cancel_wait(ticket, waiter)
            raise
        finally:
            del self._waiters[ticket]
        self._totals["acquires"] += 1
        return self._sessions[number]

    def owns(self, session: Session) -> bool:
        number = self._numbers.get(session)
        return number is not None and self.plan.slots[number].stage is Stage.BORROWED

    def release(self, session: Session) -> None:
        self._check_loop("release()")
        running = session.info.running
        if running:
            raise SessionBusy(session.session_id, running)
        number, executions = self._numbers[session], session.info.execution_count
        self.plan.released(number, self._now(), executions=executions)
        self.decide()

    def retire(self, session: Session) -> None:
        self._check_loop("retire()")
        number = self._numbers[session]
        self.plan.retire_when_idle(number, "its borrower gave it up")
        self.plan.released(number, self._now())
        self.decide()

    # --- assigning work ------------------------------------------------------------------------

    def set_listener(self, listener: PoolListener, capacity: int) -> None:
        """Have sessions that take up to `capacity` pieces of work each, `set_size` of them."""
        self._listener = listener
        self.plan.capacity = capacity
        self.plan.size = 0

    def set_size(self, size: int, max_sessions: int) -> None:
        """Have so many sessions, `max_sessions` with those that are being retired."""
        self.plan.set_size(size, max_sessions)
        self.decide()

    def check_child(self, slot: Slot) -> None:
        """Mark a session for retirement if its child has died or uses too much memory."""
        session = self._sessions.get(slot.number)
        if session is not None and not session.is_alive:
            self._on_loss(slot.number, session)
        elif session is not None:
            self._check_memory(slot.number, session, resident_bytes(session.pid or 0))

    def retire_when_idle(self, slot: Slot, reason: str) -> None:
        """Assign nothing more to a session, and replace it."""
        self.plan.retire_when_idle(slot.number, reason)
        self.decide()

    def replace_all(self, reason: str) -> None:
        """Replace every session, once its work has finished."""
        for number in list(self.plan.slots):
            self.plan.retire_when_idle(number, reason)
        self.decide()

    # --- renewal and information ---------------------------------------------------------------

    def renew(self, spawner: TemplateSpawner, profile: Profile) -> None:
        """Replace the spawner, which is not the pool's own, and every session."""
        if self._is_spawner_own:
            raise ValueError(f"pool {self._name!r} has its own spawner, which cannot be renewed")
        self._check_loop("renew()")
        self.spawner, self._config = spawner, _config(profile)
        self.replace_all("the pool was renewed")

    def info(self) -> PoolInfo:
        """The pool at this moment; on any thread."""
        stages = Counter(slot.stage for slot in list(self.plan.slots.values()))
        return PoolInfo(
            profile=self._name,
            starting=stages[Stage.STARTING],
            idle=stages[Stage.IDLE],
            borrowed=stages[Stage.BORROWED],
            working=stages[Stage.WORKING],
            retiring=stages[Stage.RETIRING],
            waiting=len(self.plan.waiters),
            breaker_open=self.plan.breaker.open_until is not None,
            template_pid=self.spawner.template_pid,
            starts_total=self._totals["starts"],
            start_failures_total=self._totals["start_failures"],
            forks_total=self.spawner.forks,
            cold_starts_total=self.spawner.cold_starts,
            templates_lost_total=self.spawner.templates_lost,
            acquires_total=self._totals["acquires"],
            lost_total=self._totals["lost"],
            early_exits=self.plan.early_exits,
            retired=dict(self._retired),
            last_error=self._last_error or self.spawner.last_error,
            sessions=tuple(session.info for session in list(self._sessions.values())),
        )

    def _check_loop(self, call: str) -> None:
        check_loop(call, f"pool {self._name!r}", self._loop)

    def _cancel_wait(self, ticket: int, waiter: asyncio.Future[int]) -> None:
        """Withdraw a waiter that was cancelled; return the session it may have got just before."""
        self.plan.cancel_wait(ticket)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.plan.released(waiter.result(), self._now(), used=False)
        self.decide()

    # --- doing what was decided ----------------------------------------------------------------

    def decide(self) -> None:
        """Carry out what the plan decides, until nothing more is due."""
        if self._deciding or not (self._running or self.plan.stopping):
            return  # an event that an action causes is handled by the loop below
        self._deciding = True
        try:
            while actions := self.plan.decide(self._now()):
                for action in actions:
                    self._carry_out(action)
        finally:
            self._deciding = False
        self._check_later()

    def _carry_out(self, action: Action) -> None:
        try:
            self._act(action)
        except Exception:  # the plan has booked the other actions: they must be carried out
            log.exception("pool %r could not carry out %r", self._name, action)

    def _act(self, action: Action) -> None:
        match action:
            case Assign(ticket, slot):
                waiter = self._waiters[ticket]
                if waiter.done():
                    # Cancelled in this iteration of the loop: `acquire` has not run since, so the
                    # plan does not know yet that the waiter has left.
                    self.plan.released(slot, self._now(), used=False)
                else:
                    waiter.set_result(slot)
            case Start(slot):
                self._spawn(self._start(slot))
            case Retire(slot, reason):
                self._retired[self._counted_as(reason)] += 1
                if self._listener is not None:
                    self._listener.child_retired(self.plan.slots[slot])
                self._spawn(self._end(slot))
            case Refuse(ticket, reason):
                waiter = self._waiters[ticket]
                if not waiter.done():
                    waiter.set_exception(PoolUnavailable(self._name, reason))

    def _counted_as(self, reason: str) -> str:
        """The key of a reason in the totals, which would grow without bound."""
        is_new = reason not in self._retired
        return _OTHER_REASONS if is_new and len(self._retired) >= _MAX_REASONS else reason

    async def _start(self, number: int) -> None:
        session = Session(self._config, spawner=self.spawner)
        self._sessions[number] = session
        self._numbers[session] = number
        self._totals["starts"] += 1
        session.add_heartbeat_listener(partial(self._on_heartbeat, number, session))
        session.add_health_listener(partial(self._on_health, number))
        session.add_state_listener(partial(self._on_state, number, session), OVER)
        try:
            if self._on_new is not None:
                self._on_new(session)
            await session.start()
        except Exception as error:  # noqa: BLE001 - whatever it was, the breaker counts it
            self._forget(number)
            notes = getattr(error, "__notes__", ())
            self._on_start_failed(number, "\n".join((reason_of(error), *notes)))
        else:
            slot = self.plan.slots[number]
            self.plan.started(number, resident_bytes(session.pid or 0), self._now())
            if not session.is_alive:  # it ended before the pool counted on it
                self._on_loss(number, session)
            elif self._listener is not None and slot.stage is Stage.IDLE:
                self._listener.child_ready(slot, session)
        self.decide()

    def _on_start_failed(self, number: int, error: str) -> None:
        slot = self.plan.slots.get(number)
        if slot is None or slot.stage is Stage.RETIRING:  # stopped on purpose
            self.plan.stopped(number)
            return
        self._totals["start_failures"] += 1
        self._last_error = error
        log.warning("a session of pool %r did not start: %s", self._name, error)
        self.plan.start_failed(number, error, self._now())
        breaker = self.plan.breaker
        # Borrowers see the error; without borrowers the log has to show it.
        if self._listener is not None and breaker.open_until is not None:
            pause_s = breaker.open_until - self._now()
            log.error(
                "pool %r has no sessions: %d starts in a row failed; the next start is in %.1f s",
                *(self._name, breaker.failures, pause_s),
            )

    async def _end(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is None:
            return  # its start failed, and removes the slot
        if self._stops_gracefully and not session.info.running:
            await session.shutdown("retired")
        else:
            await session.terminate()
        self._forget(number)
        self.plan.stopped(number)
        self.decide()

    def _forget(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._numbers.pop(session, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_later(self) -> None:
        """Have `decide` called when time alone makes something due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self.plan.stopping else self.plan.next_check_at(self._now())
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self.decide)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- events of sessions --------------------------------------------------------------------

    def _on_heartbeat(self, number: int, session: Session, heartbeat: Heartbeat) -> None:
        self._check_memory(number, session, heartbeat.rss_bytes)
        self.decide()

    def _on_health(self, number: int, health: Health) -> None:
        if health.unresponsive:
            self.plan.heartbeat_missed(number)
            self.decide()

    def _on_state(
        self, number: int, session: Session, _old: SessionState, _new: SessionState
    ) -> None:
        self._on_loss(number, session)
        asyncio.get_running_loop().call_soon(self.decide)

    def _on_loss(self, number: int, session: Session) -> None:
        reason = session.info.last_error or "its child ended"
        self._totals["lost"] += self.plan.lost(number, reason, self._now())

    def _check_memory(self, number: int, session: Session, rss_bytes: int) -> None:
        if self.plan.reported(number, rss_bytes):
            reason = self.plan.slots[number].retire_reason
            log.warning("session %s is replaced: %s", session.session_id, reason)
