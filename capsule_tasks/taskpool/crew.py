"""What becomes of each job: its limits, its end, and what Celery and its stream are told.

All of it is on the runtime's loop. Which child has which job is the dispatcher's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from capsule_tasks.executions.dispatcher import Dispatcher
from capsule_tasks.protocol.messages import Gap, InputRequest, Message, Output, Terminal, Traced
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.session import Session
from capsule_tasks.taskpool.bridge import Bridge
from capsule_tasks.taskpool.endings import another, ending_of_traced
from capsule_tasks.taskpool.jobs import SILENT, Job, Stage
from capsule_tasks.taskpool.losses import Losses
from capsule_tasks.taskpool.outcomes import Outcomes, settle

_TIDY_S = 0.1
"""What a task has for its `finally` blocks at a hard limit, as under prefork."""
_ASYNC_GRACE_S = 5.0
"""From the cancel of a coroutine to the kill of its child and so of its neighbours."""


@dataclasses.dataclass(frozen=True)
class CrewLimits:
    """How many coroutines a child takes on, and how many children a message may cost."""

    async_limit: int = 1000
    losses: int = 5
    losses_url: str | None = None
    """The Redis where they are counted, over all workers."""
    losses_prefix: str = "capsule"


class Crew:
    """Listens to the dispatcher; says on the bridge what becomes of each job."""

    def __init__(
        self,
        pool: SessionPool,
        limits: CrewLimits,
        bridge: Bridge,
        on_output: Callable[[Job, Output | Gap], None],
        on_over: Callable[[Job], None],
        on_told: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        self.dispatcher = Dispatcher[Job](pool, self, async_limit=limits.async_limit)
        self.totals: Counter[str] = Counter()
        self.last_error = ""
        self._bridge = bridge
        self._on_output = on_output
        self._on_end = on_end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checking: set[Job] = set()
        """Delivered before, and not yet in line."""
        self._unknown: set[str] = set()
        """Tasks that only children to come know, and what is to run of them."""
        self._early: list[Job] = []
        self._losses = Losses(limits.losses, limits.losses_url, limits.losses_prefix)
        self._outcomes = Outcomes(bridge, self._losses, self._spawn, on_over, on_told)

    # --- jobs ----------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        if job.stage is Stage.OVER:
            return
        if not job.is_async and self._losses.is_suspect(job.call):
            self._checking.add(job)
            self._spawn(self._check(job))
        else:
            self._enqueue(job)

    async def _check(self, job: Job) -> None:
        """Whether a message that was delivered before may cost one more process."""
        error = await self._losses.admit(job.call)
        self._checking.discard(job)
        if job.stage is Stage.OVER:
            await self._losses.forget(job.call)
        elif error is not None:
            self._outcomes.fail(job, error)
        else:
            self._enqueue(job)

    def expect(self, names: set[str]) -> None:
        """Jobs of these tasks wait for children that know them."""
        self._unknown |= names

    def learn(self, names: set[str]) -> None:
        """The next child knows these, or will never know them: either way their jobs go on."""
        self._unknown -= names
        early, self._early = self._early, []
        for job in early:
            if job.stage is not Stage.OVER:
                self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        if job.call.name in self._unknown:
            self._early.append(job)
        else:
            self.dispatcher.enqueue(job)

    def drop_waiting(self) -> None:
        """The connection is lost: what no child has begun will be delivered again."""
        early, self._early = self._early, []
        for job in (*self.dispatcher.take_waiting(), *self._checking, *early):
            if job.stage is not Stage.OVER:
                self.drop(job)

    def drop(self, job: Job) -> None:
        """It has not begun and will be delivered again; Celery is told nothing."""
        self._outcomes.end(job, None, another("requeued", "the connection to the broker was lost"))

    def terminate(self, job: Job, signum: int, asker: str) -> None:
        """End one job, and no other, with a signal or as a coroutine is ended."""
        if job.stage is Stage.OVER:
            return
        job.note_stop(signum, asker)  # a second one, stronger, may follow
        if not self.dispatcher.is_sent(job):
            self.dispatcher.remove(job)
            self._outcomes.lose(job, Traced(execution_id=job.execution_id), None)
        elif job.is_async:
            self.dispatcher.cancel(job, _ASYNC_GRACE_S)
        else:
            self.dispatcher.signal(job, signum, f"a task was terminated with signal {signum}")

    def cancel(self, job: Job, grace_s: float, asker: str) -> None:
        """End one job in order, and by force after the grace; also one that has not begun."""
        if not self.dispatcher.is_sent(job):
            self.terminate(job, signal.SIGTERM, asker)
        elif job.stage is not Stage.OVER:
            job.note_stop(job.signum or int(signal.SIGTERM), asker)
            self.dispatcher.cancel(job, grace_s)

    def end_input(self, job: Job, request_id: str) -> None:
        """Have `input()` raise EOFError: nobody can hear what it asks."""
        self.dispatcher.end_input(job, request_id)

    def session_of(self, job: Job) -> Session | None:
        """Where a job runs now."""
        return self.dispatcher.session_of(job)

    def kill_busy(self) -> None:
        """End all that runs, also what no signal reaches."""
        for job in self.dispatcher.in_hand():
            if job.signum is None:
                job.note_stop(signal.SIGKILL, "the worker's cold shutdown")
        self.dispatcher.kill_busy()

    async def stop(self) -> None:
        """Jobs still in hand end with the pool of sessions, and Celery hears of none."""
        for task in self._tasks:
            task.cancel()
        self.dispatcher.stop()
        for job in self.dispatcher.in_hand():
            settle(job)
        self.drop_waiting()
        await self._losses.close()

    # --- what the dispatcher says --------------------------------------------------------------

    def sent(self, job: Job, pid: int, execution_id: str) -> None:
        job.stage = Stage.SENT
        job.pid = pid
        job.execution_id = execution_id

    def refused(self, job: Job) -> None:
        job.stage = Stage.WAITING

    def started(self, job: Job, at: float) -> None:
        if job.stage is not Stage.SENT:
            return
        job.stage = Stage.ACCEPTED
        waits = job.acks_when_claimed and job.publication is not SILENT
        self._bridge.put(partial(job.say_accepted, job.pid, at, puts_ack_off=waits))
        claimed = partial(self._bridge.put, job.say_claimed) if waits else None
        job.publication.accepted(job.pid, claimed)
        if not (job.soft_limit_s or job.hard_limit_s):
            return
        loop = asyncio.get_running_loop()
        if job.soft_limit_s:
            job.timers.append(loop.call_later(job.soft_limit_s, self._on_soft_limit, job))
        if job.hard_limit_s:
            job.timers.append(loop.call_later(job.hard_limit_s, self._on_hard_limit, job))

    def said(self, job: Job, message: Message) -> bool | None:
        if isinstance(message, (Output, Gap)):
            self._on_output(job, message)
        elif isinstance(message, InputRequest) and not job.publication.is_heard:
            self.end_input(job, message.id)
        has_room: bool | None = job.publication.say(message)
        return has_room

    def finished(self, job: Job, end: Terminal, exit_status: int | None) -> None:
        self._on_end(job)
        if job.stage is Stage.OVER:
            return
        if not isinstance(end, Traced):
            self._outcomes.lose(job, end, exit_status)
        elif end.escaped and job.signum is not None:
            self._outcomes.lose(job, end, None)
        else:
            self._losses.forget_here(job.call)
            self._outcomes.end(job, partial(job.say_traced, end), ending_of_traced(end))

    # --- limits --------------------------------------------------------------------------------

    def _on_soft_limit(self, job: Job) -> None:
        if job.stage is Stage.ACCEPTED and self.dispatcher.soft_limit(job):
            self._bridge.put(job.say_soft_limit)

    def _on_hard_limit(self, job: Job) -> None:
        if job.stage is not Stage.ACCEPTED:
            return
        self.totals["hard_limits"] += 1
        job.is_over_limit = True  # told once it is stopped: it may come to its end before
        if job.is_async:
            self.dispatcher.cancel(job, _ASYNC_GRACE_S)
        elif job.signum is not None:  # it was asked to leave before
            self.dispatcher.kill(job)
        else:
            self.dispatcher.signal(job, signal.SIGTERM, "a task met its hard limit")
            asyncio.get_running_loop().call_later(_TIDY_S, self.dispatcher.kill, job)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
