"""Runs of openai-agents whose worker is killed at each await, compared with runs without kills."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks.durable import OnUncertain
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.openai_agents.current import UNCERTAIN
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import RunStore
from capsule_tasks.storage.runs.store import SyncLease
from tests.integration.durable_agents import Runs, brief, office
from tests.integration.killing import LASTING, runs_to_its_end

STEP = 41
"""Awaits between two kills, where not each of them is tried: a prime, so that none is favoured."""


class Killer:
    """Runs of the office, driven by processes that die."""

    def __init__(self, url: str, prefix: str, policy: OnUncertain) -> None:
        self.redis = redis.Redis.from_url(url)
        self._url = url
        self._prefix = prefix
        self._policy = policy

    def drive(self, run_id: str, worker: str, dies_at: int | None) -> bool:
        """Start or go on with a run, in a process that dies at this turn of its loop."""

        async def main() -> None:
            client = redis.Redis.from_url(self._url)
            agent = office(
                lambda effect: client.rpush(f"{self._prefix}:{run_id}:effects", effect),
                lambda: client.incr(f"{self._prefix}:{run_id}:asked"),
            )
            async with self.store() as store:
                engine = OpenAIEngine(agent, on_uncertain=self._policy)
                runs = Runs(store, engine, worker, lambda: self.effects(run_id))
                await runs.to_end(run_id)

        with SyncLease(worker, self._url, settings=LASTING, prefix=self._prefix) as lease:
            lease.acquire()
            is_done = runs_to_its_end(main, dies_at)
            lease.release()
        return is_done

    def start(self, run_id: str) -> None:
        async def main() -> None:
            async with self.store() as store:
                await Runs(store, OpenAIEngine(office(print))).start("go", run_id)

        asyncio.run(main())

    def store(self) -> RunStore:
        return RunStore(self._url, settings=RunSettings(prefix=self._prefix))

    def effects(self, run_id: str) -> Counter[str]:
        found: Any = self.redis.lrange(f"{self._prefix}:{run_id}:effects", 0, -1)
        return Counter(each.decode() for each in found)

    def asked(self, run_id: str) -> int:
        found: Any = self.redis.get(f"{self._prefix}:{run_id}:asked")
        return int(found)

    def outcome(self, run_id: str) -> tuple[str, bytes, list[Any]]:
        async def main() -> tuple[str, bytes, list[Any]]:
            async with self.store() as store:
                record = await store.read(run_id)
                items = await Runs(store, OpenAIEngine(office(print))).items(run_id)
                # Tools of several kinds run side by side: the order of their outputs is free.
                return record.status, record.result, sorted(brief(items), key=str)

        return asyncio.run(main())


def kill_points(killer: Killer, step: int) -> Iterator[tuple[int, str]]:
    """Runs that ended after one kill each; a kill comes `step` awaits later in each of them."""
    at = 0
    while True:
        run_id = f"killed-{at}"
        killer.start(run_id)
        if killer.drive(run_id, f"w{at}", at):
            return
        assert killer.drive(run_id, f"w{at}+", None)
        yield at, run_id
        at += step


def ids_of(history: list[Any]) -> list[tuple[Any, Any]]:
    """The items of a history without their outputs."""
    return sorted(((kind, call_id) for kind, call_id, _ in history), key=str)


def check_kills(killer: Killer, policy: OnUncertain, step: int) -> None:
    killer.start("whole")
    assert killer.drive("whole", "w", None)
    status, result, history = killer.outcome("whole")
    assert (status, result) == ("completed", b'"all done"')
    effects, asked = killer.effects("whole"), killer.asked("whole")
    count = 0
    for at, run_id in kill_points(killer, step):
        count += 1
        found_status, found_result, found_history = killer.outcome(run_id)
        assert (found_status, found_result) == (status, result), at
        found = killer.effects(run_id)
        # A model call that was cut before its reply was journaled is made again.
        assert killer.asked(run_id) <= asked + 1, at
        if policy == "retry":
            assert found_history == history, at
            assert found.keys() == effects.keys(), at
        elif policy == "park":
            assert found_history == history, at
            assert found == effects, at
        else:
            assert max(found.values()) == 1, at
            assert ids_of(found_history) == ids_of(history), at
            told = sum(UNCERTAIN in str(item) for item in found_history)
            assert len(found) >= len(effects) - max(told, 3), at
    assert count > 5


@pytest.mark.parametrize("policy", ["park", "retry", "tell"])
def test_a_killed_run_ends_as_one_that_was_not_killed(
    valkey_url: str, prefix: str, policy: OnUncertain
) -> None:
    check_kills(Killer(valkey_url, prefix, policy), policy, STEP)


@pytest.mark.full
def test_kills_at_many_awaits(valkey_url: str, prefix: str) -> None:
    check_kills(Killer(valkey_url, prefix, "park"), "park", 11)
