# ruff: noqa: T201 - the figures are for a person who runs it with -s
"""Named sessions on three workers, while workers and children are killed at random.

Each call counts in its session's namespace, and returns the count and the child that counted. So
the returned values show whether a namespace was lost or ever lived in two places. Half of the
sessions have no checkpoints but those that workers make by themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from billiard.exceptions import WorkerLostError

from capsule_tasks import Capsule, Execution
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.errors import CapsuleError
from capsule_tasks.protocol.events import SessionRestored
from tests.acceptance.test_many_tasks import SCALE
from tests.acceptance.workers import close, producer
from tests.chaos.fleet import Fleet

SEED = os.environ.get("CAPSULE_CHAOS_SEED", "20261119")
STORM_S = 120 * SCALE
SESSIONS = max(20, int(200 * SCALE))
CALLERS = 20
ANSWER_S = 60

COUNT = """
import os, sys
sys.child_mark = getattr(sys, "child_mark", None) or os.urandom(8).hex()
n = globals().get("n", 0) + 1
[n, sys.child_mark]
"""
"""The mark is no variable of the namespace: a restored namespace is in a child with another."""

SAVED_AFTER = 15
"""A session with so many calls has a checkpoint: one is made after every five."""
HAS_STARTED = "may have run|has run"
"""Each error of a call that was lost says that the code may have run."""

pytestmark = pytest.mark.chaos


@dataclass
class Seen:
    """What callers saw of one session, in the order of its calls: one caller at a time has it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: list[tuple[int, str]] = field(default_factory=list)
    may_ask: bool = True
    """Whether callers ask for checkpoints of it."""
    checkpointed: int = 0
    """The count in a checkpoint that a caller asked for and got."""
    errors: Counter[str] = field(default_factory=Counter)


class Caller:
    """Calls random sessions until the storm is over."""

    def __init__(self, capsule: Capsule, seen: dict[str, Seen], rng: random.Random) -> None:
        self._capsule = capsule
        self._seen = seen
        self._rng = rng

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            name = self._rng.choice(list(self._seen))
            seen = self._seen[name]
            if seen.lock.acquire(blocking=False):
                try:
                    self._call(name, seen)
                finally:
                    seen.lock.release()

    def _call(self, name: str, seen: Seen) -> None:
        session = self._capsule.session(name)
        before = self._count(session, seen)
        if before is None or not seen.may_ask or self._rng.random() > 0.2:
            return
        with contextlib.suppress(CapsuleError):
            session.checkpoint()
            after = self._count(session, seen)
            # The same child before and after: the checkpoint is of its namespace.
            if after is not None and after[1] == before[1]:
                seen.checkpointed = before[0]

    def _count(self, session: NamedSession, seen: Seen) -> tuple[int, str] | None:
        """One call; None if it was lost."""
        execution = session.execute(COUNT)
        try:
            count, mark = execution.get(timeout=ANSWER_S)
        except WorkerLostError as lost:
            seen.errors[str(lost)] += 1
            return None
        if seen.counts and seen.counts[-1][1] != mark:
            assert told_of(execution).lost == (), f"{session}: {seen}"
        seen.counts.append((count, mark))
        assert count > seen.checkpointed, f"{session}: {seen}"
        return count, mark


def told_of(execution: Execution) -> SessionRestored:
    """What the first call in a new child was told of its namespace."""
    (told,) = (
        event.message for event in execution.events() if isinstance(event.message, SessionRestored)
    )
    return told


def test_no_session_lives_twice_or_forgets_its_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    seen = {f"s-{number}": Seen(may_ask=number % 2 == 0) for number in range(SESSIONS)}
    kills: Counter[str] = Counter()
    with Fleet(tmp_path, rng, size=3, app="tests.chaos.code_app") as fleet:
        app = producer(fleet.url, fleet.queue)
        capsule = Capsule(app)
        until = time.monotonic() + STORM_S
        callers = [Caller(capsule, seen, random.Random(f"{SEED}-{n}")) for n in range(CALLERS)]
        with ThreadPoolExecutor(CALLERS) as threads:
            running = [threads.submit(caller.run, until) for caller in callers]
            while time.monotonic() < until:
                fault = rng.choice([fleet.kill_a_child] * 4 + [fleet.kill_a_worker])
                fault()
                kills[fault.__name__] += 1
                time.sleep(rng.uniform(0.2, 1.0))  # the pace of the storm
            for one in running:
                one.result()
            for worker in list(fleet.workers):
                fleet.kill(worker)
            known = [name for name, one in seen.items() if len(one.counts) >= SAVED_AFTER]
            for _ in threads.map(lambda name: check_restored(capsule, name, seen[name]), known):
                pass
        for name, one in seen.items():
            check(name, one)
        calls = sum(len(one.counts) for one in seen.values())
        errors = sum((one.errors for one in seen.values()), Counter[str]())
        assert all(re.search(HAS_STARTED, error) for error in errors), errors
        children = sum(len({mark for _, mark in one.counts}) for one in seen.values())
        print(f"{calls} calls, {errors.total()} lost, {children} children; {dict(kills)}")
        print(f"{len(known)} sessions restored in the end")
        assert any(not seen[name].may_ask for name in known)
        assert calls > SESSIONS, "the storm let nothing through"
        close(app)
        fleet.leave()


def check_restored(capsule: Capsule, name: str, seen: Seen) -> None:
    """Once all workers were killed, a session counts on from a checkpoint that it knows of."""
    before = seen.counts[-1][0]
    execution = capsule.session(name).execute(COUNT)
    count, mark = execution.get(timeout=ANSWER_S)
    assert mark != seen.counts[-1][1]
    seen.counts.append((count, mark))
    told = told_of(execution)
    assert told.saved_at is not None, f"{name} has no checkpoint: {seen}"
    assert told.lost == ()
    assert before - told.lost_calls < count <= before + 1, f"{name}, {told}: {seen}"


def check(name: str, seen: Seen) -> None:
    """One child after the other, each counting on from what it was started with."""
    ended: set[str] = set()
    before, current = 0, ""
    for count, mark in seen.counts:
        if mark != current:
            assert mark not in ended, f"{name} lived in two children at once: {seen.counts}"
            ended.add(current)
            current = mark
        else:
            assert count > before, f"{name} was counted back: {seen.counts}"
        before = count
