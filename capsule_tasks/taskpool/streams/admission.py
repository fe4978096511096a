"""On its way to the crew: what does Redis know of a job?

Of hardly any it knows something, so that one question is asked for many. A job that is new begins
at once, and is claimed soon after. Any other (a retry, one that came again, one that was told
something before it began) begins when its next attempt is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from capsule_tasks.errors import InvalidId, StorageError
from capsule_tasks.storage.execution_core import ExecutionCore
from capsule_tasks.storage.pipeline import PipelinedConnection
from capsule_tasks.taskpool.streams.background import Background
from capsule_tasks.taskpool.streams.tenure import Tenure

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.publication import Publication

_FRESH_S = 1.0
"""How long it is believed that Redis knows nothing of a task."""
_MOST_FRESH = 10_000
MOST_CLAIMS = 500
"""Noted as held in one call."""


class Admission:
    """Lets jobs begin, each once."""

    def __init__(
        self,
        connection: PipelinedConnection,
        core: ExecutionCore,
        tenure: Tenure,
        background: Background,
        publications: Mapping[str, Publication],
        *,
        wait_s: float,
    ) -> None:
        """A Redis that does not answer holds a job up for `wait_s`."""
        self._connection = connection
        self._core = core
        self._tenure = tenure
        self._background = background
        self._publications = publications
        self._wait_s = wait_s
        self._to_claim: deque[Publication] = deque()
        self._wake = asyncio.Event()
        self._asked: dict[str, bool] = {}
        """Executions that Redis was asked about; whether they have been rung for since."""
        self._fresh: dict[str, float] = {}
        """Of these it knew nothing, at that time."""
        self._to_ask: dict[str, tuple[str, ...]] = {}
        """Executions, and the keys of each."""
        connection.before_flush = self._ask_all

    def expect(self, execution_id: str) -> None:
        """It will be admitted soon: ask what Redis knows of it."""
        is_asked = execution_id in self._asked or execution_id in self._fresh
        if self._can_ask() and not is_asked:
            with contextlib.suppress(InvalidId):  # it is told when it is there, and runs unseen
                self._ask(execution_id)

    def admit(self, publication: Publication) -> None:
        """Have it begin: at once if it is new, else when its next attempt is claimed."""
        execution_id = publication.execution_id
        if publication.job.is_retry or not self._can_ask():
            publication.wait_at_most(self._wait_s)
            self._claim_first(publication)
            return
        now = asyncio.get_running_loop().time()
        if now - self._fresh.pop(execution_id, -_FRESH_S) < _FRESH_S:
            publication.begin_fresh()
            return
        publication.is_expected = True
        publication.wait_at_most(self._wait_s)
        if execution_id not in self._asked:
            self._ask(execution_id)
        self._connection.flush()

    def on_ring(self, execution_id: str) -> None:
        """It was told something: what was known of it is out of date."""
        self._fresh.pop(execution_id, None)
        if execution_id in self._asked:
            self._asked[execution_id] = True

    def on_deaf(self) -> None:
        """So may any have been."""
        self._fresh.clear()
        self._asked = dict.fromkeys(self._asked, True)

    def forget_expected(self) -> None:
        """They will not come, or come anew."""
        self._fresh.clear()

    # --- what Redis knows ----------------------------------------------------------------------

    def _can_ask(self) -> bool:
        return self._connection.keeps_order and self._tenure.is_held.is_set()

    def _ask(self, execution_id: str) -> None:
        self._to_ask[execution_id] = self._core.keys_of(execution_id).signs
        self._asked[execution_id] = False
        self._connection.flush(is_patient=True)

    def _ask_all(self) -> None:
        """One question for all: hardly ever is there one of which something is known."""
        asked, self._to_ask = self._to_ask, {}
        if asked:
            keys = [key for signs in asked.values() for key in signs]
            self._connection.count(keys, partial(self._on_answer, list(asked)))

    def _on_answer(self, ids: list[str], known: int | StorageError) -> None:
        now = asyncio.get_running_loop().time()
        for execution_id in ids:
            is_rung = self._asked.pop(execution_id, True)
            is_new = known == 0 and not is_rung
            publication = self._publications.get(execution_id)
            if publication is not None and publication.is_expected:
                if is_new:
                    publication.begin_fresh()
                else:
                    self._claim_first(publication)
            elif is_new:
                self._fresh[execution_id] = now
        if len(self._fresh) > _MOST_FRESH:  # of tasks that never came
            self._fresh.clear()

    # --- claims --------------------------------------------------------------------------------

    def _claim_first(self, publication: Publication) -> None:
        publication.is_expected = False
        self._to_claim.append(publication)
        self._wake.set()

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
