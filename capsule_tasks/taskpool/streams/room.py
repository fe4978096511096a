"""How much may wait for Redis: of one job, of all, and how fast it may come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from capsule_tasks.protocol.flow import utf8_size
from capsule_tasks.protocol.messages import Output
from capsule_tasks.settings import PublishSettings

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.publication import Publication


class Room:
    """Says whether a job may say more, and has it read on when it may again."""

    def __init__(
        self, settings: PublishSettings, *, drops: bool, read_on: Callable[[Publication], object]
    ) -> None:
        self.waiting_bytes = 0
        """Of all jobs."""
        self.drops = drops
        """Whether a job loses output that there is no room for; else it waits."""
        self._window_bytes = settings.window_bytes
        self._total_bytes = settings.total_bytes
        self._rate = settings.rate_bytes_per_second
        self._read_on = read_on
        self._paused: set[Publication] = set()
        self._tokens = float(self._rate)
        self._tokens_at = 0.0
        self._refill: asyncio.TimerHandle | None = None

    def has_room(self, publication: Publication, output: Output) -> bool:
        """Whether a job may say more; under the rate of all, and with its own window not full."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._tokens = min(self._rate / 10, self._tokens + (now - self._tokens_at) * self._rate)
        self._tokens_at = now
        self._tokens -= utf8_size(output.data)
        is_full = (
            publication.backlog.waiting_bytes > self._window_bytes
            or self.waiting_bytes > self._total_bytes
        )
        if not is_full and self._tokens >= 0:
            return True
        if output.raw and self.drops:
            return True  # it has no credit to lose: what is too much is dropped
        self._paused.add(publication)
        if self._tokens < 0 and self._refill is None:
            wait_s = -self._tokens / self._rate + 0.001
            self._refill = loop.call_later(wait_s, self._on_refill)
        return False

    def may_read_on(self, publication: Publication) -> None:
        """It has sent some, and others may have been waiting for that."""
        if not self._paused or self._refill is not None:
            return
        is_roomy = self.waiting_bytes <= self._total_bytes // 2
        for one in list(self._paused) if is_roomy else [publication]:
            if one in self._paused and one.backlog.waiting_bytes <= self._window_bytes // 2:
                self._paused.discard(one)
                self._read_on(one)

    def _on_refill(self) -> None:
        self._refill = None
        for publication in list(self._paused):
            self.may_read_on(publication)
