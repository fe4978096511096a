"""Waiting until a run has ended or is parked. The doorbell of the run says when to read it again.

A doorbell is a hint, and may be lost with its connection. The run is read again after each new
connection, and after some time without a ring, so no wait lasts longer than the run and that time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

from msgspec import Meta

from capsule_tasks.errors import InvalidSetting, RunTimeout
from capsule_tasks.settings import check_value
from capsule_tasks.storage.connections.blocking_doorbell import BlockingDoorbell
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.targets import Target
from capsule_tasks.storage.drivers import AsyncStore, Store, SyncStore, drive, drive_blocking
from capsule_tasks.storage.operations import Operation
from capsule_tasks.storage.runs.core import RunCore
from capsule_tasks.storage.runs.types import ENDED, RunRecord, Status

Until = Literal["ended", "parked"]
"""`parked`: until it has ended or waits for decisions."""

_Timeout = Annotated[float, Meta(ge=0)] | None

CHECK_S = 30.0
"""After so long without a ring the run is read again; this finds a Redis that is gone, too."""


@dataclass
class _Shared:
    """The doorbells of one event loop."""

    bells: Doorbells
    waiters: int = 0


class LoopDoorbells:
    """Doorbells of one Redis for any event loop: connected while somebody waits for a ring."""

    def __init__(self) -> None:
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    @asynccontextmanager
    async def ringing(self, target: Target, channel: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set at each ring of the channel."""
        loop, rung = asyncio.get_running_loop(), asyncio.Event()
        shared = self._by_loop.get(loop)
        if shared is None:
            shared = self._by_loop[loop] = _Shared(Doorbells(target, timeout_s=CHECK_S))

        def ring(_message: bytes | None) -> None:
            rung.set()

        shared.waiters += 1
        try:
            await shared.bells.listen(channel, ring)
            yield rung
        finally:
            shared.bells.leave(channel, ring)
            shared.waiters -= 1
            if not shared.waiters:
                del self._by_loop[loop]
                await shared.bells.close()


async def wait(
    core: RunCore,
    store: AsyncStore,
    doorbells: LoopDoorbells,
    run_id: str,
    until: Until,
    timeout_s: float | None,
) -> RunRecord:
    """The run once it has ended or is parked; raises RunTimeout."""
    statuses, target = _checked(until, timeout_s, store)
    record, channel = await drive(_first_look(core, run_id), store)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if record.status in statuses:
                return record
            async with doorbells.ringing(target, channel) as rung:
                while True:
                    rung.clear()
                    record = await drive(core.read(run_id, with_snapshot=False), store)
                    if record.status in statuses:
                        return record
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CHECK_S):
                            await rung.wait()
    except TimeoutError:
        if not limit.expired():
            raise
    raise RunTimeout(run_id, record.status, timeout_s or 0.0)


def wait_blocking(
    core: RunCore, store: SyncStore, run_id: str, until: Until, timeout_s: float | None
) -> RunRecord:
    """As `wait`, for callers that block."""
    statuses, target = _checked(until, timeout_s, store)
    ends_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    record, channel = drive_blocking(_first_look(core, run_id), store)
    with closing(BlockingDoorbell(target, channel)) as doorbell:
        while record.status not in statuses:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise RunTimeout(run_id, record.status, timeout_s or 0.0)
            doorbell.wait(min(CHECK_S, left_s))
            record = drive_blocking(core.read(run_id, with_snapshot=False), store)
    return record


def _first_look(core: RunCore, run_id: str) -> Operation[tuple[RunRecord, str]]:
    """The run as it is now, and the channel of its doorbell."""
    place = yield from core.locations.find(run_id)
    record = yield from core.read(run_id, with_snapshot=False)
    return record, place.keys.channel


def _checked(
    until: Until, timeout_s: float | None, store: Store
) -> tuple[frozenset[Status], Target]:
    check_value("until", until, Until)
    check_value("timeout_s", timeout_s, _Timeout)
    if store.target is None:
        must = "a URL, or connections to one: a wait opens a connection of its own"
        raise InvalidSetting("redis", str(store.location), must)
    return ENDED | {"interrupted"} if until == "parked" else ENDED, store.target
