"""`SessionExecution`: what a call of a named session returns, and how such a call is cancelled."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

import celery.exceptions

from capsule_tasks.client.cancelling import CancelAnswer, check_grace, requested_by
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.sessions.looking import CallLooks
from capsule_tasks.client.watching import watcher as watching
from capsule_tasks.client.watching.results import keeps_results
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.client.watching.watcher import LookAfter
from capsule_tasks.errors import (
    AttemptStale,
    CallIdTaken,
    CapsuleError,
    ExecutionEnded,
    NoResult,
    reason_of,
)
from capsule_tasks.protocol.calls import session_of_task, task_of_session
from capsule_tasks.protocol.events import AttemptClaimed, CancelCommand, Ended, Outcome
from capsule_tasks.storage.executions.types import Event, RecentEntry
from capsule_tasks.storage.sessions.types import Submitted

log = logging.getLogger("capsule_tasks.client")

_CANCELLED = Ended(
    outcome=Outcome.CANCELLED, type="TaskRevokedError", message="it was cancelled before it began"
)


class SessionExecution(Execution):
    """The execution of a call of a named session. Its id is the id of the call."""

    session_id = ""
    submission = Submitted(0, "", 0)
    """Whether the session had an owner when the call was submitted, and how many calls waited."""
    member = ("", -1)
    """The group of a call that came as a Celery task, and its index there."""
    has_begun_anew = False
    """The session is not the one of the calls before that were submitted through the same object:
    it was closed or forgotten meanwhile, or a Redis lost its record. Its namespace is empty."""

    @classmethod
    def submitted(cls, call_id: str, session_id: str, app: Any, submission: Submitted) -> Self:
        """The execution of a call that has just been submitted to a session."""
        made = cls(call_id, app=app)
        made.session_id, made.submission = session_id, submission
        made.is_new = True
        return made

    async def aevents(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """As of any execution; CallIdTaken if the id is that of a call of another session."""
        async with aclosing(super().aevents(after)) as events:
            async for event in events:
                if isinstance(event.message, AttemptClaimed) and self.session_id:
                    check_holder(self.id, event.message.task, self.session_id)
                yield event

    def get(self, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        """As of any task, but the call is looked after: NoResult if nothing will ever end it."""
        if not self.session_id:  # made from the id alone
            return super().get(timeout, *args, **options)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        looks: CallLooks | None = None
        wait_s = watching.FIRST_LOOK_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return super().get(min(left_s, wait_s), *args, **options)
            except celery.exceptions.TimeoutError:
                if left_s <= wait_s:
                    raise
            looks = looks or CallLooks(self.app, self.session_id, self.id)
            if (ended := watch_thread.call(looks.look())) is not None and not self.ready():
                raise NoResult(self.id, ended.outcome, f"{ended.type}: {ended.message}")
            wait_s = watching.LOOK_AGAIN_S

    def _look_after(self) -> LookAfter | None:
        if not self.session_id:
            return None
        return CallLooks(self.app, self.session_id, self.id).look

    async def acancel(self, grace_s: float | None = None) -> CancelAnswer:
        """Cancel the call: one that has not begun ends at once, and its code never runs.

        A call that has begun is stopped by the worker that has the session: in order within the
        grace, then by force. Safe to repeat.
        """
        check_grace(grace_s)
        watcher = await watch_thread.watcher(self.app)
        # The command first: if an owner begins the call meanwhile, its claim reads the command.
        command = CancelCommand(grace_s=grace_s, requested_by=requested_by())
        state = await watcher.send_command(self.id, command)
        if state == "ended":
            return "over"
        if state != "running":
            await self._end_unbegun()
        return "requested"

    async def _end_unbegun(self) -> None:
        """End the call, unless an owner has begun it: then that one has the cancel."""
        watcher = await watch_thread.watcher(self.app)
        store = watcher.store
        group, index = self.member
        task = task_of_session(self.session_id).rstrip()
        try:
            # The call stays in the log of its session, and may be reached as long as that is kept.
            attempt = await store.end_unclaimed(
                self.id,
                _CANCELLED,
                task=task,
                group=group,
                index=index,
                kept_s=watcher.sessions.settings.ttl_s,
            )
        except (AttemptStale, ExecutionEnded):
            return
        # An owner that comes to the call finds its end, and repeats these if need be.
        await self._store_revoked()
        entry = RecentEntry(self.id, 0.0, str(Outcome.CANCELLED), task)
        try:
            await store.record_recent([(attempt, entry)])
            if group:
                member = (index, str(Outcome.CANCELLED), self.id, "")
                await store.record_group_ends(group, [member])
        except CapsuleError as fault:
            log.warning("the end of call %s is not in the index: %s", self.id, reason_of(fault))

    async def _store_revoked(self) -> None:
        if not keeps_results(self.app):
            return
        try:
            await asyncio.to_thread(self.app.backend.mark_as_revoked, self.id, _CANCELLED.message)
        except Exception as fault:  # noqa: BLE001  any backend, any error
            log.warning(
                "call %s is cancelled, but its result could not be stored: %s",
                self.id,
                reason_of(fault),
            )

    def revoke(self, *_: Any, **__: Any) -> None:
        """Cancel the call: no worker has a task of this id."""
        self.cancel()


def check_holder(call_id: str, task: str, session_id: str) -> None:
    """Refuse an id under which another session has a call; `task` is what its execution is."""
    holder = session_of_task(task)
    if holder is not None and holder != session_id:
        raise CallIdTaken(call_id, holder, session_id)
