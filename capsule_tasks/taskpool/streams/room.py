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
        self._slowed: set[Publication] = set()
        """Their descriptors are read again at the rate, whether Redis is there or not."""
        self._tokens = float(self._rate)
        """Below zero by a second's worth at most: of a flood others need not wait for the end."""
        self._tokens_at = 0.0
        self._refill: asyncio.TimerHandle | None = None

    def has_room(self, publication: Publication, output: Output) -> bool:
        """Whether a job may say more; under the rate of all, and with its own window not full.

        Where output may be lost what is written to a descriptor waits for the rate alone.
        """
        self._refresh()
        self._tokens = max(-self._rate, self._tokens - utf8_size(output.data))
        is_lossy = output.raw and self.drops  # it has no credit to lose: its backlog drops
        if self._tokens < 0:
            self._await_refill()
        elif is_lossy or not self._is_full(publication):
            return True
        (self._slowed if is_lossy else self._paused).add(publication)
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

    def _is_full(self, publication: Publication) -> bool:
        return (
            publication.backlog.waiting_bytes > self._window_bytes
            or self.waiting_bytes > self._total_bytes
        )

    def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._rate / 10, self._tokens + (now - self._tokens_at) * self._rate)
        self._tokens_at = now

    def _await_refill(self) -> None:
        if self._refill is None:
            wait_s = -self._tokens / self._rate + 0.001
            self._refill = asyncio.get_running_loop().call_later(wait_s, self._on_refill)

    def _on_refill(self) -> None:
        self._refill = None
        self._refresh()
        if self._tokens < 0:  # more has come since
            self._await_refill()
            return
        slowed, self._slowed = self._slowed, set()
        for publication in slowed:
            self._read_on(publication)
        for publication in list(self._paused):
            self.may_read_on(publication)
