"""On its way to the crew: does a job begin at once, or when its attempt is claimed?

A job that is new begins at once, and is claimed soon after, with what it says first. Any other (a
retry, one that came again, one that was told something before it began) begins when its next
attempt is claimed. What makes it another is known without a question to Redis: its message says
whether it came before, and a command for a task that nobody has rings every worker. A cancel that
no bell brought is among the revokes that workers read, or is found by the claim.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from capsule_tasks.storage.pipeline import PipelinedConnection
from capsule_tasks.taskpool.streams.background import Background
from capsule_tasks.taskpool.streams.tenure import Tenure

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.publication import Publication

_MOST_RUNG = 10_000
MOST_CLAIMS = 500
"""Noted as held in one call."""


class Admission:
    """Lets jobs begin, each once."""

    def __init__(
        self,
        connection: PipelinedConnection,
        tenure: Tenure,
        background: Background,
        *,
        wait_s: float,
    ) -> None:
        """A Redis that does not answer holds a job up for `wait_s`."""
        self._connection = connection
        self._tenure = tenure
        self._background = background
        self._wait_s = wait_s
        self._to_claim: deque[Publication] = deque()
        self._wake = asyncio.Event()
        self._rung: dict[str, None] = {}
        """Executions that were told something, and have not come yet."""

    def admit(self, publication: Publication) -> None:
        """Have it begin: at once if it is new, else when its next attempt is claimed."""
        if self._is_new(publication):
            publication.begin_fresh()
            return
        publication.wait_at_most(self._wait_s)
        self._to_claim.append(publication)
        self._wake.set()

    def on_ring(self, execution_id: str) -> None:
        """It was told something, and may come here."""
        self._rung[execution_id] = None
        if len(self._rung) > _MOST_RUNG:
            del self._rung[next(iter(self._rung))]

    def _is_new(self, publication: Publication) -> bool:
        """Whether nothing is to be known of it before it begins, and its claim may follow."""
        job = publication.job
        was_rung = publication.execution_id in self._rung
        self._rung.pop(publication.execution_id, None)
        return (
            not (was_rung or job.is_retry or job.is_redelivered)
            and self._connection.keeps_order
            and self._tenure.is_held.is_set()
        )

    async def claim_all(self) -> None:
        """Claim whatever is to be claimed before it begins, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._to_claim:
                await self._tenure.is_held.wait()
                count = min(len(self._to_claim), MOST_CLAIMS)
                await self._claim([self._to_claim.popleft() for _ in range(count)])

    async def _claim(self, batch: list[Publication]) -> None:
        if self._connection.keeps_order:  # it is sent before the claims
            self._background.spawn(self._tenure.hold_for_sure(batch))
        elif not await self._tenure.hold(batch):
            self._to_claim.extendleft(reversed(batch))
            return
        for publication in batch:
            self._background.spawn(publication.claim(self._tenure.incarnation))
