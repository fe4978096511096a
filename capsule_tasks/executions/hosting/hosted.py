"""One named session in this worker, from the take to the release.

    take ──▶ start the child ──▶ begin, run, done ──▶ …   ──▶ release
                                   ▲                │
                                   └── rung ── idle ◀┘

Whatever is lost on the way, the call log in Redis is the truth: a call leaves it only when its end
and its result are stored, and only the owner with the latest token changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, TypeVar

from capsule_tasks.errors import (
    CapsuleError,
    LeaseLost,
    SessionHeld,
    SessionOwnerLost,
    SessionStartFailed,
    SessionUnfinished,
    StorageError,
    TenantFull,
    reason_of,
)
from capsule_tasks.executions.ends import EndKind
from capsule_tasks.executions.hosting.checkpointing import (
    Checkpoints,
    checkpoint_made,
    save_namespace,
    why_not_saved,
    with_lost_call,
)
from capsule_tasks.executions.hosting.child import SessionChild
from capsule_tasks.executions.hosting.lane import SessionLane
from capsule_tasks.executions.hosting.ownership import Ownership
from capsule_tasks.executions.hosting.plan import FIRM, NEEDS_CHECKPOINT, Decision, Leave, Save
from capsule_tasks.executions.hosting.requests import Requests, names_in
from capsule_tasks.executions.hosting.runner import CallRunner
from capsule_tasks.executions.hosting.tenants import UsageWatch
from capsule_tasks.protocol.calls import (
    CheckpointRequest,
    RequestDone,
    RestartRequest,
    SessionReply,
    SessionRequest,
)
from capsule_tasks.protocol.events import SessionRestored
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.tasks import shielded
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest
from capsule_tasks.storage.sessions.types import BegunCall, SessionEntry, Taken, Wanted

if TYPE_CHECKING:
    from capsule_tasks.executions.hosting.profile import ProfileHost

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

_NO_CHILD = "SessionStartFailed"
_OVER_LIMIT = "TenantOverLimit"
CLOCKS_S = 10.0
"""By how much Redis may forget the end of a call too early, generously: clocks differ."""
_GIVE_UP_AFTER = 3
"""Attempts of one worker to give a session a child, until its calls fail."""


class HostedSession:
    """Runs as one task; `ring`, `order` and `retake` reach it from outside."""

    def __init__(self, host: ProfileHost, wanted: Wanted) -> None:
        self.session_id = wanted.session_id
        self.ownership = Ownership(self.session_id, host)
        self._host = host
        self._wanted = wanted
        self._wake = asyncio.Event()
        self._order: Decision | None = None
        dispatcher = host.supervisor.dispatcher
        self._lane = SessionLane(host.supervisor, dispatcher.sent, self._on_child_refused)
        self._child = SessionChild(self.session_id, host.profile, self._lane)
        self.runner = CallRunner(
            self.session_id, host.publisher, host.supervisor, host.results, self._lane
        )
        self._checkpoints = Checkpoints(
            self.session_id, host.checkpoints, host.background, host.restores
        )
        self._executions = 0
        """Calls of the session that are done, whoever ran them."""
        self._requests = Requests(self, host.store, host.spawn)
        self._tenant = ""
        self._usage = UsageWatch(
            lambda: self._tenant, host.tenants, self._child.meter, self._stop_over_limit
        )
        self._before_restart = 0
        """Those of them that were done when the session was restarted."""
        self._inherited: BegunCall | None = None
        self._claim_by = math.inf
        """When Redis may have forgotten the end of the inherited call, by the loop's clock."""
        self._restored: SessionRestored | None = None
        """To be told to the next call."""

    @property
    def child(self) -> Session | None:
        """The session's child, once its namespace is there: calls are sent to it."""
        child = self._lane.child
        return child.session if child is not None and child.session.is_alive else None

    # --- from outside --------------------------------------------------------------------------

    def ring(self) -> None:
        """There may be another call, or a request."""
        self._wake.set()

    def attend(self) -> None:
        """There may be a request to the owner."""
        if self.ownership.token and not self.ownership.is_lost:
            self._host.spawn(self._attend())

    async def _attend(self) -> None:
        try:
            await self._requests.read()
        except SessionOwnerLost:  # the next owner answers
            await self.kill("its session was forgotten, or another worker has it")
            self._wake.set()

    def order(self, decision: Decision) -> None:
        """Carry out what the plan has decided, now that no call runs."""
        self._order = decision
        self._wake.set()

    async def retake(self, incarnation: str) -> None:
        """The worker has another lease: own the session under it, if nobody else took it since."""
        if not await self.ownership.retake(incarnation):
            await self.kill("another worker has taken over its session")
        self._wake.set()

    async def kill(self, reason: str, type_name: str = EndKind.LOST.value) -> None:
        """Kill the child; the call that runs ends with the reason."""
        self._lane.kill_type, self._lane.kill_reason = type_name, reason
        await self._child.end()
        self._lane.refuse_waiting(type_name, reason)

    async def _stop_over_limit(self, why: str) -> None:
        """Kill a child that uses processor time although its tenant may use no more."""
        if self.child is not None:
            log.warning("session %r is stopped, its child killed: %s", self.session_id, why)
            await self.kill(why, _OVER_LIMIT)

    # --- the whole story -----------------------------------------------------------------------

    async def run(self) -> None:
        """Own the session until the plan lets it go, or another worker has it."""
        watch = asyncio.create_task(self._usage.run())
        try:
            if await self._take():
                await self._live()
        except SessionOwnerLost as lost:
            log.warning("session %r is over in this worker: %s", self.session_id, lost)
        except Exception:
            log.exception("session %r failed in this worker", self.session_id)
            self._host.failed(self)
        finally:
            self._host.listing.discard(self.session_id)  # it may be forgotten from now on
            watch.cancel()
            self._usage.count_rest()
            self._host.plan.gives_back(self.session_id)
            await shielded(self._child.end())
            await self._host.tenants.leave(self._tenant, self.session_id)
            await self.ownership.drop_hold()
            self._host.left(self)

    async def _live(self) -> None:
        """From the take to the release."""
        try:
            await self._host.tenants.enter(self._tenant, self.session_id)
            await self._requests.read()
            await self._bring_up()
            self._mark_used()
            is_unused = self._executions == 0
            self._host.plan.taken(self.session_id, self._host.now(), is_unused=is_unused)
            self._host.wake()
            await self._serve()
        except SessionStartFailed as fault:
            await self._give_back(str(fault))
        except TenantFull as full:
            self._host.plan.gives_back(self.session_id)
            await self._refuse_all(type(full).__name__, str(full))
            await self.ownership.release()

    async def _take(self) -> bool:
        """Become the owner; False if somebody else is."""
        host, asked_at = self._host, self._host.now()
        try:
            taken = await self.ownership.take()
        except SessionHeld:
            await self._unlist()
            return False
        except (LeaseLost, StorageError) as fault:
            host.failed(self)
            log.info("session %r was not taken: %s", self.session_id, fault)
            return False
        if taken.profile != host.profile.name:
            await self.ownership.release()
            await self._unlist()
            return False
        self._take_over(taken, asked_at)
        await self._unlist()
        return True

    def _take_over(self, taken: Taken, asked_at: float) -> None:
        self._inherited = taken.begun
        kept_s = self._host.publisher.retention.silent_retention_s - CLOCKS_S
        self._claim_by = asked_at - taken.begun_ago_s + kept_s
        self._executions = taken.executions
        self._before_restart = taken.before_restart
        self._tenant = taken.tenant
        self._requests.is_closing = taken.is_closing

    async def _unlist(self) -> None:
        """Remove the listing that brought the session here; a later listing stays."""
        with contextlib.suppress(StorageError):  # it is offered again, and found to have an owner
            await self._host.store.unwant(self._host.profile.name, self._wanted)

    async def _bring_up(self) -> None:
        """Have a child; after a request for a restart there is nothing to restore."""
        while True:
            await self._requests.answer_waiting()
            if self._child.session is not None:
                return
            try:
                await self._start_child()
            except SessionStartFailed:
                if not self._requests.has_restart:
                    raise

    async def _serve(self) -> None:
        """Run calls in the order of the log, and leave between two of them."""
        while True:
            self._wake.clear()  # before all that it may announce is looked at
            await self._requests.answer_waiting()
            order = self._take_order() or self._host.plan.between_calls(
                self.session_id, self._host.now()
            )
            if isinstance(order, Leave) and await self._leave(order):
                return
            if isinstance(order, Save):
                await self._save()
                self._host.plan.busy(self.session_id)
            begun = await self.ownership.begin()
            if begun is not None:
                await self._run_call(begun)
            elif not self._requests.is_closing:
                await self._idle()
            elif await self._close():
                return

    async def _idle(self) -> None:
        """Wait until there may be something to do."""
        plan = self._host.plan
        plan.idle(self.session_id, self._host.now())
        self._host.wake()
        await self._wake.wait()
        if self._order is None:
            plan.busy(self.session_id)

    def _take_order(self) -> Decision | None:
        order, self._order = self._order, None
        return order

    # --- calls ---------------------------------------------------------------------------------

    async def _run_call(self, begun: BegunCall) -> None:
        """Run the call; it leaves the log when its end and its result are stored."""
        if begun.tenant != self._tenant:  # the take came before the first call
            self._tenant = begun.tenant
            await self._host.tenants.enter(self._tenant, self.session_id)
        if why := await self._host.tenants.over_limit(self._tenant):
            await self._refuse(begun, _OVER_LIMIT, why)
            return
        is_inherited = self._is_inherited(begun)
        await self._bring_up()  # requests that came since the call was begun, too
        self._child.use()
        restored, self._restored = self._restored, None
        self._usage.begin_call()
        claim_by = self._claim_by if is_inherited else math.inf
        has_run = await self.runner.run(begun, restored, claim_by=claim_by)
        cpu_ms = self._usage.end_call()
        if has_run:
            self._host.plan.executed(self.session_id)
        else:
            self._restored = with_lost_call(restored) if is_inherited else restored
        if self.ownership.is_lost:
            raise SessionOwnerLost(self.session_id, "")
        is_counted = has_run or is_inherited
        await self._done(begun, has_run=is_counted, cpu_ms=cpu_ms)
        if is_counted:
            await self._usage.count_call(begun.call_id, cpu_ms)

    async def _start_child(self) -> None:
        """Start a child with the namespace of the last checkpoint; raises SessionStartFailed."""
        self._host.plan.lost_state(self.session_id)
        self._lane.kill_type, self._lane.kill_reason = EndKind.LOST.value, ""
        try:
            session = await self._child.start()
            self._restored = await self._checkpoints.restore(
                session, self._executions, self._before_restart
            )
        except (CapsuleError, TimeoutError) as fault:
            await self._child.end()
            raise SessionStartFailed(reason_of(fault)) from fault

    def _on_child_refused(self) -> None:
        """A claimed call waits, and the child takes nothing new."""
        self._host.spawn(self._replace_child())

    async def _replace_child(self) -> None:
        try:
            await self._start_child()
        except SessionStartFailed as fault:
            why = str(fault)
            log.warning("session %r has no child: %s", self.session_id, why)
            self._lane.refuse_waiting(_NO_CHILD, f"the session has no child: {why}")
            return
        execution, restored = self.runner.execution, self._restored
        if execution is not None and execution.stream is not None and restored is not None:
            self._restored = None
            execution.stream.publish(restored)
        self._child.use()

    # --- the end -------------------------------------------------------------------------------

    async def carry_out(self, request: SessionRequest) -> SessionReply:
        """Do what is asked, between two calls."""
        if isinstance(request, RestartRequest):
            await self._child.end()
            self._before_restart = await self.ownership.restart()
            await self._delete_checkpoint()
            self._restored = None
            return RequestDone()
        if (session := self._child.session) is None:
            await self._start_child()
            session = self._child.session
            assert session is not None, "a child that has just started"
        if isinstance(request, CheckpointRequest):
            try:
                manifest = await self._write_checkpoint(session)
            except (CapsuleError, TimeoutError) as fault:
                self._log_unsaved(fault)
                raise
            self._host.plan.saved(self.session_id, self._host.now(), is_saved=True)
            return checkpoint_made(manifest)
        return await names_in(session)

    async def _write_checkpoint(
        self, session: Session, patience_s: float = 0.0
    ) -> CheckpointManifest:
        """Store the namespace. If Redis refuses it for longer than the patience, nothing is left.

        So a Redis that is full is not kept full by the chunks of this attempt and of others.
        """
        executions, operation_id = self._executions, new_operation()
        async with self._host.save_turns.turn() as turn:
            save = save_namespace(session, self._host.profile.max_checkpoint_bytes)
            saved = await turn.arrival(save)
            return await self.ownership.write_unless_refused(
                lambda: self._checkpoints.write(
                    self.ownership.token, saved, executions, operation_id
                ),
                f"the checkpoint of session {self.session_id!r}",
                patience_s,
            )

    async def _delete_checkpoint(self) -> None:
        await self.ownership.write(lambda: self._checkpoints.delete(self.ownership.token))

    async def _save(self, patience_s: float = 0.0) -> bool:
        """Make a checkpoint; False if that failed, and the one before stays."""
        session, plan = self._child.session, self._host.plan
        is_saved = session is None  # then nothing is left that could be saved
        try:
            if session is not None:
                await self._write_checkpoint(session, patience_s)
                is_saved = True
        except SessionOwnerLost:
            raise
        except Exception as fault:
            if why_not_saved(fault) is None:
                raise
            self._log_unsaved(fault)
        plan.saved(self.session_id, self._host.now(), is_saved=is_saved)
        return is_saved

    def _log_unsaved(self, fault: BaseException) -> None:
        if not isinstance(fault, SessionOwnerLost):
            why = why_not_saved(fault) or reason_of(fault)
            log.warning("no checkpoint of session %r was made: %s", self.session_id, why)

    async def _leave(self, order: Leave) -> bool:
        """Release the session, listing it again if calls wait; False if it stays."""
        plan, must = self._host.plan, order.why in FIRM
        patience_s = self._host.patience_s()
        if plan.is_unsaved(self.session_id) and not await self._save(patience_s):
            if order.why in NEEDS_CHECKPOINT:
                plan.stays(self.session_id)
                return False
            log.warning("session %r leaves without a checkpoint of it", self.session_id)
        log.info("session %r leaves this worker: %s", self.session_id, order.why.value)
        await self._child.end()  # before anybody else can start one
        try:
            await self.ownership.release(even_unfinished=must)
        except SessionUnfinished:
            plan.stays(self.session_id)
            return False
        return True

    async def _close(self) -> bool:
        """End the session for good; False if a call came first."""
        await self._child.end()
        await self._delete_checkpoint()
        ownership, store = self.ownership, self._host.store
        await ownership.write(lambda: self._host.listing.drop(self.session_id))
        try:
            await ownership.write(lambda: store.close_session(self.session_id, ownership.token))
        except SessionUnfinished:
            self._mark_used()
            return False
        log.info("session %r was closed", self.session_id)
        return True

    async def _refuse_all(self, type_name: str, message: str) -> None:
        """Fail the calls that wait."""
        while (begun := await self.ownership.begin()) is not None:
            await self._refuse(begun, type_name, message)

    async def _refuse(self, begun: BegunCall, type_name: str, message: str) -> None:
        """Fail the call without running it."""
        is_inherited = self._is_inherited(begun)
        await self.runner.refuse(begun, type_name, message)
        if is_inherited:
            self._restored = with_lost_call(self._restored)
        await self._done(begun, has_run=is_inherited)

    def _is_inherited(self, begun: BegunCall) -> bool:
        """Whether an owner before has begun the call, which may have run; asked once."""
        inherited, self._inherited = self._inherited, None
        return inherited is not None and begun.seq == inherited.seq

    async def _give_back(self, why: str) -> None:
        """Have another worker take the session, which has no child here.

        After some attempts its calls fail: there may be no worker that can run them.
        """
        log.warning("session %r has no child: %s", self.session_id, why)
        self._host.plan.gives_back(self.session_id)
        if self._host.plan.failures(self.session_id) >= _GIVE_UP_AFTER - 1:
            message = f"no child with the namespace of the session could be started: {why}"
            await self._refuse_all(_NO_CHILD, message)
        await self.ownership.release()
        self._host.failed(self, had_no_child=True)

    async def _done(self, begun: BegunCall, *, has_run: bool, cpu_ms: int = 0) -> None:
        """Take the call from the log."""
        await self.ownership.done(begun, has_run=has_run, cpu_ms=cpu_ms)
        self._executions += has_run
        self._mark_used()

    def _mark_used(self) -> None:
        if not (self._executions or self._tenant):
            return  # the take came before the first call: its producer has listed the tenant
        profile = self._host.profile.name
        self._host.listing.used(SessionEntry(self.session_id, profile, self._tenant))
