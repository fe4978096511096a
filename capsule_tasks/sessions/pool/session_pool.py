"""`SessionPool`: warm sessions, each lent to one borrower at a time, never leaked.

The pool of each profile carries out what its plan decides, and reports events to the plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Protocol, Self

import msgspec

from capsule_tasks.errors import NotBorrowed, PoolUnavailable, SessionBusy, reason_of
from capsule_tasks.protocol.messages import Heartbeat
from capsule_tasks.sessions.arguments import check_loop, check_type
from capsule_tasks.sessions.info import Health, PoolInfo
from capsule_tasks.sessions.pool.plan import Assign, PoolPlan, Refuse, Retire, Slot, Stage, Start
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import OVER, SessionState
from capsule_tasks.sessions.tasks import SessionTasks, shielded
from capsule_tasks.settings import Profile, SessionConfig
from capsule_tasks.system.usage import resident_bytes

log = logging.getLogger("capsule_tasks.sessions")

DEFAULT_PROFILE = "app"
_MAX_REASONS = 100
"""Reasons that are counted apart: some name a number of bytes or an execution."""
_OTHER_REASONS = "other reasons"


class PoolListener(Protocol):
    """Assigns work to the sessions of a pool; called on the event loop."""

    def child_ready(self, slot: Slot, session: Session) -> None:
        """A session is ready for work."""

    def child_retired(self, slot: Slot) -> None:
        """A session has no work any more and gets none; its process is being stopped."""

    def starts_fail(self, error: str) -> None:
        """No session starts: several in a row did not, the last with this error."""


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
        self._slots: dict[Session, Slot] = {}
        self._tasks = SessionTasks(f"pool {name!r}")
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._deciding = False
        self._totals = Counter(
            starts_total=0, start_failures_total=0, acquires_total=0, lost_total=0
        )
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
        await self._tasks.end()
        if self._is_spawner_own:
            await self.spawner.stop()
        if self._timer is not None:
            self._timer.cancel()

    # --- lending -------------------------------------------------------------------------------

    async def acquire(self, name: str | None) -> Session:
        if not self._running:
            raise PoolUnavailable(self._name, "it has not been started")
        self._check_loop("acquire()")
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.plan.wait(waiter, name)
        self.decide()
        try:
            slot = await waiter
        except asyncio.CancelledError:
            self.plan.cancel_wait(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # The waiter got a session just before the cancel.
                self.plan.released(waiter.result(), self._now(), used=False)
            self.decide()
            raise
        self._totals["acquires_total"] += 1
        assert slot.session is not None
        return slot.session

    def owns(self, session: Session) -> bool:
        """Whether the session is one of this pool and borrowed."""
        slot = self._slots.get(session)
        return slot is not None and slot.stage is Stage.BORROWED

    def release(self, session: Session) -> None:
        self._check_loop("release()")
        running = session.info.running
        if running:
            raise SessionBusy(session.session_id, running)
        executions = session.info.execution_count
        self.plan.released(self._slots[session], self._now(), executions=executions)
        self.decide()

    def retire(self, session: Session) -> None:
        self._check_loop("retire()")
        slot = self._slots[session]
        self.plan.retire_when_idle(slot, "its borrower gave it up")
        self.plan.released(slot, self._now())
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
        session = slot.session
        if session is not None and not session.is_alive:
            self._on_loss(slot, session)
        elif session is not None:
            self._check_memory(slot, session, resident_bytes(session.pid or 0))

    def retire_when_idle(self, slot: Slot, reason: str) -> None:
        """Assign nothing more to a session, and replace it."""
        self.plan.retire_when_idle(slot, reason)
        self.decide()

    def replace_all(self, reason: str) -> None:
        """Replace every session, once its work has finished."""
        for slot in self.plan.slots.values():
            self.plan.retire_when_idle(slot, reason)
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
            **{stage.name.lower(): stages[stage] for stage in Stage},
            **self._totals,
            waiting=len(self.plan.waiters),
            breaker_open=self.plan.breaker.open_until is not None,
            template_pid=self.spawner.template_pid,
            forks_total=self.spawner.forks,
            cold_starts_total=self.spawner.cold_starts,
            templates_lost_total=self.spawner.templates_lost,
            early_exits=self.plan.early_exits,
            retired=dict(self._retired),
            last_error=self._last_error or self.spawner.last_error,
            sessions=tuple(session.info for session in list(self._slots)),
        )

    def _check_loop(self, call: str) -> None:
        check_loop(call, f"pool {self._name!r}", self._loop)

    # --- doing what was decided ----------------------------------------------------------------

    def decide(self) -> None:
        """Carry out what the plan decides, until nothing more is due."""
        if self._deciding or not (self._running or self.plan.stopping):
            return  # an event that an action causes is handled by the loop below
        self._deciding = True
        try:
            while actions := self.plan.decide(self._now()):
                for action in actions:
                    try:
                        self._carry_out(action)
                    except Exception:  # the others have been booked as well, and must be done
                        log.exception("pool %r could not carry out %r", self._name, action)
        finally:
            self._deciding = False
        self._check_later()

    def _carry_out(self, action: Assign | Start | Retire | Refuse) -> None:
        match action:
            case Assign(waiter, slot):
                if waiter.done():
                    # Cancelled in this iteration of the loop: `acquire` has not run since, so the
                    # plan does not know yet that the waiter has left.
                    self.plan.released(slot, self._now(), used=False)
                else:
                    waiter.set_result(slot)
            case Start(slot):
                self._tasks.spawn(self._start(slot))
            case Retire(slot, reason):
                is_known = reason in self._retired or len(self._retired) < _MAX_REASONS
                self._retired[reason if is_known else _OTHER_REASONS] += 1
                if self._listener is not None:
                    self._listener.child_retired(slot)
                self._tasks.spawn(self._end(slot))
            case Refuse(waiter, reason):
                if not waiter.done():
                    waiter.set_exception(PoolUnavailable(self._name, reason))

    async def _start(self, slot: Slot) -> None:
        slot.session = session = Session(self._config, spawner=self.spawner)
        self._slots[session] = slot
        self._totals["starts_total"] += 1
        session.add_heartbeat_listener(partial(self._on_heartbeat, slot, session))
        session.add_health_listener(partial(self._on_health, slot))
        session.add_state_listener(partial(self._on_state, slot, session), OVER)
        try:
            if self._on_new is not None:
                self._on_new(session)
            await session.start()
        except Exception as error:  # noqa: BLE001 - whatever it was, the breaker counts it
            slot.session = None
            self._slots.pop(session, None)
            notes = getattr(error, "__notes__", ())
            self._on_start_failed(slot, "\n".join((reason_of(error), *notes)))
        else:
            self.plan.started(slot, resident_bytes(session.pid or 0), self._now())
            if not session.is_alive:  # it ended before the pool counted on it
                self._on_loss(slot, session)
            elif self._listener is not None and slot.stage is Stage.IDLE:
                self._listener.child_ready(slot, session)
        self.decide()

    def _on_start_failed(self, slot: Slot, error: str) -> None:
        if slot.stage is Stage.RETIRING:  # stopped on purpose
            self.plan.stopped(slot)
            return
        self._totals["start_failures_total"] += 1
        self._last_error = error
        log.warning("a session of pool %r did not start: %s", self._name, error)
        self.plan.start_failed(slot, error, self._now())
        breaker = self.plan.breaker
        # Borrowers see the error; without borrowers the log has to show it.
        if self._listener is not None and breaker.open_until is not None:
            pause_s = breaker.open_until - self._now()
            log.error(
                "pool %r has no sessions: %d starts in a row failed; the next start is in %.1f s",
                *(self._name, breaker.failures, pause_s),
            )
            self._listener.starts_fail(error)

    async def _end(self, slot: Slot) -> None:
        session = slot.session
        if session is None:
            return  # its start failed, and removes the slot
        if self._stops_gracefully and not session.info.running:
            await session.shutdown("retired")
        else:
            await session.terminate()
        self._slots.pop(session, None)
        self.plan.stopped(slot)
        self.decide()

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

    def _on_heartbeat(self, slot: Slot, session: Session, heartbeat: Heartbeat) -> None:
        self._check_memory(slot, session, heartbeat.rss_bytes)
        self.decide()

    def _on_health(self, slot: Slot, health: Health) -> None:
        if health.unresponsive:
            self.plan.heartbeat_missed(slot)
            self.decide()

    def _on_state(self, slot: Slot, session: Session, *_: SessionState) -> None:
        self._on_loss(slot, session)
        asyncio.get_running_loop().call_soon(self.decide)

    def _on_loss(self, slot: Slot, session: Session) -> None:
        reason = session.info.last_error or "its child ended"
        self._totals["lost_total"] += self.plan.lost(slot, reason, self._now())

    def _check_memory(self, slot: Slot, session: Session, rss_bytes: int) -> None:
        if self.plan.reported(slot, rss_bytes):
            log.warning("session %s is replaced: %s", session.session_id, slot.retire_reason)


class SessionPool:
    """Sessions by profile. Each profile has a pool of its own, so none can starve another.

    Borrow with `async with pool.borrow() as session`; or `acquire`, and `release` when done.
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile] | None = None,
        *,
        spawner: TemplateSpawner | None = None,
        on_new: Callable[[Session], object] | None = None,
    ) -> None:
        """With a `spawner`, which the caller starts and stops, it starts all sessions.

        `on_new` is called with each session before it starts, so that listeners miss nothing.
        """
        check_type("profiles", profiles, Mapping, None)
        if profiles is None:
            profiles = {DEFAULT_PROFILE: Profile()}
        elif not profiles:
            raise ValueError("profiles must hold at least one, or be None for the default")
        for name, profile in profiles.items():
            check_type("the name of a profile", name, str)
            check_type(f"profile {name!r}", profile, Profile)
        self._pools = {
            name: ProfilePool(name, profile, spawner, on_new) for name, profile in profiles.items()
        }

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load the templates and start filling the pools; does not wait for the sessions."""
        try:
            await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop every session, busy ones too, and fail the waiters. Safe at any time, and twice.

        A caller that is cancelled meanwhile returns only when everything has stopped.
        """
        await shielded(asyncio.gather(*(pool.stop() for pool in self._pools.values())))

    async def acquire(self, profile: str = DEFAULT_PROFILE, *, name: str | None = None) -> Session:
        """A session for this caller alone; first come, first served. Return it with `release`.

        With a `name` it is the session of that name, with the namespace as its last borrower left
        it. PoolUnavailable says why there will be no session.
        """
        check_type("name", name, str, None)
        return await self.profile_pool(profile).acquire(name)

    def release(self, session: Session) -> None:
        """Return a session; NotBorrowed if it is not borrowed, SessionBusy if code runs in it."""
        self._owner_pool(session).release(session)

    def retire(self, session: Session) -> None:
        """Return a session that must not be used again, whatever still runs in it."""
        self._owner_pool(session).retire(session)

    @contextlib.asynccontextmanager
    async def borrow(
        self, profile: str = DEFAULT_PROFILE, *, name: str | None = None
    ) -> AsyncIterator[Session]:
        """`acquire`, then `release`; a session in which code still runs is retired instead."""
        check_type("name", name, str, None)
        pool = self.profile_pool(profile)
        session = await pool.acquire(name)
        try:
            yield session
        finally:
            if pool.owns(session):
                (pool.retire if session.info.running else pool.release)(session)

    def renew(self, spawner: TemplateSpawner, profiles: Mapping[str, Profile]) -> None:
        """Start sessions by these from now on; retire the others, borrowed ones on their release.

        The settings of the pools, as the number of sessions and their age, stay as they were.
        """
        for name, profile in profiles.items():
            self.profile_pool(name).renew(spawner, profile)

    def info(self, profile: str = DEFAULT_PROFILE) -> PoolInfo:
        """The state and the totals of the pool of a profile."""
        return self.profile_pool(profile).info()

    def spawner(self, profile: str = DEFAULT_PROFILE) -> TemplateSpawner:
        """The spawner of the profile's sessions, for a session that the pool should not own."""
        return self.profile_pool(profile).spawner

    def profile_pool(self, profile: str) -> ProfilePool:
        """The pool of one profile, for a caller that assigns work to sessions and borrows none."""
        check_type("profile", profile, str)
        pool = self._pools.get(profile)
        if pool is None:
            known = ", ".join(map(repr, self._pools))
            raise ValueError(f"there is no profile {profile!r}; this pool has {known}")
        return pool

    def _owner_pool(self, session: Session) -> ProfilePool:
        check_type("session", session, Session)
        for pool in self._pools.values():
            if pool.owns(session):
                return pool
        raise NotBorrowed(session.session_id)
