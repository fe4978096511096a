"""Durable runs of an openai-agents agent, beside the same agent with the SDK's own RedisSession.

    scripts/bench runs [--json]

The agent is scripted: in each of N turns it calls one tool, whose output has 1 KB, and then it
answers, which is a turn, too. The SDK's side is `Runner.run_streamed` with `RedisSession`, which
keeps the items of a session and nothing else: a run that is killed is lost. Ours is `RunDriver`,
from `create` to the stored result, its events made for somebody who watches. Both use one server,
and take turns.

- *sdk_turns_over_peer*: turns per second, ours over theirs, of runs with 10 turns; also with 5, 20
  and 80. Also as CPU seconds of this process and the server, which other programs disturb less.
- *sdk_added_ms_per_turn*: milliseconds that a turn takes longer than theirs.
- *snapshot_bytes*: what is stored of the SDK's state after so many turns.
- *sdk_store_calls_per_turn*: calls of the store that the driver makes in a turn.
- *resume_ms*: through a worker, from the approval of a call to the result of the run.
- *runs_in_flight_per_GB*: by what a worker's processes hold for runs that wait for their models.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.extensions.memory import RedisSession
from redis.asyncio import Redis

from capsule_tasks import Capsule
from capsule_tasks.durable import RunDriver, TurnEnd, TurnWork
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import (
    Bar,
    cpu_s,
    p50_ms,
    p99_ms,
    percentile,
    report,
    timed,
    use_plain_interpreters,
)
from tests.benchmarks._worker import WAIT_S, Kind, producer, tree, worker
from tests.benchmarks.app.scripted_agents import agent

BARS = (
    Bar("sdk_turns_over_peer", ">=", 0.45),
    Bar("sdk_added_ms_per_turn", "<=", 4),
)
_ROUNDS = {5: 60, 10: 60, 20: 30, 80: 8}
"""Rounds, each of one run of both sides, by the turns of a run."""
_BAR_TURNS = 10
_LEASE = "bench"
_RESUMED = 60
_IN_FLIGHT = (50, 300)

Figures = dict[str, float]
Run = Callable[[str, int], Awaitable[object]]


# --- both sides ----------------------------------------------------------------------------------


class MeasuredEngine(OpenAIEngine):
    """The engine, which notes how large the snapshots are."""

    def __init__(self, measured: Agent[Any]) -> None:
        super().__init__(measured, max_turns=None)
        self.snapshot_bytes: dict[int, int] = {}

    async def turn(self, work: TurnWork) -> TurnEnd:
        end = await super().turn(work)
        self.snapshot_bytes[work.claim.turn + 1] = len(end.snapshot)
        return end


def _durable_run(store: RunStore, engine: OpenAIEngine) -> Run:
    driver = RunDriver(store, _LEASE)

    async def run(name: str, turns: int) -> None:
        snapshot, schema, of_agent = engine.first(str(turns))
        await store.create(name, name, snapshot, schema=schema, agent=of_agent)
        stop = await driver.drive(name, engine, publish=lambda _: None)
        assert stop.result == f'"{turns} orders"'.encode(), stop

    return run


def _sdk_run(client: Redis) -> Run:
    support = agent()

    async def run(name: str, turns: int) -> None:
        session = RedisSession(name, redis_client=client)
        result = Runner.run_streamed(support, str(turns), session=session, max_turns=None)
        async for _ in result.stream_events():
            pass
        assert result.final_output == f"{turns} orders", result.final_output

    return run


def measure(url: str) -> Figures:
    return asyncio.run(_turns(url)) | _resume(url) | _in_flight(url)


# --- turns, beside the SDK alone -----------------------------------------------------------------


async def _turns(url: str) -> Figures:
    set_tracing_disabled(True)
    client = Redis.from_url(url)
    engine = MeasuredEngine(agent())
    async with RunStore(url) as store, store.lease(_LEASE).keep():
        ours, theirs = _durable_run(store, engine), _sdk_run(client)
        server = (await client.info("server"))["process_id"]
        gc.collect()
        gc.freeze()  # the SDK imports so much that a collection takes as long as a run
        figures: Figures = {}
        for turns, rounds in _ROUNDS.items():
            figures |= await _side_by_side(ours, theirs, turns, rounds, server)
        for turns in (1, *_ROUNDS):
            figures[f"snapshot_bytes_at_turn_{turns}"] = engine.snapshot_bytes[turns]
        figures["sdk_store_calls_per_turn"] = await _calls_per_turn(client, ours)
    await engine.aclose()
    await client.aclose()
    return figures


@dataclass
class Taken:
    """What the runs of one side took."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


async def _side_by_side(ours: Run, theirs: Run, turns: int, rounds: int, server: int) -> Figures:
    """Ratios are medians over rounds: the sides of a round are neighbours, which met the same
    machine, and each is as often before the other as behind it. Milliseconds are those of the
    fastest tenth of the runs, which nothing else interrupted.
    """
    mine, other = Taken(), Taken()
    sides = [(ours, mine, "ours"), (theirs, other, "theirs")]
    for number in range(-2, rounds):
        for run, taken, name in sides:
            gc.collect()
            cpu = time.process_time() + cpu_s([server])
            begun = time.perf_counter()
            await run(f"{name}-{turns}-{number}", turns)
            if number >= 0:  # the first rounds fill caches
                taken.wall_s.append(time.perf_counter() - begun)
                taken.cpu_s.append(time.process_time() + cpu_s([server]) - cpu)
        sides.reverse()
    made = turns + 1
    figures = {
        "turns_over_peer": _median_ratio(other.wall_s, mine.wall_s),
        "turns_over_peer_cpu": _median_ratio(other.cpu_s, mine.cpu_s),
        "added_ms_per_turn": (_fast_ms(mine.wall_s) - _fast_ms(other.wall_s)) / made,
        "added_cpu_ms_per_turn": (_fast_ms(mine.cpu_s) - _fast_ms(other.cpu_s)) / made,
        "ms_per_turn": _fast_ms(mine.wall_s) / made,
    }
    ending = "" if turns == _BAR_TURNS else f"_{turns}_turns"
    return {
        **{f"sdk_{name}{ending}": value for name, value in figures.items()},
        f"peer_ms_per_turn{ending}": _fast_ms(other.wall_s) / made,
    }


def _median_ratio(others: list[float], mine: list[float]) -> float:
    return median(other / own for other, own in zip(others, mine, strict=True))


def _fast_ms(seconds: list[float]) -> float:
    return percentile(seconds, 0.1) * 1000


async def _calls_per_turn(client: Redis, run: Run) -> float:
    """Scripts called in a turn: what a run of 20 turns calls more than one of 10."""
    few, many = [await _calls_of(client, run, turns) for turns in (10, 20)]
    return (many - few) / 10


async def _calls_of(client: Redis, run: Run, turns: int) -> int:
    """As the server counts them: every call of ours is a script. Some runs see the lease renewed;
    the least of several does not.
    """
    counts: list[int] = []
    for number in range(3):
        before = await client.info("commandstats")
        await run(f"counted-{turns}-{number}", turns)
        after = await client.info("commandstats")
        counts.append(after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"])
    return min(counts)


# --- through a worker ----------------------------------------------------------------------------


def _resume(url: str) -> Figures:
    """From `approve` to the result: a message, a claim, the state, the call, and a last turn."""
    resumed: list[float] = []
    with worker(url, Kind(app="runs_app"), concurrency=1):
        app = producer(url)
        runs = Capsule(app).runs
        for _ in range(_RESUMED):
            run = runs.start("approved", "1")
            while run.state().status != "interrupted":
                time.sleep(0.01)
            with timed(resumed):
                run.approve("call_0")
                assert run.result(WAIT_S) == "1 orders"
        app.close()
    return {"resume_ms": p50_ms(resumed), "resume_p99_ms": p99_ms(resumed)}


def _in_flight(url: str) -> Figures:
    """Memory of a worker's processes for each run that waits for its model after ten turns."""
    few, many = _IN_FLIGHT
    with worker(url, Kind(app="runs_app"), concurrency=1) as pid:
        app = producer(url)
        runs = Capsule(app).runs
        before, used = 0, list[int]()
        for count in _IN_FLIGHT:
            for _ in range(count - before):
                runs.start("waiting", str(_BAR_TURNS))
            _until_waiting(app.backend.client, count)
            used.append(sum(process.memory_full_info().pss for process in tree(pid)))
            before = count
        app.close()
        for process in tree(pid):  # stopped warmly, it would wait for the runs
            process.kill()
    pss = (used[1] - used[0]) / (many - few)
    return {"run_in_flight_pss_kib": pss / 1024, "runs_in_flight_per_GB": 1e9 / pss}


def _until_waiting(client: Any, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while int(client.get("waiting") or 0) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{client.get('waiting')} of {count} runs wait after {WAIT_S} s")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    with TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        figures = measure(server.url)
    report(figures, BARS, as_json=as_json)


if __name__ == "__main__":
    main()
