"""Callers of named sessions, while the workers that host them are killed, stopped and stood still.

Each call ends once and gets one result. A counter in each namespace never goes back unless its call
was told that the namespace was restored, and then by no more than the calls that it named as lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from capsule_tasks.protocol.events import Ended, Outcome, SessionRestored
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.hosting import Caller, HostProcess, RedisResults

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
SEED = int(os.environ.get("CAPSULE_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
SESSIONS = max(6, round(20 * SCALE))
CALLS = max(15, round(150 * SCALE))
LEASE_S = 0.6
HANG_S = 120.0
PAUSES = (0, SESSIONS, 4 * SESSIONS)
"""So many calls end between two faults. After a time instead, a slow machine would end none."""
COUNT = "n = globals().get('n', 0) + 1\nn"


class Fleet:
    """Workers, of which one after the other meets with something."""

    def __init__(self, url: str, prefix: str, size: int, rng: random.Random) -> None:
        self._new = lambda name: HostProcess(url, prefix, name, LEASE_S)
        self._rng = rng
        self._workers = [self._new(f"w{number}") for number in range(size)]
        self.events: list[str] = []
        self.is_over = False
        self._calls_ended = asyncio.Queue[str]()

    def call_ended(self, call: str) -> None:
        self._calls_ended.put_nowait(call)

    def storm_is_over(self) -> None:
        self.is_over = True
        self.call_ended("")

    async def storm(self) -> None:
        """Until it is over. It goes by the calls that end, however long they take."""
        while not self.is_over:
            for _ in range(self._rng.choice(PAUSES)):
                await self._calls_ended.get()
                if self.is_over:
                    return
            worker = self._rng.choice(self._workers)
            what = self._rng.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
            self.events.append(what)
            worker.signal(signal.Signals[what])
            if what == "SIGSTOP":
                await asyncio.sleep(self._rng.uniform(0.1, 4 * LEASE_S))
                worker.signal(signal.SIGCONT)
            else:
                self._workers.remove(worker)
                name = f"w{len(self.events)}-new"
                self._workers.append(await asyncio.to_thread(self._new, name))
                await asyncio.to_thread(worker.end)

    def end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.end()


async def count(caller: Caller, fleet: Fleet, session_id: str, rng: random.Random) -> list[str]:
    """Call again and again; the ids of the calls."""
    known, may_have_run, calls = 0, 0, []
    for _ in range(CALLS):
        calls.append(call := await caller.submit(session_id, COUNT))
        await caller.ended(call)
        fleet.call_ended(call)
        events = await caller.events(call)
        ends = [event for event in events if isinstance(event, Ended)]
        restored = [event for event in events if isinstance(event, SessionRestored)]
        assert len(ends) == 1, (call, events)
        if ends[0].outcome is Outcome.SUCCEEDED:
            value = int(ends[0].result_text)
            lost = restored[-1].lost_calls if restored else 0
            most = known + may_have_run + 1
            assert known + 1 - lost <= value <= most, (call, known, may_have_run, events)
            known, may_have_run = value, 0
        else:
            assert ends[0].type == "WorkerLostError", (call, events)
            may_have_run += 1
        await asyncio.sleep(rng.uniform(0.0, 0.2))
    return calls


async def test_counters_survive_their_workers(tmp_path: Path, prefix: str) -> None:
    rng = random.Random(SEED)
    with PrivateServer(tmp_path / "redis") as server:
        fleet = await asyncio.to_thread(Fleet, server.url, prefix, 2, rng)
        caller = Caller(server.url, prefix, HANG_S)
        storm = asyncio.create_task(fleet.storm())
        names = [f"s{number}" for number in range(SESSIONS)]
        try:
            calls = await asyncio.gather(*(count(caller, fleet, name, rng) for name in names))
            for name in names:
                await caller.settled(name)
            results = RedisResults(server.url, prefix)
            assert set(results) == {call for each in calls for call in each}
        except BaseException as error:
            error.add_note(f"CAPSULE_CHAOS_SEED={SEED}; {fleet.events}")
            raise
        finally:
            fleet.storm_is_over()
            await storm
            await asyncio.to_thread(fleet.end)
            await caller.close()
