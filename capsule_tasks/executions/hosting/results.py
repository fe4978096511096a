"""Stores the results of calls in the result backend, on threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from capsule_tasks.errors import reason_of
from capsule_tasks.executions.background import RETRY_DELAY_S, BackgroundTasks
from capsule_tasks.executions.hosting.outcomes import CallOutcome
from capsule_tasks.protocol.events import Ended

_THREADS = 8
"""Results that are stored at once: a slow backend delays sessions, and never the loop."""

StoreResult = Callable[[str, CallOutcome], object]
"""Stores the outcome of a call under its id in the result backend; blocks, and may raise."""
StoredEnd = Callable[[str], Ended | None]
"""The end that the result backend knows of a call; blocks, and may raise."""


class ResultWriter:
    """Makes each write until the backend has taken it."""

    def __init__(
        self, store_result: StoreResult, stored_end: StoredEnd, background: BackgroundTasks
    ) -> None:
        self._store_result = store_result
        self._stored_end = stored_end
        self._background = background
        self._threads: ThreadPoolExecutor | None = None

    async def store(self, call_id: str, outcome: CallOutcome) -> None:
        """Store how a call has ended."""
        await self._repeat(self._store_result, call_id, outcome)

    async def store_if_missing(self, call_id: str, outcome: CallOutcome) -> None:
        """Store how a call has ended, unless the backend has its result already."""
        await self._repeat(self._store_if_missing, call_id, outcome)

    def stop(self) -> None:
        """Start nothing more; a write that is on its way goes on."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _store_if_missing(self, call_id: str, outcome: CallOutcome) -> None:
        if self._stored_end(call_id) is None:
            self._store_result(call_id, outcome)

    async def _repeat(
        self,
        write: Callable[[str, CallOutcome], object],
        call_id: str,
        outcome: CallOutcome,
    ) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "capsule-results")
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._threads, write, call_id, outcome)
            except Exception as fault:  # noqa: BLE001 - backends raise errors of their own
                why = reason_of(fault)
                self._background.warn_seldom("results of calls cannot be stored: %s", why)
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                return
