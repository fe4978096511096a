# ruff: noqa: T201 - the figures are for a person who runs it with -s
"""Durable runs on three workers, while their processes are killed at random.

Each run makes ten calls, two of which wait for an approval. Calls that are uncertain are settled
as a person does it, who looks up whether the effect has happened. Everything that a run leaves is
then compared with what a run without kills leaves.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.result import AsyncResult

from capsule_tasks import Capsule, Execution, SyncHistory
from capsule_tasks.durable.settling import SETTLE
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage import SyncRunStore
from capsule_tasks.storage.runs.types import ENDED, PendingApproval
from tests.acceptance.test_many_tasks import SCALE
from tests.acceptance.workers import Worker, close, eventually, is_running, producer
from tests.chaos.fleet import Fleet

SEED = os.environ.get("CAPSULE_CHAOS_SEED", "20261120")
KILLS = int(300 * SCALE)
STORM_S = 1200 * SCALE if SCALE >= 1 else 45
"""A machine that is too busy for all kills in this time makes fewer: the test has a time limit."""
IN_FLIGHT = 30
BUSY = 6
"""Runs that workers have at least when one is killed; the others wait for people or the queue."""
END_S = 120

AGENTS = ("clerk", "our clerk")
"""One of openai-agents and one of our own engine: runs are of one and the other in turn."""
CALLS = Counter(
    [f"mail {n}" for n in (1, 2, 3, 4, 6, 7)] + ["look 5", "look 8"] + ["pay 1", "pay 2"]
)

pytestmark = pytest.mark.chaos


class Desk:
    """Starts runs, decides what they wait for, and notes which have ended; on threads."""

    def __init__(self, capsule: Capsule, url: str) -> None:
        self._capsule = capsule
        self._url = url
        self._is_over = threading.Event()
        self._is_busy = threading.Event()
        self.started_first = threading.Event()
        self._errors: list[BaseException] = []
        self.started: list[str] = []
        self.in_flight: set[str] = set()
        self.settled: Counter[str] = Counter()
        self.wanted = 0
        """Runs that shall be in flight."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._repeat, args=(each,))
                   for each in (self._refill, self._decide)]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
            self.check()

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def wait_until_busy(self) -> None:
        """Wait until all runs are in flight, and workers have some of them."""
        self._is_busy.clear()
        assert self._is_busy.wait(END_S), f"workers have too few of {len(self.in_flight)} runs"
        self.check()

    def _repeat(self, work: Any) -> None:
        with (
            SyncRunStore(self._url) as store,
            redis.Redis.from_url(self._url) as client,
        ):
            try:
                while not self._is_over.wait(0.05):
                    work(store, client)
            except BaseException as error:  # noqa: BLE001 - raised in the test's thread
                self._errors.append(error)
                self._is_busy.set()

    def _refill(self, store: SyncRunStore, _: Any) -> None:
        statuses = {
            run_id: store.read(run_id, with_snapshot=False).status for run_id in self.in_flight
        }
        self.in_flight = {run_id for run_id in self.in_flight if statuses[run_id] not in ENDED}
        while len(self.in_flight) < self.wanted:
            run_id = f"run-{len(self.started)}"
            agent = AGENTS[len(self.started) % len(AGENTS)]
            self._capsule.runs.start(agent, "go", run_id=run_id, context={"run": run_id})
            self.started.append(run_id)
            self.in_flight.add(run_id)
            if len(self.started) == len(AGENTS):
                self.started_first.set()
        if list(statuses.values()).count("running") >= BUSY:
            self._is_busy.set()

    def _decide(self, store: SyncRunStore, client: Any) -> None:
        for call in store.approvals.pending().calls:
            run = self._capsule.runs.get(call.run_id)
            if not call.tool.startswith(SETTLE):
                run.approve(call.call_id, by="ann")
                continue
            effect = effect_of(call)
            was_made = effect.encode() in client.lrange(f"effects:{call.run_id}", 0, -1)
            run.settle(call.call_id, made=was_made, output=f"done: {effect}" if was_made else None)
            self.settled["made" if was_made else "not made"] += 1


def effect_of(call: PendingApproval) -> str:
    tool = call.tool.removeprefix(SETTLE).removeprefix("bare:")
    return f"{tool} {call.arguments.partition(':')[2].strip(' }')}"


def left_by(run_id: str, app: Any, store: SyncRunStore) -> dict[str, Any]:
    """All that a run leaves but its effects."""
    record = store.read(run_id)
    items = SyncHistory(run_id, store.store).get_items()
    result: AsyncResult[Any] = AsyncResult(run_id, app=app)
    messages = [event.message for event in Execution.of(result).events()]
    ends = [message for message in messages if isinstance(message, Ended)]
    assert messages[-1:] == ends, f"{run_id}: {ends} of {len(messages)} events"
    return {
        "status": record.status,
        "result": record.result,
        "value": result.get(timeout=END_S),
        "outcome": ends[0].outcome,
        "history": [
            (item.get("type"), item.get("role"), item.get("call_id"), item.get("output"))
            for item in items
        ],
    }


class Killer:
    """Kills a child that drives runs, a main process, or both; a lost worker is replaced."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self._hiring = ThreadPoolExecutor(1)
        self._hired: Future[None] | None = None
        self.done: Counter[str] = Counter()

    def kill(self) -> None:
        what = self._rng.choice(["child"] * 4 + ["worker", "both"])
        self.done[what] += 1
        if what != "child":
            self.wait()
        worker, child = eventually(self._driving, "a worker that drives runs")
        if what != "worker":
            os.kill(child, signal.SIGKILL)
        if what != "child":
            self._fleet.lose(worker)
            self._hired = self._hiring.submit(self._fleet.hire)

    def _driving(self) -> tuple[Worker, int] | None:
        """One of the workers whose child has driven a run, and the child."""
        children = self._fleet.admin.hgetall("drivers")
        known = [
            (worker, int(children[name]))
            for worker in self._fleet.workers
            if (name := str(worker.pid).encode()) in children
        ]
        alive = [(worker, child) for worker, child in known if is_running(child)]
        return self._rng.choice(alive) if alive else None

    def wait(self) -> None:
        """Wait until all lost workers are replaced."""
        if self._hired is not None:
            self._hired.result()

    def stop(self) -> None:
        self._hiring.shutdown()


def test_runs_survive_their_processes(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with Fleet(tmp_path, rng, size=3, app="tests.chaos.run_app") as fleet:
        app = producer(fleet.url, fleet.queue)
        desk, killer = Desk(Capsule(app), fleet.url), Killer(fleet, rng)
        try:
            with desk.open():
                desk.wanted = len(AGENTS)
                assert desk.started_first.wait(END_S)
                first = desk.started[: len(AGENTS)]
                for run_id in first:
                    assert AsyncResult(run_id, app=app).get(timeout=END_S) == "all is done"
                desk.wanted = IN_FLIGHT
                until = time.monotonic() + STORM_S
                while killer.done.total() < KILLS and time.monotonic() < until:
                    desk.wait_until_busy()
                    time.sleep(rng.uniform(0.0, 0.3))  # the moment of the kill
                    killer.kill()
                desk.wanted = 0
                for run_id in desk.started:
                    AsyncResult(run_id, app=app).get(timeout=END_S)
            killer.wait()
        finally:
            killer.stop()
        with SyncRunStore(fleet.url) as store:
            unharmed = [left_by(run_id, app, store) for run_id in first]
            assert [each["outcome"] for each in unharmed] == [Outcome.SUCCEEDED] * len(AGENTS)
            repeated: Counter[str] = Counter()
            for number, run_id in enumerate(desk.started):
                of_agent = unharmed[number % len(AGENTS)]
                assert left_by(run_id, app, store) == of_agent, run_id
                made = Counter(
                    each.decode() for each in fleet.admin.lrange(f"effects:{run_id}", 0, -1)
                )
                assert made.keys() == CALLS.keys(), run_id
                repeated += made - CALLS
        assert all(effect.startswith("look") for effect in repeated), repeated
        print(f"{len(desk.started)} runs, {dict(killer.done)}, settled {dict(desk.settled)}")
        print(f"made again: {dict(repeated)}")
        assert killer.done.total() >= KILLS / 3
        assert desk.settled, "no kill came between the start of a call and its end"
        close(app)
        fleet.leave()
