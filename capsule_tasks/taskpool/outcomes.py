"""How each job has ended, told once: to Celery on the hub thread, and to whoever watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from billiard.exceptions import TimeLimitExceeded

from capsule_tasks.protocol.messages import Terminal
from capsule_tasks.system.memory import give_back_freed_memory
from capsule_tasks.taskpool.bridge import Bridge
from capsule_tasks.taskpool.endings import Ending, ending_of_error, is_put_back_when_lost
from capsule_tasks.taskpool.jobs import SILENT, Job, Stage, is_killed_at_limit, why_lost
from capsule_tasks.taskpool.losses import Losses

_LARGE_BYTES = 1024 * 1024
"""Messages from this size leave holes in the heap that are worth giving back."""
_GIVE_BACK_AFTER_S = 1.0
"""Celery has been told of the end by then, and everything of the message is freed."""


class Outcomes:
    """For the runtime's loop. What Celery is told goes over the bridge."""

    def __init__(
        self,
        bridge: Bridge,
        losses: Losses,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        on_over: Callable[[Job], None],
        on_told: Callable[[Job], None],
    ) -> None:
        self._bridge = bridge
        self._losses = losses
        self._spawn = spawn
        self._on_over = on_over
        self._on_told = on_told
        self._gives_back_soon = False

    def lose(self, job: Job, end: Terminal, status: int | None) -> None:
        """Its child did not bring it to its end; `status` is of that child, if it is gone."""
        if is_killed_at_limit(job, status):
            error = TimeLimitExceeded(job.hard_limit_s)
            self.end(job, job.say_hard_limit, ending_of_error(error, job.request, end))
            return
        why = why_lost(job, end, status)
        # Coroutines share a child: which of them it died of, nobody can say.
        is_known = status is not None and job.signum is None and not job.is_async
        if is_known and is_put_back_when_lost(job.request):
            self._spawn(self._judge(job, why, end))
        else:
            self.fail(job, why, end)

    def fail(self, job: Job, why: Exception, end: Terminal | None = None) -> None:
        self.end(job, partial(job.say_failed, why), ending_of_error(why, job.request, end))

    def end(self, job: Job, news: Callable[[], object] | None, ending: Ending) -> None:
        """The one place where a job is over; `news` is for Celery, `ending` for who watches.

        The slot is free at once, so that the next task is on its way. Celery hears the news when
        the last event is stored: a message that was acknowledged has its end in the stream.
        """
        settle(job)
        if len(job.call.body) >= _LARGE_BYTES:
            self._give_memory_back_soon()
        if self._losses.is_noted(job.call):
            self._spawn(self._losses.forget(job.call))
        if job.publication is SILENT:
            self._bridge.put(partial(self._finish, job, news, True))
            return
        self._bridge.put(partial(self._on_over, job))
        job.publication.end(ending, partial(self._bridge.put, partial(self._finish, job, news)))

    def _give_memory_back_soon(self) -> None:
        """Once for all large messages of a second; on a thread, for the heap may be large, too."""
        if not self._gives_back_soon:
            self._gives_back_soon = True
            asyncio.get_running_loop().call_later(_GIVE_BACK_AFTER_S, self._give_memory_back)

    def _give_memory_back(self) -> None:
        self._gives_back_soon = False
        asyncio.get_running_loop().run_in_executor(None, give_back_freed_memory)

    async def _judge(self, job: Job, why: Exception, end: Terminal) -> None:
        """The child is lost; whether its message may have another is known a moment later."""
        why = await self._losses.judge(job.call, why)
        if job.stage is not Stage.OVER:
            self.fail(job, why, end)

    def _finish(
        self, job: Job, news: Callable[[], object] | None, holds_slot: bool = False
    ) -> None:
        """On the hub thread: the slot first, so that the next task is on its way."""
        if holds_slot:
            self._on_over(job)
        try:
            if news is not None:
                news()
        finally:
            self._on_told(job)
            job.let_go()


def settle(job: Job) -> None:
    """It is over; nothing that was planned for it happens any more."""
    job.stage = Stage.OVER
    for timer in job.timers:
        timer.cancel()
    job.timers.clear()
