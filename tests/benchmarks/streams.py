"""Execution streams: their delay for a watcher, and their cost for Redis and other tasks.

- *print to watcher*: from `print` in a task to an iterator in another process, one line at a time.
- *throughput*: batches of 64 events of 16 KiB through the store's scripts, four executions at once,
  beside a raw pipeline of XADD of the same bytes, in turns on the same server.
- *cancel*: from `cancel()` to the terminal event at a watcher; idle, and while every other session
  of the worker floods.
- *quiet*: what Redis holds of a task that runs and has printed nothing: its record, the note of its
  worker that it holds it, its entry in the index of recent executions.
- *watchers*: one process watches 10,000 executions that say 150 things a second together.
- *drain*: tasks per second through the pool with streams beside prefork, and with sessions of the
  same worker flooding beside none that do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import redis
from celery import Celery
from redis.asyncio import Redis

from capsule_tasks.client import Execution
from capsule_tasks.protocol.events import Accepted, encode_event
from capsule_tasks.protocol.messages import Output
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry
from capsule_tasks.storage.runs.store import Lease
from capsule_tasks.testing.servers import PrivateServer
from tests.attempts import append, claim
from tests.benchmarks._measure import Bar, p50_ms, p99_ms, report, use_plain_interpreters
from tests.benchmarks._worker import (
    CAPSULE,
    PREFORK,
    WAIT_S,
    Backlog,
    producer,
    streams_url,
    until_keys,
    worker,
)

BARS = (
    Bar("over_raw_xadd", ">=", 0.5),
    Bar("cancel_end_to_end_p99_ms", "<=", 50),
    Bar("cancel_end_to_end_flooding_p99_ms", "<=", 50),
    Bar("watchers_10k_p99_ms", "<=", 20),
    Bar("redis_bytes_per_quiet_task", "<=", 1500),
    Bar("drain_over_prefork", ">=", 1.0),
    Bar("drain_under_flood", ">=", 0.8),
)
_LINES = 200
_CANCELS = 200
_CANCELS_UNDER_FLOOD = 100
"""A p99 of fewer is their maximum."""
_FLOOD_S = 120.0
_PIECE = "x" * 16 * 1024
_BATCH = 64
_BATCHES = 24
_CONCURRENT = 4
_WATCHED = 10_000
_EVENTS_PER_S = 150
_WATCH_S = 10
_QUIET = 5_000
_DRAINED = 6_000


def print_to_watcher(app: Celery) -> list[float]:
    execution = Execution.of(app.send_task("clock", (_LINES, 0.01)))
    return [
        time.time() - float(event.message.data.split()[-1])
        for event in execution.events()
        if isinstance(event.message, Output)
    ]


def cancels(app: Celery, count: int) -> list[float]:
    took = []
    for _ in range(count):
        execution = Execution.of(app.send_task("spin"))
        events = execution.events()
        while type(next(events).message).__name__ != "Accepted":
            pass
        begun = time.perf_counter()
        execution.cancel()
        for _event in events:
            pass
        took.append(time.perf_counter() - begun)
    return took


def cancels_under_flood(app: Celery, floods: int) -> list[float]:
    flooding = [Execution.of(app.send_task("flood", (_FLOOD_S,))) for _ in range(floods)]
    time.sleep(1.0)
    took = cancels(app, _CANCELS_UNDER_FLOOD)
    for execution in flooding:
        execution.cancel()
    for execution in flooding:
        for _event in execution.events(after="9999999999999-1"):
            pass
    return took


async def store_rate(url: str, name: str) -> float:
    store = ExecutionStore(PipelinedConnection(url))
    event = encode_event(Output(stream="stdout", data=_PIECE))

    async def one(number: int) -> None:
        execution_id = f"{name}-{number}"
        claimed = await claim(store, execution_id, owner="w", claim="c")
        seq = claimed.seq
        for _ in range(_BATCHES):
            seq = await append(
                store,
                execution_id,
                claimed.attempt,
                seq + 1,
                [event] * _BATCH,
                has_stream_content=True,
            )

    begun = time.perf_counter()
    await asyncio.gather(*map(one, range(_CONCURRENT)))
    took = time.perf_counter() - begun
    await store.store.close()  # type: ignore[attr-defined]
    return _CONCURRENT * _BATCHES * _BATCH * len(event) / took / 1e6


async def raw_rate(url: str, name: str) -> float:
    client = Redis.from_url(url)
    event = encode_event(Output(stream="stdout", data=_PIECE))

    async def one(number: int) -> None:
        for _ in range(_BATCHES):
            pipeline = client.pipeline(transaction=False)
            for _ in range(_BATCH):
                pipeline.xadd(f"{name}-{number}", {"d": event}, maxlen=64, approximate=True)
            await pipeline.execute()

    begun = time.perf_counter()
    await asyncio.gather(*map(one, range(_CONCURRENT)))
    took = time.perf_counter() - begun
    await client.aclose()
    return _CONCURRENT * _BATCHES * _BATCH * len(event) / took / 1e6


def throughput(url: str) -> tuple[float, float]:
    ours, raw = [], []
    for number in range(5):
        ours.append(asyncio.run(store_rate(url, f"ours{number}")))
        raw.append(asyncio.run(raw_rate(url, f"raw{number}")))
    return median(ours), median(raw)


async def quiet_bytes(url: str) -> float:
    store = ExecutionStore(PipelinedConnection(url))
    holdings = HoldStore(store.store, store.settings)
    owner, worker = "0123456789abcdef", "celery@worker-17.example.org"
    task = "shop.tasks.send_confirmation"
    lease = Lease(owner, store.store)
    client = redis.Redis.from_url(url)
    client.flushdb()
    before = client.info("memory")["used_memory"]
    await lease.acquire()

    async def one(execution_id: str) -> tuple[int, RecentEntry]:
        claimed = await claim(
            store, execution_id, owner=owner, claim="0123456789ab", task=task, worker=worker
        )
        events = [encode_event(Accepted(pid=12345))]
        await append(store, execution_id, claimed.attempt, 2, events)
        begun_at = claimed.attempt / 1000
        return claimed.attempt, RecentEntry(execution_id, 0.0, "running", task, worker, begun_at)

    for first in range(0, _QUIET, 500):
        ids = [f"3f2504e0-4f89-11d3-9a0c-0305e8{n:06d}" for n in range(first, first + 500)]
        notes = await asyncio.gather(*map(one, ids))
        await holdings.hold(owner, lease.core.token, ids, ())
        await store.record_recent(notes)
    after = client.info("memory")["used_memory"]
    await store.store.close()  # type: ignore[attr-defined]
    client.flushdb()
    client.close()
    return float(after - before) / _QUIET


async def speak(url: str, watcher: subprocess.Popen[str]) -> None:
    store = ExecutionStore(PipelinedConnection(url))
    claimed = {}
    for first in range(0, _WATCHED, 500):
        ids = range(first, first + 500)
        found = await asyncio.gather(
            *(claim(store, f"watched-{n}", owner="w", claim="c") for n in ids)
        )
        claimed.update(zip(ids, found, strict=True))
    assert watcher.stdout is not None
    line = await asyncio.to_thread(watcher.stdout.readline)
    assert line == "ready\n", line
    begun = time.perf_counter()
    for number in range(_EVENTS_PER_S * _WATCH_S):
        await asyncio.sleep(max(0.0, begun + number / _EVENTS_PER_S - time.perf_counter()))
        place = number * 7919 % _WATCHED
        event = encode_event(Output(stream="stdout", data=f"{time.time():.6f}"))
        attempt = claimed[place].attempt
        await append(store, f"watched-{place}", attempt, 2, [event], has_stream_content=True)
    await store.store.close()  # type: ignore[attr-defined]


def watchers(url: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.app.watchers", url, str(_WATCHED)]
    command.append(str(_EVENTS_PER_S * _WATCH_S))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        asyncio.run(speak(url, watcher))
        assert watcher.stdout is not None
        found: dict[str, float] = json.loads(watcher.stdout.readline())
    return found


def drains(url: str, rounds: int) -> dict[str, float]:
    """Tasks per second of those that wait when the worker starts, pool beside pool."""
    app = producer(url)
    backlog = Backlog(app, _DRAINED)
    rates: dict[str, list[float]] = {"capsule": [], "prefork": []}
    for _ in range(rounds):
        for kind in (CAPSULE, PREFORK):
            backlog.restore()
            with worker(url, kind) as pid:
                rates[kind.pool].append(backlog.drain(pid)[0])
    app.close()
    figures = {f"drain_{pool}_per_s": median(found) for pool, found in rates.items()}
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    return figures | {"drain_over_prefork": median(ratios)}


def task_rates(url: str) -> tuple[float, float]:
    """Tasks per second of one worker of four children, two of them flooding, and two idle."""
    rates = []
    for floods in (False, True):
        app = producer(url)
        client = app.backend.client
        client.flushall()
        with worker(url, concurrency=4):
            app.send_task("add", (1, 1)).get(timeout=WAIT_S)
            busy = [
                Execution.of(
                    app.send_task("flood" if floods else "spin", (60.0,) if floods else ())
                )
                for _ in range(2)
            ]
            time.sleep(1.0)
            before = client.dbsize()
            with app.producer_pool.acquire(block=True) as channel:
                for number in range(3000):
                    app.send_task("add", (number, 1), producer=channel, queue="bulk")
            app.control.add_consumer("bulk")  # all of them wait when the first is taken
            begun_at = until_keys(client, before + 300)
            first = client.dbsize()
            ended_at = until_keys(client, before + 2900)
            rates.append(2900 + before - first)
            rates[-1] = rates[-1] / (ended_at - begun_at)
            for execution in busy:
                execution.cancel()
        app.close()
    return rates[0], rates[1]


def measure(url: str, rounds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    own = streams_url(url)
    figures["redis_bytes_per_quiet_task"] = asyncio.run(quiet_bytes(own))
    ours, raw = throughput(own)
    figures |= {"throughput_MB_s": ours, "raw_xadd_MB_s": raw, "over_raw_xadd": ours / raw}
    redis.Redis.from_url(url).flushall()
    found = watchers(own)
    figures |= {f"watchers_10k_{name}": value for name, value in found.items()}
    app = producer(url)
    app.backend.client.flushall()
    with worker(url, concurrency=4):
        late = print_to_watcher(app)
        figures |= {
            "print_to_watcher_p50_ms": p50_ms(late),
            "print_to_watcher_p99_ms": p99_ms(late),
        }
        figures["cancel_end_to_end_p99_ms"] = p99_ms(cancels(app, _CANCELS))
        figures["cancel_end_to_end_flooding_p99_ms"] = p99_ms(cancels_under_flood(app, 3))
    app.close()
    figures |= drains(url, rounds)
    pairs = [task_rates(url) for _ in range(rounds)]
    figures["drain_under_flood"] = median(flooded / idle for idle, flooded in pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench streams")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--rounds", type=int, default=3, help="how often the pools take turns")
    arguments = parser.parse_args()
    use_plain_interpreters()
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        figures = measure(server.url, arguments.rounds)
    report(figures, BARS, as_json=arguments.json)


if __name__ == "__main__":
    main()
