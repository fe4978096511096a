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
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from agents import Agent, Model, Runner, function_tool, set_tracing_disabled
from agents.extensions.memory import RedisSession
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
)
from redis.asyncio import Redis

from capsule_tasks.durable import RunDriver, TurnEnd, TurnWork
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import Bar, cpu_s, percentile, report, use_plain_interpreters

BARS = (
    Bar("sdk_turns_over_peer", ">=", 0.45),
    Bar("sdk_added_ms_per_turn", "<=", 4),
)
_ROUNDS = {5: 60, 10: 60, 20: 30, 80: 8}
"""Rounds, each of one run of both sides, by the turns of a run."""
_BAR_TURNS = 10
_OUTPUT_BYTES = 1024
_LEASE = "bench"

Figures = dict[str, float]
Run = Callable[[str, int], Awaitable[object]]


# --- the agent -----------------------------------------------------------------------------------


class CallingModel(Model):
    """Calls the tool until its input has as many outputs as the run's first message asks for."""

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the runs are streamed")

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items = kwargs["input"] if "input" in kwargs else args[1]
        made = sum(item.get("type") == "function_call_output" for item in items)
        output = _answer(made) if made >= int(items[0]["content"]) else _call(made)
        response = Response(
            id=f"resp_{made}",
            created_at=0,
            model="scripted",
            object="response",
            output=[output],
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCreatedEvent(response=response, sequence_number=0, type="response.created")
        yield ResponseOutputItemDoneEvent(
            item=output, output_index=0, sequence_number=1, type="response.output_item.done"
        )
        yield ResponseCompletedEvent(
            response=response, sequence_number=2, type="response.completed"
        )


def _call(number: int) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id=f"fc_{number}",
        call_id=f"call_{number}",
        name="look_up",
        arguments=json.dumps({"order": number}),
        type="function_call",
    )


def _answer(number: int) -> ResponseOutputMessage:
    text = ResponseOutputText(text=f"{number} orders", type="output_text", annotations=[])
    return ResponseOutputMessage(
        id="msg_1", content=[text], role="assistant", status="completed", type="message"
    )


def _agent() -> Agent[Any]:
    @function_tool
    async def look_up(order: int) -> str:
        """Look an order up."""
        return f"{order:04}".ljust(_OUTPUT_BYTES, "x")

    return Agent(name="support", model=CallingModel(), tools=[look_up])


class MeasuredEngine(OpenAIEngine):
    """The engine, which notes how large the snapshots are."""

    def __init__(self, agent: Agent[Any]) -> None:
        super().__init__(agent, max_turns=None)
        self.snapshot_bytes: dict[int, int] = {}

    async def turn(self, work: TurnWork) -> TurnEnd:
        end = await super().turn(work)
        self.snapshot_bytes[work.claim.turn + 1] = len(end.snapshot)
        return end


# --- both sides ----------------------------------------------------------------------------------


def _durable_run(store: RunStore, engine: OpenAIEngine) -> Run:
    driver = RunDriver(store, _LEASE)

    async def run(name: str, turns: int) -> None:
        snapshot, schema, agent = engine.first(str(turns))
        await store.create(name, name, snapshot, schema=schema, agent=agent)
        stop = await driver.drive(name, engine, publish=lambda _: None)
        assert stop.result == f'"{turns} orders"'.encode(), stop

    return run


def _sdk_run(client: Redis) -> Run:
    agent = _agent()

    async def run(name: str, turns: int) -> None:
        session = RedisSession(name, redis_client=client)
        result = Runner.run_streamed(agent, str(turns), session=session, max_turns=None)
        async for _ in result.stream_events():
            pass
        assert result.final_output == f"{turns} orders", result.final_output

    return run


# --- what is measured ----------------------------------------------------------------------------


async def measure(url: str) -> Figures:
    set_tracing_disabled(True)
    client = Redis.from_url(url)
    engine = MeasuredEngine(_agent())
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
    """As the server counts them. Every call of ours is a script."""
    before = await client.info("commandstats")
    await run(f"counted-{turns}", turns)
    after = await client.info("commandstats")
    return int(after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    with TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        figures = asyncio.run(measure(server.url))
    report(figures, BARS, as_json=as_json)


if __name__ == "__main__":
    main()
