"""Runs of both doors, beside openai-agents with its own RedisSession.

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

Figures without `sdk_` are of our own engine (door 2), with the same agent and an instant model:

- *turns_over_peer*: turns per second of `Runner.run_streamed` with a `History`, over theirs; the
  lower of runs of 10 tool turns (`_with_tool`), and of 11 runs of one turn in one session
  (`_without_tool`). *durable_turns_over_peer* is that of the driver, with the tool.
- *store_calls_per_turn*, *store_calls_per_tool_turn*: scripts called in a turn that hands the run
  over to another agent, or that calls the tool; the larger of `Runner.run` and the driver.
- *commit_bytes_turn500_over_turn1*: bytes that the client sends to commit these turns of a durable
  run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.extensions.memory import RedisSession
from redis.asyncio import Redis

import capsule_tasks as own
from capsule_tasks import Capsule, History
from capsule_tasks.durable import Engine, RunDriver, TurnEnd, TurnWork
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.storage import AsyncConnections, RunStore
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
from tests.benchmarks.app import own_agents
from tests.benchmarks.app.scripted_agents import agent

BARS = (
    Bar("turns_over_peer", ">=", 3),
    Bar("store_calls_per_turn", "<=", 1),
    Bar("store_calls_per_tool_turn", "<=", 3),
    Bar("commit_bytes_turn500_over_turn1", "<=", 1.2),
    Bar("sdk_turns_over_peer", ">=", 0.45),
    Bar("sdk_added_ms_per_turn", "<=", 4),
)
_ROUNDS = {5: 40, 10: 60, 20: 20, 80: 5}
"""Rounds, each of one run of both sides, by the turns of a run."""
_BAR_TURNS = 10
_LEASE = "bench"
_OWN_LEASE = "bench-own"
_OWN_ROUNDS = 40
_LAST_TURN = 500
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


class CommittedEngine(AgentEngine):
    """Our own engine, which notes how many bytes the server gets between two turns: the commit."""

    def __init__(self, measured: own.Agent, client: Redis) -> None:
        super().__init__(measured, max_turns=None)
        self._client = client
        self._before: tuple[int, int] | None = None
        self.commit_bytes = defaultdict[int, list[int]](list)

    async def turn(self, work: TurnWork) -> TurnEnd:
        begun = await self._received()
        if self._before is not None:
            turn, before = self._before
            self.commit_bytes[turn].append(begun - before)
        end = await super().turn(work)
        turn = work.claim.turn + 1
        self._before = (turn, await self._received()) if turn in (1, _LAST_TURN) else None
        return end

    async def bytes_of_asking(self) -> int:
        """How many of the bytes between two turns come from asking for their number."""
        return -(await self._received() - await self._received())

    async def _received(self) -> int:
        return int((await self._client.info("stats"))["total_net_input_bytes"])


def _durable_run(store: RunStore, engine: Engine, lease: str = _LEASE) -> Run:
    driver = RunDriver(store, lease)

    async def run(name: str, turns: int) -> None:
        snapshot, schema, of_agent = engine.first(str(turns))
        await store.create(name, name, snapshot, schema=schema, agent=of_agent)
        stop = await driver.drive(name, engine, publish=lambda _: None)
        assert stop.result == f'"{turns} orders"'.encode(), stop

    return run


def _own_run(connections: AsyncConnections, support: own.Agent) -> Run:
    async def run(name: str, turns: int) -> None:
        history = History(name, connections)
        stream = own.Runner.run_streamed(support, str(turns), session=history, max_turns=turns + 1)
        async for _ in stream.events():
            pass
        assert stream.final_output == f"{turns} orders", stream.final_output

    return run


def _chat(run: Run) -> Run:
    """So many runs and one more in one session, each of one turn without a tool."""

    async def chat(name: str, turns: int) -> None:
        for _ in range(turns + 1):
            await run(name, 0)

    return chat


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
    turns = asyncio.run(_turns(url)) | asyncio.run(_own_turns(url))
    return turns | _resume(url) | _in_flight(url)


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
            ending = "" if turns == _BAR_TURNS else f"_{turns}_turns"
            for name, value in (await _side_by_side(ours, theirs, turns, rounds, server)).items():
                figures[f"sdk_{name}{ending}"] = value
            figures[f"peer_ms_per_turn{ending}"] = figures.pop(f"sdk_peer_ms_per_turn{ending}")
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


async def _side_by_side(
    ours: Run, theirs: Run, turns: int, rounds: int, server: int, prefix: str = "sdk"
) -> Figures:
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
            await run(f"{prefix}-{name}-{turns}-{number}", turns)
            if number >= 0:  # the first rounds fill caches
                taken.wall_s.append(time.perf_counter() - begun)
                taken.cpu_s.append(time.process_time() + cpu_s([server]) - cpu)
        sides.reverse()
    made = turns + 1
    return {
        "turns_over_peer": _median_ratio(other.wall_s, mine.wall_s),
        "turns_over_peer_cpu": _median_ratio(other.cpu_s, mine.cpu_s),
        "added_ms_per_turn": (_fast_ms(mine.wall_s) - _fast_ms(other.wall_s)) / made,
        "added_cpu_ms_per_turn": (_fast_ms(mine.cpu_s) - _fast_ms(other.cpu_s)) / made,
        "ms_per_turn": _fast_ms(mine.wall_s) / made,
        "peer_ms_per_turn": _fast_ms(other.wall_s) / made,
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
    for _ in range(3):
        before = await client.info("commandstats")
        await run(f"counted-{secrets.token_hex(4)}", turns)
        after = await client.info("commandstats")
        counts.append(after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"])
    return min(counts)


# --- our own engine ------------------------------------------------------------------------------


async def _own_turns(url: str) -> Figures:
    set_tracing_disabled(True)
    connections, client = AsyncConnections(url), Redis.from_url(url)
    async with RunStore(connections) as store, store.lease(_OWN_LEASE).keep():
        support = own_agents.agent()
        theirs, ours = _sdk_run(client), _own_run(connections, support)
        durable = _durable_run(store, AgentEngine(support, max_turns=None), _OWN_LEASE)
        server = (await client.info("server"))["process_id"]
        gc.collect()
        gc.freeze()
        figures: Figures = {}
        for name, one, other in (
            ("with_tool", ours, theirs),
            ("without_tool", _chat(ours), _chat(theirs)),
            ("durable", durable, theirs),
        ):
            about = (_BAR_TURNS, _OWN_ROUNDS, server, f"own-{name}")
            found = await _side_by_side(one, other, *about)
            for figure in ("turns_over_peer", "turns_over_peer_cpu", "ms_per_turn"):
                figures[f"{figure}_{name}"] = found[figure]
        figures["durable_turns_over_peer"] = figures.pop("turns_over_peer_durable")
        both = ("turns_over_peer_with_tool", "turns_over_peer_without_tool")
        figures["turns_over_peer"] = min(figures[each] for each in both)
        for name, what in (("turn", own_agents.relay()), ("tool_turn", support)):
            engine = AgentEngine(what, max_turns=None)
            runs = {
                "": _own_run(connections, what),
                "durable_": _durable_run(store, engine, _OWN_LEASE),
            }
            calls = {kind: await _calls_per_turn(client, run) for kind, run in runs.items()}
            figures[f"store_calls_per_{name}"] = max(calls.values())
        figures |= await _commit_bytes(store, client)
    await client.aclose()
    await connections.close()
    return figures


async def _commit_bytes(store: RunStore, client: Redis) -> Figures:
    """The least of several runs: the lease is renewed between some turns, too."""
    engine = CommittedEngine(own_agents.agent(), client)
    run = _durable_run(store, engine, _OWN_LEASE)
    for number in range(3):
        await run(f"committed-{number}", _LAST_TURN)
    first, last = (min(engine.commit_bytes[turn]) for turn in (1, _LAST_TURN))
    asked = await engine.bytes_of_asking()
    return {
        "commit_bytes_turn1": first - asked,
        "commit_bytes_turn500": last - asked,
        "commit_bytes_turn500_over_turn1": (last - asked) / (first - asked),
    }


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
