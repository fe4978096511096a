"""Many writers of one history: batches stay whole, suffixes go once, replacements lose nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from typing import Any

import pytest

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import HistoryConflict
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import AsyncConnections
from tests.servers import fresh_prefix

pytestmark = pytest.mark.chaos

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
ROUNDS = max(1, int(1000 * SCALE))
WRITERS = 8
FIRST_WRITERS = 64
FIRST_ROUNDS = max(1, int(200 * SCALE))


def own_settings() -> HistorySettings:
    return HistorySettings(prefix=fresh_prefix())


def batch(writer: int, number: int) -> list[dict[str, int]]:
    """Between one and five items, which name their batch and their place in it."""
    size = 1 + (writer + number) % 5
    return [{"w": writer, "b": number, "i": i, "of": size} for i in range(size)]


def append_batches(url: str, settings: HistorySettings, writer: int) -> None:
    with SyncHistory("shared", url, settings=settings) as history:
        for number in range(ROUNDS):
            history.add_items(batch(writer, number))


def test_eight_processes_append_whole_batches_and_lose_none(valkey_url: str) -> None:
    settings = own_settings()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=append_batches, args=(valkey_url, settings, writer))
        for writer in range(WRITERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * WRITERS
    with SyncHistory("shared", valkey_url, settings=settings) as history:
        check_batches(history.get_items(), dict.fromkeys(range(WRITERS), ROUNDS))


def check_batches(items: list[dict[str, Any]], expected: dict[int, int]) -> None:
    """Every batch is whole and in one piece, and each writer's come in its order."""
    done = dict.fromkeys(expected, 0)
    position = 0
    while position < len(items):
        first = items[position]
        writer, number = first["w"], first["b"]
        assert number == done[writer]
        found = items[position : position + first["of"]]
        assert found == batch(writer, number)
        done[writer] += 1
        position += first["of"]
    assert done == expected


async def test_exactly_one_of_two_rewinders_of_a_suffix_wins(valkey_url: str) -> None:
    connections = AsyncConnections(valkey_url)
    one, other = (History("s", connections, settings=s) for s in [own_settings()] * 2)
    suffix = [{"turn": 1}, {"turn": 2}]
    for _ in range(ROUNDS):
        await one.add_items([{"kept": 1}, *suffix])
        results = await asyncio.gather(one.pop_suffix(suffix), other.pop_suffix(suffix))
        assert sorted(map(bool, results)) == [False, True]
        assert await one.get_items() == [{"kept": 1}]
        await one.clear_session()
    await connections.close()


async def test_a_rewind_and_an_append_never_tear_each_other(valkey_url: str) -> None:
    connections = AsyncConnections(valkey_url)
    one, other = (History("s", connections, settings=s) for s in [own_settings()] * 2)
    suffix, late = [{"turn": 1}, {"turn": 2}], [{"late": 1}, {"late": 2}]
    rewound = 0
    for number in range(ROUNDS):
        await one.add_items([{"kept": 1}, *suffix])
        calls = [one.pop_suffix(suffix), other.add_items(late)]
        results = await asyncio.gather(*(calls if number % 2 else reversed(calls)))
        removed = any(results)
        rewound += removed
        assert await one.get_items() == [{"kept": 1}, *([] if removed else suffix), *late]
        await one.clear_session()
    assert 0 < rewound <= ROUNDS
    await connections.close()


async def test_a_replacement_keeps_what_is_appended_meanwhile(valkey_url: str) -> None:
    connections = AsyncConnections(valkey_url)
    one, other = (History("s", connections, settings=s) for s in [own_settings()] * 2)
    await one.add_items([{"n": -1}])
    expected = [{"n": -1}]
    for number in range(ROUNDS):
        snapshot = await one.read()
        summary = [{"summary": len(snapshot.items)}]
        late = [{"n": number}, {"n": number}]
        await asyncio.gather(one.replace(snapshot.version, summary), other.add_items(late))
        expected = [*summary, *late]
        assert await one.get_items() == expected
    await connections.close()


async def test_replacements_and_pops_at_once_lose_nothing_that_was_not_taken(
    valkey_url: str,
) -> None:
    connections = AsyncConnections(valkey_url)
    one, other = (History("s", connections, settings=s) for s in [own_settings()] * 2)
    for _ in range(ROUNDS // 4 + 1):
        await one.add_items([{"n": 1}, {"n": 2}, {"n": 3}])
        snapshot = await one.read()

        async def replaced(version: Any = snapshot.version) -> bool:
            try:
                await one.replace(version, [{"summary": 1}])
            except HistoryConflict:
                return False
            return True

        won, popped = await asyncio.gather(replaced(), other.pop_item())
        left = await one.get_items()
        assert (left, popped) == (([], {"summary": 1}) if won else ([{"n": 1}, {"n": 2}], {"n": 3}))
        await one.clear_session()
    await connections.close()


async def test_concurrent_first_writers_agree_on_one_creation(valkey_url: str) -> None:
    connections = AsyncConnections(valkey_url)
    settings = own_settings()
    for round_ in range(FIRST_ROUNDS):
        histories = [
            History(f"new-{round_}", connections, settings=settings) for _ in range(FIRST_WRITERS)
        ]

        async def write(history: History, writer: int) -> Any:
            await history.add_items([{"w": writer}])
            return (await history.info()).created_at

        created = await asyncio.gather(*map(write, histories, range(FIRST_WRITERS)))
        assert len(set(created)) == 1
        found = {item["w"] for item in await histories[0].get_items()}
        assert found == set(range(FIRST_WRITERS))
    await connections.close()
