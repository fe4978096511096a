"""Connections are cut before and after the server applied a command: all is done exactly once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import HistoryConflict, StorageUnavailable
from capsule_tasks.settings import HistorySettings, RetrySettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from tests.cutting_proxy import Cut, CuttingProxy
from tests.servers import fresh_prefix

EXAMPLES = int(1000 * float(os.environ.get("CAPSULE_TEST_SCALE", "0.1")))
RETRY = RetrySettings(attempts=6, first_delay_s=0.001, max_delay_s=0.004)


@pytest.fixture(scope="module")
def proxy(valkey_url: str) -> Iterator[CuttingProxy]:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    with CuttingProxy(port) as proxy:
        yield proxy


def own_settings(retry: RetrySettings = RETRY) -> HistorySettings:
    return HistorySettings(prefix=fresh_prefix(), retry=retry)


CUTS = {
    "before": ["before"],
    "after": ["after"],
    "twice": ["after", "after"],
    "before and after": ["before", "after", "before"],
}
STEPS = {
    "add_items": lambda history: history.add_items([{"n": 3}, {"n": 4}]),
    "get_items": lambda history: history.get_items(),
    "read": lambda history: history.read(1),
    "pop_item": lambda history: history.pop_item(),
    "pop_suffix": lambda history: history.pop_suffix([{"n": 1}, {"n": 2}]),
    "clear_session": lambda history: history.clear_session(),
    "info": lambda history: history.info(),
}
LEFT = {"add_items": [1, 2, 3, 4], "pop_item": [1], "pop_suffix": [], "clear_session": []}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", STEPS)
def test_each_method_is_done_once(proxy: CuttingProxy, name: str, cuts: list[Cut]) -> None:
    with SyncHistory("user-42", proxy.url, settings=own_settings()) as history:
        history.add_items([{"n": 1}, {"n": 2}])
        proxy.plan(cuts)
        before = proxy.cuts
        result = STEPS[name](history)
        assert proxy.cuts - before == len(cuts)
        assert numbers(history.get_items()) == LEFT.get(name, [1, 2])
        if name == "pop_item":
            assert result == {"n": 2}
        if name == "pop_suffix":
            assert result.removed


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
async def test_a_replacement_in_pieces_is_done_once(
    proxy: CuttingProxy, cuts: list[Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule_tasks.storage.history.core.CHUNK_ITEMS", 2)
    async with History("user-42", proxy.url, settings=own_settings()) as history:
        for offset in range(4):
            await history.clear_session()
            await history.add_items([{"n": n} for n in range(9)])
            snapshot = await history.read(7)
            await history.add_items([{"n": 9}])
            proxy.plan(["pass"] * offset + cuts)
            await history.replace(snapshot.version, [{"n": n} for n in range(100, 107)])
            assert numbers(await history.get_items()) == [0, 1, *range(100, 107), 9]


async def test_a_corrupt_tail_is_quarantined_once(proxy: CuttingProxy, valkey_url: str) -> None:
    settings_ = own_settings()
    async with History("user-42", proxy.url, settings=settings_) as history:
        await history.add_items([{"n": 1}])
        with redis.Redis.from_url(valkey_url) as raw:
            raw.rpush(f"{settings_.prefix}:{{S:user-42}}:items", b"{", b"null")
        proxy.plan(["after", "pass", "after", "pass", "after"])
        assert await history.pop_item() == {"n": 1}
        assert (await history.info()).quarantined == 2


def test_the_final_error_says_whether_the_write_may_have_happened(proxy: CuttingProxy) -> None:
    with SyncHistory("user-42", proxy.url, settings=own_settings()) as history:
        proxy.plan(["after"] * RETRY.attempts)
        with pytest.raises(StorageUnavailable, match="may have happened") as failure:
            history.add_items([{"n": 1}], operation_id="turn-1")
        assert failure.value.may_have_written
        history.add_items([{"n": 1}], operation_id="turn-1")
        assert numbers(history.get_items()) == [1]
        proxy.plan(["before"] * RETRY.attempts)
        with pytest.raises(StorageUnavailable) as failure:
            history.get_items()
        assert not failure.value.may_have_written


LOST: list[Cut] = ["after"] * (RETRY.attempts + 1)
"""Every attempt's reply, also where the first is spent on a script that is not loaded yet."""
REPEATABLE = {
    "add_items": lambda history, **named: history.add_items([{"n": 3}], **named),
    "pop_item": lambda history, **named: history.pop_item(**named),
    "pop_suffix": lambda history, **named: history.pop_suffix([{"n": 2}], **named),
    "clear_session": lambda history, **named: history.clear_session(**named),
}


@pytest.mark.parametrize("name", REPEATABLE)
def test_the_operation_that_an_error_tells_repeats_that_very_write(
    proxy: CuttingProxy, name: str
) -> None:
    with SyncHistory("user-42", proxy.url, settings=own_settings()) as history:
        history.add_items([{"n": 1}, {"n": 2}, {"n": 2}])
        proxy.plan(LOST)
        with pytest.raises(StorageUnavailable) as failure:
            REPEATABLE[name](history)
        proxy.plan([])
        assert failure.value.may_have_written
        done = history.get_items()
        assert numbers(done) != [1, 2, 2]
        REPEATABLE[name](history, operation_id=failure.value.operation_id)
        assert history.get_items() == done


def test_the_operation_of_a_lost_replacement_repeats_it(proxy: CuttingProxy) -> None:
    with SyncHistory("user-42", proxy.url, settings=own_settings()) as history:
        history.add_items([{"n": 1}])
        version = history.read().version
        proxy.plan(LOST)
        with pytest.raises(StorageUnavailable) as failure:
            history.replace(version, [{"n": 2}])
        proxy.plan([])
        history.add_items([{"n": 3}])
        history.replace(version, [{"n": 2}], operation_id=failure.value.operation_id)
        assert numbers(history.get_items()) == [2, 3]


async def test_a_repeat_by_redis_py_itself_takes_one_item(proxy: CuttingProxy) -> None:
    """An injected client repeats a command that lost its reply by itself, without an error."""
    own = own_settings(RetrySettings(attempts=1))
    awaited = redis.asyncio.Redis.from_url(
        proxy.url, protocol=2, retry=redis.asyncio.retry.Retry(NoBackoff(), 3)
    )
    blocking = redis.Redis.from_url(proxy.url, protocol=2, retry=Retry(NoBackoff(), 3))
    async with History("user-42", awaited, settings=own) as history:
        await history.add_items([{"n": 1}, {"n": 2}, {"n": 3}, {"n": 0}])
        await history.pop_item()  # so that the script is loaded
        proxy.plan(["after", "after"])
        assert await history.pop_item() == {"n": 3}
        proxy.plan(["after"])
        await history.add_items([{"n": 4}])
        with SyncHistory("user-42", blocking, settings=own) as same:
            seen = proxy.cuts
            proxy.plan(["after", "after"])
            assert same.pop_item() == {"n": 4}
            assert proxy.cuts - seen == 2
        assert numbers(await history.get_items()) == [1, 2]
    await awaited.aclose()
    blocking.close()


# --- random interleavings ------------------------------------------------------------------------

cuts_of_a_step = st.lists(st.sampled_from(["pass", "before", "after"]), max_size=4)
small_batch = st.lists(st.integers(0, 3), min_size=1, max_size=3)
step = st.one_of(
    st.tuples(st.just("add"), small_batch),
    st.tuples(st.just("pop"), st.none()),
    st.tuples(st.just("pop_suffix"), small_batch),
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("replace"), small_batch),
    st.tuples(st.just("clear"), st.none()),
)
plans = st.lists(st.tuples(st.integers(0, 1), step, cuts_of_a_step), min_size=1, max_size=12)


class Model:
    """A model of a history without a network: a list, and how much each writer has read.

    Its generation changes when items are removed, and is 0 while there is no history; nothing of
    that one can be removed, so replacing it is always possible.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.generation = 0
        self.used = 0
        self.seen: dict[int, tuple[int, int]] = {}

    def do(self, writer: int, name: str, batch: Any) -> Any:
        match name:
            case "add":
                self.numbers += batch
                self.generation = self.generation or self.new_generation()
            case "pop" if self.numbers:
                self.generation = self.new_generation()
                return self.numbers.pop()
            case "pop_suffix":
                if self.numbers[-len(batch) :] != batch:
                    return False
                del self.numbers[-len(batch) :]
                self.generation = self.new_generation()
                return True
            case "read":
                self.seen[writer] = (self.generation, len(self.numbers))
                return list(self.numbers)
            case "replace":
                if writer not in self.seen or self.seen[writer][0] not in (0, self.generation):
                    return "conflict"
                self.numbers[: self.seen[writer][1]] = batch
                self.generation = self.new_generation()
            case "clear":
                self.numbers.clear()
                self.generation = 0
        return None

    def new_generation(self) -> int:
        self.used += 1
        return self.used


class Writer:
    """One client: it carries the versions that it has read from step to step."""

    def __init__(self, history: Any) -> None:
        self.history = history
        self.version: Any = None

    async def do(self, name: str, batch: list[int] | None) -> Any:
        items = [{"n": n} for n in batch or []]
        match name:
            case "add":
                await self.history.add_items(items)
            case "pop":
                popped = await self.history.pop_item()
                return popped["n"] if popped else None
            case "pop_suffix":
                return bool(await self.history.pop_suffix(items))
            case "read":
                snapshot = await self.history.read()
                self.version = snapshot.version
                return numbers(snapshot.items)
            case "replace":
                if self.version is None:
                    return "conflict"
                try:
                    await self.history.replace(self.version, items)
                except HistoryConflict:
                    return "conflict"
            case "clear":
                await self.history.clear_session()
        return None


def numbers(items: list[dict[str, Any]]) -> list[int]:
    return [item["n"] for item in items]


@given(plan=plans)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_interleavings_end_like_the_sequential_model(
    proxy: CuttingProxy, plan: list[tuple[int, tuple[str, Any], list[Cut]]]
) -> None:
    asyncio.run(follow(proxy, plan))


async def follow(proxy: CuttingProxy, plan: list[tuple[int, tuple[str, Any], list[Cut]]]) -> None:
    model = Model()
    options = own_settings()
    connections = AsyncConnections(proxy.url)
    blocking = SyncConnections(proxy.url)
    awaited = History("user-42", connections, settings=options)
    writers = [Writer(awaited), Writer(Awaited(SyncHistory("user-42", blocking, settings=options)))]
    for writer, (name, batch), cuts in plan:
        proxy.plan(cuts)
        assert await writers[writer].do(name, batch) == model.do(writer, name, batch)
        proxy.plan([])
        assert numbers(await awaited.get_items()) == model.numbers
    await connections.close()
    blocking.close_blocking()


class Awaited:
    """A blocking history whose methods can be awaited."""

    def __init__(self, history: SyncHistory) -> None:
        self._history = history

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._history, name)(*args, **kwargs)

        return call
