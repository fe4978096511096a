"""Celery tasks through this pool, beside Celery's own prefork and threads, on the same Redis.

Every figure is the median over rounds in which the workers take turns, and every ratio the median
of the rounds' ratios, so that a machine that slows down slows all of them. Our pool is measured
with streams, and without (`streams_off`); messages are acknowledged late, or `early`.

- *drain*: 3,000 tasks that wait in the queue when the worker starts; tasks per second.
- *cpu*: CPU time per task in the drain, of the worker's main process, its children and Redis.
- *latency*: `.delay().get()`, one after another.
- *steady*: tasks per second while one producer keeps 50 of them on their way.
- *memory*: PSS of the worker's whole tree with 8 children that have all worked.
- *async*: 1,000 tasks that await one second, from the first `delay` to the last result.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery

from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import Bar, p50_ms, p99_ms, report, timed, use_plain_interpreters
from tests.benchmarks._worker import (
    CAPSULE,
    PREFORK,
    WAIT_S,
    Backlog,
    Kind,
    producer,
    tree,
    worker,
)

LATE = {
    "capsule": CAPSULE,
    "streams_off": Kind(streams=False),
    "prefork": PREFORK,
}
EARLY = {
    "capsule_early": Kind(acks_late=False),
    "streams_off_early": Kind(streams=False, acks_late=False),
    "prefork_early": Kind("prefork", acks_late=False),
}
THREADS = {"threads": Kind("threads")}
BARS = (
    Bar("drain_over_prefork", ">=", 1.0),
    Bar("steady_streams_off_over_prefork", ">=", 1.0),
    Bar("latency_p50_over_prefork", "<=", 1.0),
    Bar("memory_pss_over_prefork", "<=", 1.15),
    Bar("async_1000_sleeps_s", "<=", 4.0),
)
ROUNDS = 7
_TURNS_S = 250.0
"""So that all of it takes less than 5 minutes, a slow machine does fewer rounds than asked for."""
_ROUNDS_OF_THREADS = 3
"""Nothing is compared with these."""
DRAINED = 3_000
_CALLS = 150
_STEADY = 1_500
_IN_FLIGHT = 50
_SLEEPS = 1_000


@dataclass
class Runs:
    """The figures of one kind of worker, in the order of the rounds."""

    drain: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    latency_p50_s: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)

    def add(self, url: str, kind: Kind, backlog: Backlog, *, calls: bool = True) -> None:
        """One run of a worker; with `calls`, latency and steady too."""
        backlog.restore()
        with worker(url, kind) as pid:
            rate, cpu_us = backlog.drain(pid)
            self.drain.append(rate)
            self.cpu_us.append(cpu_us)
            if not calls:
                return
            app = producer(url)
            took = latencies_s(app)
            self.latency_s += took
            self.latency_p50_s.append(median(took))
            self.steady.append(steady_rate(app))
            app.close()

    def figures(self, name: str) -> dict[str, float]:
        found = {
            f"drain_{name}_per_s": median(self.drain),
            f"cpu_{name}_us_per_task": median(self.cpu_us),
        }
        if self.steady:
            found[f"steady_{name}_per_s"] = median(self.steady)
            found[f"latency_{name}_p50_ms"] = p50_ms(self.latency_s)
            found[f"latency_{name}_p99_ms"] = p99_ms(self.latency_s)
        return found

    def over(self, peer: Runs) -> dict[str, float]:
        """Each figure as a ratio to that of a peer in the same round."""
        pairs = {
            "drain": (self.drain, peer.drain),
            "cpu_per_task": (self.cpu_us, peer.cpu_us),
            "steady": (self.steady, peer.steady),
            "latency_p50": (self.latency_p50_s, peer.latency_p50_s),
        }
        return {name: ratio(mine, theirs) for name, (mine, theirs) in pairs.items() if mine}


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median(one / other for one, other in zip(mine, theirs, strict=True))


def latencies_s(app: Celery) -> list[float]:
    took: list[float] = []
    for number in range(_CALLS):
        with timed(took):
            app.send_task("add", (number, 1)).get(timeout=WAIT_S)
    return took


def steady_rate(app: Celery) -> float:
    begun = time.perf_counter()
    waiting: list[Any] = []
    for number in range(_STEADY):
        if len(waiting) == _IN_FLIGHT:
            waiting.pop(0).get(timeout=WAIT_S)
        waiting.append(app.send_task("add", (number, 1)))
    for result in waiting:
        result.get(timeout=WAIT_S)
    return _STEADY / (time.perf_counter() - begun)


def memory_pss(url: str, kind: Kind) -> float:
    app = producer(url)
    app.backend.client.flushall()
    with worker(url, kind, concurrency=8) as pid:
        results = [app.send_task("add", (number, 1)) for number in range(800)]
        for result in results:
            result.get(timeout=WAIT_S)
        total = sum(process.memory_full_info().pss for process in tree(pid))
    app.close()
    return float(total)


def sleeps(url: str) -> float:
    app = producer(url)
    app.backend.client.flushall()
    with worker(url):
        app.send_task("nap", (0.0,)).get(timeout=WAIT_S)
        begun = time.perf_counter()
        results = [app.send_task("nap", (1.0,)) for _ in range(_SLEEPS)]
        for result in results:
            result.get(timeout=WAIT_S)
        took = time.perf_counter() - begun
    app.close()
    return took


def take_turns(
    url: str, kinds: Mapping[str, Kind], rounds: int, limit_s: float = math.inf
) -> dict[str, Runs]:
    """Run each kind in each round; every other round in reverse, so that drift cancels out."""
    app = producer(url)
    backlog = Backlog(app, DRAINED)
    runs = {name: Runs() for name in kinds}
    order = list(kinds)
    begun = time.monotonic()
    for done in range(rounds):
        took_s = time.monotonic() - begun
        if done and took_s + took_s / done > limit_s:
            break
        for name in order:
            runs[name].add(url, kinds[name], backlog, calls=kinds[name].acks_late)
        order.reverse()
    app.close()
    return runs


def measure(url: str, rounds: int) -> dict[str, float]:
    runs = take_turns(url, LATE | EARLY, rounds, _TURNS_S)
    figures = {"rounds": float(len(runs["capsule"].drain))}
    runs |= take_turns(url, THREADS, min(rounds, _ROUNDS_OF_THREADS))
    for name, found in runs.items():
        figures |= found.figures(name)
    figures["memory_capsule_pss_mib"] = memory_pss(url, CAPSULE) / 2**20
    figures["memory_prefork_pss_mib"] = memory_pss(url, PREFORK) / 2**20
    figures["async_1000_sleeps_s"] = sleeps(url)
    figures["async_sleep_tasks_per_s"] = _SLEEPS / figures["async_1000_sleeps_s"]
    for name, peer, label in (
        ("capsule", "prefork", ""),
        ("streams_off", "prefork", "_streams_off"),
        ("capsule_early", "prefork_early", "_early"),
        ("streams_off_early", "prefork_early", "_streams_off_early"),
    ):
        for figure, value in runs[name].over(runs[peer]).items():
            figures[f"{figure}{label}_over_prefork"] = value
    figures["memory_pss_over_prefork"] = (
        figures["memory_capsule_pss_mib"] / figures["memory_prefork_pss_mib"]
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench tasks")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often they take turns")
    arguments = parser.parse_args()
    use_plain_interpreters()
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        figures = measure(server.url, arguments.rounds)
    report(figures, BARS, as_json=arguments.json)


if __name__ == "__main__":
    main()
