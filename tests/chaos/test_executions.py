"""Executions whose workers are killed and stopped past their lease: each has exactly one end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from capsule_tasks.client import Event, Execution
from capsule_tasks.protocol.events import AttemptClaimed, AttemptEnded, Ended, Outcome
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.workers import Worker, unique
from tests.severing_proxy import SeveringProxy

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
SEED = os.environ.get("CAPSULE_CHAOS_SEED", "1")
EXECUTIONS = int(5000 * SCALE)
WORKERS = 2
FAULTS = max(4, int(12 * SCALE))
EACH = max(2, int(8 * SCALE))
"""How often each fault happens, where there are several."""
HANG_S = 60 + 240 * SCALE
NOWHERE_S = 12
"""Longer than what a dead worker held needs to come back."""
FAST = {"TEST_LEASE": "0.5", "TEST_VISIBILITY": "3", "TEST_QUIET": "600"}
LINES = 6
KINDS = ("count", "say_late", "say_early")


@contextlib.contextmanager
def fleet(url: str, directory: Path, **environment: str) -> Iterator[list[Worker]]:
    """Workers on one queue; those that die stay in the list."""
    first = Worker(url, directory, **FAST, **environment)
    more = [
        Worker(url, directory, queue=first.queue, **FAST, **environment) for _ in range(WORKERS - 1)
    ]
    try:
        for worker in (first, *more):
            worker.__enter__()
        yield [first, *more]
    finally:
        for worker in (first, *more):
            worker.kill()
            worker.app.close()


@pytest.mark.chaos
async def test_each_execution_ends_once_while_workers_die_and_stand_still(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    key = unique()
    faults = [chance.choice(["kill", "stop"]) for _ in range(FAULTS)]
    with PrivateServer(tmp_path / "redis") as server, fleet(server.url, tmp_path) as workers:
        executions = [
            Execution.of(workers[0].send("count", key, number)) for number in range(EXECUTIONS)
        ]
        watching = [asyncio.create_task(seen(execution)) for execution in executions]
        for how in faults:
            await asyncio.sleep(chance.uniform(0.2, 0.6))
            await asyncio.to_thread(harm, workers[chance.randrange(WORKERS)], how)
        lost = await all_over(executions, watching, workers, server.url)
        judge_lost(lost, workers, faults.count("kill"))
        kept = [one for one in executions if one not in lost]
        streams = [task.result() for task in watching if not task.cancelled()]
        again = await asyncio.gather(*map(seen, kept))
    for first, second in zip(streams, again, strict=True):
        ended_once(first, second)


@pytest.mark.chaos
async def test_each_execution_ends_once_while_their_redis_restarts_and_links_are_cut(
    tmp_path: Path,
) -> None:
    """Together with workers that die and stand still; watchers go through the same cuts.

    The broker is another Redis: what kombu loses with its own is not about this.
    """
    chance = random.Random(SEED)
    key = unique()
    faults = ["kill", "stop", "restart", "crash"] * EACH
    chance.shuffle(faults)
    # Synced once a second, a server that is killed while a sync takes long loses what it answered.
    synced = {"appendfsync": "always"}
    server = PrivateServer(tmp_path / "streams", port=free_port(), aof=True, options=synced)
    server.start()
    port = server.port
    with (
        contextlib.closing(redis.Redis(port=port)) as direct,
        contextlib.ExitStack() as stack,
        PrivateServer(tmp_path / "broker") as broker,
        SeveringProxy(port) as proxy,
        fleet(broker.url, tmp_path, TEST_STREAMS_URL=proxy.url) as workers,
    ):
        stack.callback(server.stop)
        workers[0].app.conf.capsule_redis_url = proxy.url
        sent = [send(workers[0], key, number) for number in range(EXECUTIONS)]
        watching = [asyncio.create_task(seen(execution)) for _, execution in sent]
        async with severing(proxy, chance):
            for how in faults:
                await asyncio.sleep(chance.uniform(0.2, 0.6))
                if how in ("kill", "stop"):
                    await asyncio.to_thread(harm, workers[chance.randrange(WORKERS)], how)
                else:
                    await asyncio.to_thread(restart, server, how)
        executions = [execution for _, execution in sent]
        lost = await all_over(executions, watching, workers, server.url)
        judge_lost(lost, workers, faults.count("kill"))
        assert sum(proxy.severed.values()) > len(faults), proxy.severed
        sent = [one for one in sent if one[1] not in lost]
        streams = [task.result() for task in watching if not task.cancelled()]
        again = await asyncio.gather(*(seen(execution) for _, execution in sent))
        assert direct.ping()
    for (kind, _), first, second in zip(sent, streams, again, strict=True):
        ended_once(first, second)
        if kind != "count":
            said_in_order(second)


def judge_lost(lost: list[Execution], workers: list[Worker], kills: int) -> None:
    """Kombu loses what it is just taking when it is killed: before anybody has received that."""
    assert len(lost) <= kills, f"{len(lost)} have no end, and {kills} workers were killed"
    received = [one.id for one in lost if any(one.id in worker.log for worker in workers)]
    assert not received, f"they were received, and have no end: {received}"


def send(worker: Worker, key: str, number: int) -> tuple[str, Execution]:
    kind = KINDS[number % len(KINDS)]
    arguments = (key, number) if kind == "count" else (number, LINES)
    return kind, Execution.of(worker.send(kind, *arguments))


@contextlib.asynccontextmanager
async def severing(proxy: SeveringProxy, chance: random.Random) -> AsyncIterator[None]:
    """Cut all connections again and again meanwhile."""

    async def go_on() -> None:
        while True:
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            proxy.sever(chance)

    cutting = asyncio.create_task(go_on())
    try:
        yield
    finally:
        cutting.cancel()
        await asyncio.wait([cutting])


def ended_once(first: list[Event], second: list[Event]) -> None:
    """Whether a watcher that was there and one that came later saw one end, the same."""
    assert [isinstance(event.message, Ended) for event in first].count(True) == 1
    assert first[-1].is_last
    ids = [event.id for event in first]
    assert len(set(ids)) == len(ids)
    # A worker that died between storing a result and the last event left the end to the result
    # backend; the message came again, and what it said then is there behind what was seen.
    there = [event.id for event in second]
    seen = ids if first[-1].at else ids[:-1]
    assert there[: len(seen)] == seen, "what was seen is what is there"
    assert len(there) == len(seen) or not first[-1].at
    assert [isinstance(event.message, Ended) for event in second].count(True) == 1
    assert first[-1].message.outcome == second[-1].message.outcome


def said_in_order(events: list[Event]) -> None:
    """Each attempt published its lines from the first on, without holes or duplicates.

    A run whose worker lost its lease and took a new one goes on in the next attempt.
    """
    runs: list[str] = []
    goes_on = False
    for event in events:
        message = event.message
        assert not isinstance(message, Gap)
        if isinstance(message, AttemptEnded):
            goes_on = message.outcome == "replaced"
        elif isinstance(message, AttemptClaimed):
            begun = event.attempt
            if not goes_on:
                runs.append("")
            goes_on = False
        elif isinstance(message, Output):
            runs[-1] += message.data
    for run in runs:
        numbers = [line.partition(": ")[2] for line in run.splitlines()]
        assert numbers == [str(number) for number in range(len(numbers))]
    last = events[-1]
    # If its worker was lost behind its result, a reaper wrote the end in an attempt of its own.
    if last.message.outcome == Outcome.SUCCEEDED and runs and last.attempt == begun:
        assert len(numbers) == LINES


async def seen(execution: Execution) -> list[Event]:
    return [event async for event in execution.aevents()]


async def all_over(
    executions: list[Execution],
    watching: list[asyncio.Task[list[Event]]],
    workers: list[Worker],
    streams_url: str,
) -> list[Execution]:
    """Wait for every end; return those whose message is gone and that left no trace."""
    client, queue = workers[0].app.backend.client, workers[0].queue
    began = nowhere_since = time.monotonic()
    with redis.Redis.from_url(streams_url) as streams:
        while True:
            await asyncio.wait(watching, timeout=0.5)
            open_ = [e for e, task in zip(executions, watching, strict=True) if not task.done()]
            now = time.monotonic()
            known = any(streams.exists(f"capsule:{{E:{one.id}}}:meta") for one in open_)
            if client.llen(queue) or client.hlen("unacked") or known:
                nowhere_since = now
            if not open_ or now - nowhere_since > NOWHERE_S:
                break
            if now - began > HANG_S:
                raise AssertionError(await standing(open_, workers, streams))
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
    return open_


async def standing(open_: list[Execution], workers: list[Worker], streams: redis.Redis) -> str:
    """Describe the executions that did not end."""
    client = workers[0].app.backend.client
    length = client.llen(workers[0].queue)
    unacked = client.hlen("unacked")
    states = [await execution.asnapshot() for execution in open_[:5]]
    meta = [streams.hgetall(f"capsule:{{E:{e.id}}}:meta") for e in open_[:3]]
    return f"{len(open_)} are open; queue {length}, unacked {unacked}; {states}; {meta}"


def harm(worker: Worker, how: str) -> None:
    """A worker is killed and replaced, or stands still for longer than its lease."""
    if how == "kill":
        worker.kill()
        worker.__enter__()
        return
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(1.5)  # the fault itself: others take over meanwhile
    os.kill(worker.pid, signal.SIGCONT)


def restart(server: PrivateServer, how: str) -> None:
    """A server is asked to leave, or killed, and comes back with what its log has."""
    if how == "crash":
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
    else:
        server.stop()
    server.start()
