# ruff: noqa: T201 - the figures are for a person who runs it with -s
"""A day of three workers in ten minutes: whatever is done to them, each task has one outcome.

What Celery stored, what its last event said and what the task itself wrote down must agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from tests.acceptance.test_many_tasks import rss_kib
from tests.acceptance.test_one_end import ENDS
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer
from tests.chaos.fleet import Fleet, all_acknowledged

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
SEED = os.environ.get("CAPSULE_CHAOS_SEED", "20261118")
DAY_S = 600 * SCALE if SCALE >= 1 else 300 * SCALE
"""Half of its share in the run of every push."""
TASKS_PER_S = 50
ROUND_S, NIGHT_S = 15.0, 3.0
"""A busy time and a quiet one, in which an autoscaler shrinks."""
TICK_S = 0.1
MOST_CHILDREN = 4
RETIRE_AT_KB, FAT_MB = 250_000, 300
OPTIONS = (
    f"--autoscale={MOST_CHILDREN},1",
    "--max-tasks-per-child=100",
    f"--max-memory-per-child={RETIRE_AT_KB}",
)
_BATCH_SIZE = 1000
"""Keys in one call of Redis."""

pytestmark = pytest.mark.chaos


@dataclass(frozen=True)
class Call:
    """A sort of task, and what may become of it."""

    share: int
    name: str
    args: tuple[Any, ...] = ()
    ends: tuple[str, ...] = ("SUCCESS",)
    begins: int | None = 1
    """How often; None if the stop may come early or late."""
    expires_s: float | None = None
    countdown_s: float | None = None
    soft_s: float | None = None
    hard_s: float | None = None
    stopped_by: str = ""
    """`revoke`, or the signal that it is terminated with, as soon as it is sent."""


CALLS = [
    Call(300, "work", (0.0,)),
    Call(250, "work_late", (0.0,)),
    Call(60, "work", (0.2,)),
    Call(60, "work_late", (0.2,)),
    Call(120, "await_late", (1.0,)),
    Call(50, "work_late", (0.0,), countdown_s=2),
    Call(60, "go_wrong", ends=("FAILURE",)),
    Call(40, "try_twice", begins=2),
    # A busy machine needs time of these too, before the task has noted that it began.
    Call(20, "be_tidy", (30.0,), soft_s=1.5),
    Call(6, "work_late", (30.0,), ends=("FAILURE",), begins=None, hard_s=1.5),
    Call(6, "die_once", begins=2),
    Call(3, "grow_fat", (FAT_MB,)),
    Call(10, "work_late", (0.0,), ends=("REVOKED",), begins=0, expires_s=-1),
    Call(20, "work", (0.0,), ("REVOKED",), begins=0, countdown_s=6, stopped_by="revoke"),
    Call(10, "work", (0.3,), ("SUCCESS", "REVOKED"), begins=None, stopped_by="SIGTERM"),
    Call(10, "work_late", (0.3,), ("SUCCESS", "REVOKED"), begins=None, stopped_by="SIGKILL"),
    Call(10, "await_late", (0.3,), ("SUCCESS", "REVOKED"), begins=None, stopped_by="SIGTERM"),
]
LONG = Call(0, "work_late", (60.0,), ends=("REVOKED",))
LIMITED = Call(0, "be_tidy", (60.0,))
FAT = Call(0, "grow_fat", (FAT_MB,))


class Callers(threading.Thread):
    """Send tasks all day, without waiting for their results."""

    def __init__(self, app: Celery, queue: str, rng: random.Random) -> None:
        super().__init__(name="callers")
        self.app, self._queue, self._rng = app, queue, rng
        self.sent: dict[str, Call] = {}
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            self._send_all_day()
        except BaseException as fault:  # noqa: BLE001 - the test tells it
            self.fault = fault

    def _send_all_day(self) -> None:
        shares = [call.share for call in CALLS]
        awake = ROUND_S - NIGHT_S
        began, owed = time.monotonic(), 0.0
        while (now := time.monotonic() - began) < DAY_S:
            is_day = now % ROUND_S < awake
            owed += is_day * TASKS_PER_S * TICK_S * ROUND_S / awake
            for call in self._rng.choices(CALLS, shares, k=int(owed)):
                self.send(call)
            owed -= int(owed)
            time.sleep(max(0.0, began + now + TICK_S - time.monotonic()))

    def send(self, call: Call) -> Any:
        result = self.app.signature(call.name, args=call.args, queue=self._queue).apply_async(
            countdown=call.countdown_s,
            expires=call.expires_s,
            soft_time_limit=call.soft_s,
            time_limit=call.hard_s,
        )
        self.sent[result.id] = call
        if call.stopped_by == "revoke":
            self.app.control.revoke(result.id)
        elif call.stopped_by:
            self.app.control.revoke(result.id, terminate=True, signal=call.stopped_by)
        return result


class Listener(threading.Thread):
    """Receives all events that the workers send about their tasks."""

    def __init__(self, app: Celery) -> None:
        super().__init__(name="listener")
        self._app = app
        self._over = threading.Event()
        self._hears = threading.Event()
        self.ends: defaultdict[str, list[str]] = defaultdict(list)

    def __enter__(self) -> Self:
        self.start()

        def is_heard() -> bool:  # kombu subscribes when it first reads
            with self._app.events.default_dispatcher() as dispatcher:
                dispatcher.send("test-begins")
            return self._hears.wait(0.2)

        eventually(is_heard, "the first event")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(HANG_S)

    def run(self) -> None:
        with self._app.connection_for_read() as source:
            receiver = self._app.events.Receiver(source, handlers={"*": self._take})
            with receiver.consumer_context() as (connection, _, _):
                while not self._over.is_set():
                    with contextlib.suppress(TimeoutError):
                        connection.drain_events(timeout=0.2)

    def _take(self, event: dict[str, Any]) -> None:
        self._hears.set()
        if event["type"] in ENDS and event["type"] != "task-retried":
            self.ends[event["uuid"]].append(ENDS[event["type"]])


class Operator:
    """Do harm to the workers while tasks run. One worker is never replaced."""

    def __init__(self, fleet: Fleet, callers: Callers, rng: random.Random) -> None:
        self._fleet, self._callers, self._rng = fleet, callers, rng
        self.elder = fleet.workers[0]
        self._works = [
            self.replace_a_worker,
            self.restart_a_pool,
            self.change_the_range,
            self.terminate_what_runs,
            self.limit_by_remote_control,
            self.feed_until_a_child_is_replaced,
        ]
        self.done: Counter[str] = Counter()

    def work(self) -> None:
        """One of the jobs, each of them in turn before any is repeated."""
        rarest = min(self.done[work.__name__] for work in self._works)
        work = self._rng.choice([w for w in self._works if self.done[w.__name__] == rarest])
        self.done[work.__name__] += 1
        work()

    def replace_a_worker(self) -> None:
        oldest = next(worker for worker in self._fleet.workers if worker is not self.elder)
        self._fleet.replace(oldest)

    def restart_a_pool(self) -> None:
        worker = self._any()
        assert worker.tell("pool_restart", reload=True) == {"ok": "reload started"}

    def change_the_range(self) -> None:
        worker = self._any()
        for most in (2, MOST_CHILDREN):
            assert "ok" in worker.tell("autoscale", most, 1)

    def terminate_what_runs(self) -> None:
        result = self._callers.send(LONG)
        eventually(lambda: self._fleet.admin.llen(f"noted:{result.id}"), "its beginning")
        signum = self._rng.choice(["SIGTERM", "SIGKILL", "SIGQUIT"])
        self._callers.app.control.revoke(result.id, terminate=True, signal=signum)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=HANG_S)

    def limit_by_remote_control(self) -> None:
        for worker in self._fleet.workers:
            assert "ok" in worker.tell("time_limit", LIMITED.name, soft=1.5, hard=50)
        assert self._callers.send(LIMITED).get(timeout=HANG_S) == "tidied"

    def feed_until_a_child_is_replaced(self) -> None:
        """On a busy machine the callers alone may send none that eats; and a fat one may go first.

        Its pool may shrink or be restarted before anybody has looked at its memory.
        """
        before = self._replaced()

        def is_replaced() -> bool:
            self._callers.send(FAT).get(timeout=HANG_S)
            return self._replaced() > before

        eventually(is_replaced, "the news of a child that is too fat")

    def _replaced(self) -> int:
        return self._fleet.logs().count("is replaced: it uses")

    def _any(self) -> Worker:
        return self._rng.choice(self._fleet.workers)


def in_pieces(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _BATCH_SIZE):
        yield ids[start : start + _BATCH_SIZE]


def stored(fleet: Fleet, ids: list[str]) -> dict[str, str]:
    """The state of each, as it is in the result backend."""
    found: dict[str, str] = {}
    for some in in_pieces(ids):
        metas = fleet.admin.mget([f"celery-task-meta-{one}" for one in some])
        states = [json.loads(meta)["status"] if meta else "PENDING" for meta in metas]
        found |= dict(zip(some, states, strict=True))
    return found


def notes(fleet: Fleet, ids: list[str]) -> dict[str, Counter[str]]:
    """Count the notes that each task wrote."""
    found: dict[str, Counter[str]] = {}
    for some in in_pieces(ids):
        with fleet.admin.pipeline(transaction=False) as pipe:
            for one in some:
                pipe.lrange(f"noted:{one}", 0, -1)
            said = pipe.execute()
        found |= {
            one: Counter(word.decode() for word in words)
            for one, words in zip(some, said, strict=True)
        }
    return found


def fault_of(call: Call, state: str, reported: list[str], noted: Counter[str]) -> str:
    """Say what is wrong with the end of a task; empty if nothing is."""
    if state not in call.ends:
        return f"it is {state}"
    if reported != [state]:
        return f"it is {state}, and was reported as {reported}"
    if call.begins is not None and noted["began"] != call.begins:
        return f"it began {noted['began']} times"
    if call.begins is None and noted["began"] > 1:
        return f"it began {noted['began']} times, and is {state}"
    if state == "SUCCESS" and noted["ended"] != 1:
        return f"it is {state}, and ended {noted['ended']} times"
    # A signal may come when the task has written down its end, and Celery has not yet.
    if state != "SUCCESS" and noted["ended"] and call.begins is not None:
        return f"it is {state}, and came to its end"
    return ""


def test_each_task_of_a_day_has_exactly_one_outcome(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with Fleet(
        tmp_path, rng, *OPTIONS, size=3, app="tests.chaos.day_app", AUTOSCALE_KEEPALIVE="1"
    ) as fleet:
        app = producer(fleet.url, fleet.queue)
        with Listener(app) as listener:
            callers = Callers(app, fleet.queue, random.Random(SEED))
            callers.start()
            operator = Operator(fleet, callers, rng)
            dusk = time.monotonic() + DAY_S / 5
            before = 0
            while callers.is_alive():
                operator.work()
                if not before and time.monotonic() > dusk:
                    before = rss_kib([operator.elder.pid])
            callers.join()
            assert callers.fault is None, repr(callers.fault)
            judge(fleet, callers.sent, listener)
        after = rss_kib([operator.elder.pid])
        starts = operator.elder.ask("stats")["pool"]["capsule"]["starts"]
        eventually(lambda: "Scaling down" in fleet.logs(), "the shrinking of what is idle")
        logs = fleet.logs()
        print(f"{len(callers.sent)} tasks, {dict(operator.done)}, {starts} starts of children in")
        print(f"one worker, whose memory was {before} KiB and is {after} KiB at the end")
        assert "Scaling up" in logs
        assert "is replaced: it uses" in logs
        assert starts > MOST_CHILDREN
        assert after < 1.3 * before, f"{after} KiB after {before} KiB"
        close(app)
        fleet.leave()


def judge(fleet: Fleet, sent: dict[str, Call], listener: Listener) -> None:
    """Nothing is under way any more, and nothing is wrong with what became of it."""
    ids = list(sent)

    def open_ones() -> list[str]:
        states = stored(fleet, ids)
        return [one for one in ids if states[one] in ("PENDING", "RETRY") or not listener.ends[one]]

    try:
        eventually(lambda: not open_ones(), "the end of each")
    except AssertionError:
        print(*(f"{one} {sent[one]}" for one in open_ones()), sep="\n")
    all_acknowledged(fleet)
    states, noted = stored(fleet, ids), notes(fleet, ids)
    faults = [
        f"{one}: {fault}; {sent[one]}, {listener.ends[one]}, {dict(noted[one])}"
        for one in ids
        if (fault := fault_of(sent[one], states[one], listener.ends[one], noted[one]))
    ]
    print(f"{Counter(states.values())} of {len(ids)}")
    assert not faults, f"CAPSULE_CHAOS_SEED={SEED}: {len(faults)}\n" + "\n".join(faults[:50])
