"""Realtime sessions beside those of openai-agents, over a local server of OpenAI's protocol.

    scripts/bench realtime [--json]

Both sides are sessions with their own WebSocket models, with default settings and without tracing,
in this process; the server is a process of its own. A conversation has 30 turns: the user writes,
in every third turn the model calls a trivial tool first, and the model speaks for ten seconds: 50
pieces of audio of 200 ms, 50 pieces of transcript, and what a server tells of items and responses.
Someone iterates over all events of the session. The sides take turns, each as often before the
other as behind it.

- *events_per_core_over_peer*: events of the server that a session passes on in a second of CPU
  time of this process, ours over theirs: the median over rounds. *us_per_event* and
  *peer_us_per_event* are the CPU times themselves.
- *websocket_us_per_event*: what of it the library `websockets` alone takes, which both sides use:
  a client that reads the same events and throws them away. *added_us_over_peer* is what is added to
  that, ours over theirs.
- *long_…*: the same for conversations of 300 turns.
- *paced_…*: the same with a server that sends an event each millisecond, so that every event wakes
  the event loop. The other server sends as fast as it can, and several events come at once.
- *memory_per_session_kb*, *peer_memory_per_session_kb*: what 500 open sessions of one process hold
  after a spoken answer to each, per session: growth of the resident memory of a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import agents
from agents.realtime import RealtimeAgent
from agents.realtime import RealtimeRunner as PeerRunner
from websockets.asyncio.client import connect

import capsule_tasks as own
from capsule_tasks.realtime import RealtimeModelConfig, RealtimeRunner
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import RealtimeConnection, RealtimeServer, speaks
from tests.benchmarks._measure import Bar, report, use_plain_interpreters
from tests.chaos.census import resident_mib

BARS = (Bar("events_per_core_over_peer", ">=", 1.5),)
_TURNS = 30
_TOOL_EVERY = 3
_DELTAS = 50
_AUDIO_BYTES_PER_DELTA = 9_600
"""200 ms in 16 bits at 24 kHz."""
_ROUNDS = 12
_LONG_TURNS = 300
_LONG_ROUNDS = 3
_PAUSE_S = 0.001
_PACED_TURNS = 6
_PACED_ROUNDS = 6
_OPEN = 500
_OPENED_AT_ONCE = 50
_KEY = "a-key"
_MODEL = "gpt-realtime"
_INSTRUCTIONS = "Help the customer."
_QUESTION = "Where is my order?"

Figures = dict[str, float]
Converse = Callable[[str, int], Awaitable[int]]
"""Has a conversation of so many turns, and returns how many answers the model gave."""


# --- the server ----------------------------------------------------------------------------------


def _spoken() -> Any:
    words = [f"word{number:02} of it. "[:16] for number in range(_DELTAS)]
    return speaks(*words, audio=bytes(_DELTAS * _AUDIO_BYTES_PER_DELTA))


def _replies() -> Iterator[Any]:
    spoken, turn = _spoken(), 0
    while True:
        if _has_tool(turn):
            yield calls("look_up", {"order": turn}, f"call_{turn}")
        yield spoken
        turn += 1


def _has_tool(turn: int) -> bool:
    return turn % _TOOL_EVERY == _TOOL_EVERY - 1


def _answers(turns: int) -> int:
    return turns + sum(map(_has_tool, range(turns)))


def _serve(pipe: Connection, pause_s: float) -> None:
    asyncio.run(_serve_until_closed(pipe, pause_s))


async def _serve_until_closed(pipe: Connection, pause_s: float) -> None:
    server = RealtimeServer(lambda _: _forgetful(server))
    if pause_s:
        send = RealtimeConnection.send

        async def send_and_pause(connection: RealtimeConnection, event: Any) -> None:
            await send(connection, event)
            await asyncio.sleep(pause_s)

        RealtimeConnection.send = send_and_pause  # type: ignore[method-assign]
    await server.start()
    pipe.send(f"{server.url}?model={_MODEL}")
    await asyncio.to_thread(pipe.recv)
    pipe.send(server.errors)
    await server.stop()


def _forgetful(server: RealtimeServer) -> Iterator[Any]:
    server.forget()
    return _replies()


@contextmanager
def _server(pause_s: float = 0) -> Iterator[str]:
    """The URL of a server in a process of its own, which pauses after each event."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, pause_s))
    process.start()
    try:
        yield here.recv()
        here.send(None)
        if errors := here.recv():
            raise RuntimeError(f"the realtime server has refused messages: {errors[:3]}")
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


# --- the sides -----------------------------------------------------------------------------------


@own.function_tool
async def look_up(order: int) -> str:
    """Look up an order."""
    return f"order {order} is on its way"


@agents.function_tool(name_override="look_up")
async def peer_look_up(order: int) -> str:
    """Look up an order."""
    return f"order {order} is on its way"


def _own_session(url: str) -> Any:
    agent = own.Agent(name="support", instructions=_INSTRUCTIONS, tools=[look_up])
    return RealtimeRunner(agent).run(model_config=RealtimeModelConfig(url=url, api_key=_KEY))


async def _peer_session(url: str) -> Any:
    agent = RealtimeAgent(name="support", instructions=_INSTRUCTIONS, tools=[peer_look_up])
    runner = PeerRunner(agent, config={"tracing_disabled": True})
    settings: Any = {"model_name": _MODEL}
    return await runner.run(
        model_config={"url": url, "api_key": _KEY, "initial_model_settings": settings}
    )


async def _own(url: str, turns: int) -> int:
    async with _own_session(url) as session:
        return await _talk(session, turns)


async def _peer(url: str, turns: int) -> int:
    async with await _peer_session(url) as session:
        return await _talk(session, turns)


async def _talk(session: Any, turns: int) -> int:
    """Iterate over all events; the next question follows the end of the answer to the last."""
    await session.send_message(_QUESTION)
    turn, answers, audio_bytes = 0, 0, 0
    due = _answers(1)
    async for event in session:
        if event.type == "audio":
            audio = event.audio if hasattr(event, "audio") else event
            audio_bytes += len(audio.data)
        elif event.type == "agent_end":
            answers += 1
            if answers == due:
                turn += 1
                if turn == turns:
                    break
                due = _answers(turn + 1)
                await session.send_message(_QUESTION)
    expected = turns * _DELTAS * _AUDIO_BYTES_PER_DELTA
    if audio_bytes != expected:
        raise RuntimeError(f"{audio_bytes} bytes of audio came, and not {expected}")
    return answers


async def _reads(url: str, turns: int) -> int:
    """Read the events of the conversation and do nothing else; returns how many came."""
    events = 0

    async with connect(url, compression=None, max_size=None) as websocket:

        async def read_until(kind: bytes) -> None:
            nonlocal events
            while True:
                data = await websocket.recv(decode=False)
                events += 1
                if kind in data[:80]:
                    return

        async def tell(kind: str, **fields: Any) -> None:
            await websocket.send(json.dumps({"type": kind, **fields}))

        await read_until(b"session.created")
        for turn in range(turns):
            content = [{"type": "input_text", "text": _QUESTION}]
            item: dict[str, Any] = {"type": "message", "role": "user", "content": content}
            await tell("conversation.item.create", item=item)
            await tell("response.create")
            if _has_tool(turn):
                await read_until(b"rate_limits.updated")
                item = {"type": "function_call_output", "call_id": f"call_{turn}", "output": "yes"}
                await tell("conversation.item.create", item=item)
                await tell("response.create")
            await read_until(b"rate_limits.updated")
    return events


# --- measurements --------------------------------------------------------------------------------


async def _events(url: str, turns: int, rounds: int) -> Figures:
    sides: dict[str, Converse] = {"ours": _own, "peer": _peer, "websocket": _reads}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for converse in sides.values():  # caches are filled, modules loaded
        await converse(url, _TOOL_EVERY)
    gc.collect()
    gc.freeze()
    order = list(sides)
    events = 0
    for _ in range(rounds):
        for name in order:
            gc.collect()
            begun = time.process_time()
            count = await sides[name](url, turns)
            taken[name].append(time.process_time() - begun)
            if name == "websocket":
                events = count
        order.reverse()
    us = {name: median(seconds) / events * 1e6 for name, seconds in taken.items()}
    ratios = [peer / ours for ours, peer in zip(taken["ours"], taken["peer"], strict=True)]
    return {
        "events_per_core_over_peer": median(ratios),
        "us_per_event": us["ours"],
        "peer_us_per_event": us["peer"],
        "websocket_us_per_event": us["websocket"],
        "added_us_over_peer": (us["ours"] - us["websocket"]) / (us["peer"] - us["websocket"]),
        "events_per_core": 1e6 / us["ours"],
        "peer_events_per_core": 1e6 / us["peer"],
    }


def _memory(url: str, side: str) -> float:
    """Measured in a fresh process, so that no side uses what another has freed."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return float(pool.apply(_memory_kb, (url, side)))


def _memory_kb(url: str, side: str) -> float:
    return asyncio.run(_memory_of_open(url, side))


async def _memory_of_open(url: str, side: str) -> float:
    agents.set_tracing_disabled(True)
    async with AsyncExitStack() as stack:

        async def opened() -> None:
            made = _own_session(url) if side == "ours" else await _peer_session(url)
            await _talk(await stack.enter_async_context(made), 1)

        for _ in range(_OPENED_AT_ONCE):
            await opened()
        before = resident_mib()
        for _ in range(0, _OPEN, _OPENED_AT_ONCE):
            await asyncio.gather(*(opened() for _ in range(_OPENED_AT_ONCE)))
        return (resident_mib() - before) * 1024 / _OPEN


def measure() -> Figures:
    agents.set_tracing_disabled(True)
    with _server() as url:
        figures = asyncio.run(_events(url, _TURNS, _ROUNDS))
        long = asyncio.run(_events(url, _LONG_TURNS, _LONG_ROUNDS))
        figures |= {f"long_{name}": value for name, value in long.items()}
        figures["memory_per_session_kb"] = _memory(url, "ours")
        figures["peer_memory_per_session_kb"] = _memory(url, "peer")
    with _server(_PAUSE_S) as url:
        paced = asyncio.run(_events(url, _PACED_TURNS, _PACED_ROUNDS))
        figures |= {f"paced_{name}": value for name, value in paced.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench realtime")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    report(measure(), BARS, as_json=as_json)


if __name__ == "__main__":
    main()
