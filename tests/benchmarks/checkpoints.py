"""How fast namespaces are saved, stored and restored, beside plain pickles and plain SETs and GETs.

    scripts/bench checkpoints [--json]

The peer of a save and a restore is `pickle.dumps` and `pickle.loads` of the same value in the same
child, which move nothing anywhere. The peer of the store writes and reads the same chunks, one
after the other, without a hash, a manifest or an owner.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis

from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions import Session
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage import AsyncConnections, Lease
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.testing import PrivateServer
from tests.benchmarks._measure import Bar, p50_ms, p99_ms, report, timed, use_plain_interpreters

BARS = (
    Bar("save_100MB_over_pickle", "<=", 6),
    Bar("restore_100MB_over_unpickle", "<=", 6),
    Bar("write_100MB_over_set", "<=", 5),
    Bar("read_100MB_over_get", "<=", 5),
    Bar("child_growth_MB_per_100MB_saved", "<=", 20),
    Bar("loop_blocked_p99_ms", "<=", 20),
)
ROUNDS = 5
SOURCES = {
    "10MB": "import numpy\nx = numpy.arange(1_250_000.)",
    "100MB": "import numpy\nx = numpy.arange(12_500_000.)",
    "objects": "x = [{'k': i, 't': str(i), 'f': i * 1.5} for i in range(300_000)]",
}
PLAIN = """
import pickle, time
begun = time.perf_counter(); data = pickle.dumps(x, 5); dumped = time.perf_counter()
pickle.loads(data); loaded = time.perf_counter()
del data
(dumped - begun, loaded - dumped)
"""
PEAK = "import resource\nresource.getrusage(resource.RUSAGE_SELF).ru_maxrss"

Figures = dict[str, float]


class LoopWatch:
    """The times for which the event loop did nothing else."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            self.seconds.append(time.perf_counter() - begun - 0.001)

    def stop(self) -> None:
        self._task.cancel()


async def measure() -> Figures:
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        for name, source in SOURCES.items():
            saved = await _session(name, source, figures)
            if name != "objects":
                await _store(name, saved, server.url, figures)
    return figures


async def _session(name: str, source: str, figures: Figures) -> SavedNamespace:
    saves: list[float] = []
    restores: list[float] = []
    async with Session() as session, Session() as other:
        await session.run(source)
        peak = (await session.run(PEAK)).value
        watch = LoopWatch()
        for _ in range(ROUNDS):
            with timed(saves):
                saved = await session.checkpoint(timeout_s=None)
        growth = (await session.run(PEAK)).value - peak
        await other.run("import numpy")
        for _ in range(ROUNDS):
            with timed(restores):
                await other.restore(saved, "replace", timeout_s=None)
        watch.stop()
        plain = [(await session.run(PLAIN)).value for _ in range(ROUNDS)]
    figures[f"save_{name}_ms"] = p50_ms(saves)
    figures[f"save_{name}_MB_s"] = saved.size / 1e6 / median(saves)
    figures[f"restore_{name}_ms"] = p50_ms(restores)
    figures[f"save_{name}_over_pickle"] = median(saves) / median(dump for dump, _ in plain)
    figures[f"restore_{name}_over_unpickle"] = median(restores) / median(load for _, load in plain)
    if name == "100MB":
        figures["child_growth_MB_per_100MB_saved"] = growth / 1024
        figures["loop_blocked_p99_ms"] = p99_ms(watch.seconds)
    return saved


async def _store(name: str, saved: SavedNamespace, url: str, figures: Figures) -> None:
    times: dict[str, list[float]] = {what: [] for what in ("write", "read", "set", "get")}
    connections = AsyncConnections(url)
    lease: Any = Lease(name, connections, settings=LeaseSettings(lease_s=600))
    await lease.acquire()
    taken = await NamedSessionStore(connections).take(name, name, profile="sandbox")
    store = CheckpointStore(connections)
    async with Redis.from_url(url) as client:
        for _ in range(ROUNDS):
            with timed(times["write"]):
                manifest = await store.write(name, taken.token, saved)
            with timed(times["read"]):
                await store.read(name, manifest)
            with timed(times["set"]):
                for number, piece in enumerate(saved.pieces):
                    await client.set(f"piece:{number}", piece)
            with timed(times["get"]):
                for number in range(len(saved.pieces)):
                    await client.get(f"piece:{number}")
    await connections.close()
    for what, seconds in times.items():
        figures[f"{what}_{name}_ms"] = p50_ms(seconds)
    figures[f"write_{name}_over_set"] = median(times["write"]) / median(times["set"])
    figures[f"read_{name}_over_get"] = median(times["read"]) / median(times["get"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench checkpoints")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    report(asyncio.run(measure()), BARS, as_json=as_json)


if __name__ == "__main__":
    main()
