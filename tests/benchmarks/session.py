"""How fast a session is, beside the raw limit and beside a Jupyter kernel, in one run.

    scripts/bench session [--json]

Every ratio compares medians of rounds in which both sides took turns, so that whatever else the
machine does meets both. It ends with status 0 whatever the figures say; `pass` judges them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from statistics import median

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.messages import Ack, Code, Error, Execute, Output, Result
from capsule_tasks.sessions import Session
from tests.benchmarks import _work
from tests.benchmarks._measure import (
    Bar,
    apart,
    cpu_s,
    p50_ms,
    p99_ms,
    report,
    timed,
    use_plain_interpreters,
)
from tests.benchmarks.peers import jupyter
from tests.benchmarks.peers.bare import LIVE, EchoChild, PipeChild, start_bare_s

BARS = (
    Bar("exec_over_echo", "<=", 4),
    Bar("exec_p99_over_p50", "<=", 5),
    Bar("output_over_pipe", ">=", 1.0),
    Bar("write64_over_pipe", ">=", 1.0),
    Bar("cold_ready_over_bare", "<=", 6),
    Bar("cancel_loop_p99_ms", "<=", 3),
    Bar("cancel_sleep_p99_ms", "<=", 3),
    Bar("cancel_flood_p99_ms", "<=", 10),
    Bar("save_100MB_over_pickle", "<=", 6),
    Bar("restore_100MB_over_unpickle", "<=", 6),
    Bar("growth_MB_per_100MB_saved", "<=", 20),
    Bar("idle_cpu_percent", "<", 0.5),
)

_ROUNDS = 3
_APART_RUNS = 1500
_FREE_RUNS = 3400
_WARM_UP_RUNS = 300
_OUTPUTS = 9
_WRITES = 9
_STARTS = 25
_CANCELS = 300
_CHECKPOINTS = 5
_IDLE_SESSIONS = 8
_IDLE_S = 10.0

Figures = dict[str, float]


async def measure() -> Figures:
    figures: Figures = {}
    async with Session() as session:
        figures |= await _latency(session)
        figures |= await _throughput(session)
        for name, source, stop_after in (
            ("loop", _work.BUSY_LOOP, 1),
            ("sleep", _work.SLEEP, 1),
            ("flood", _work.FLOOD, _work.FLOOD_BYTES),
        ):
            seconds = [await _cancel_s(session, source, stop_after) for _ in range(_CANCELS)]
            figures[f"cancel_{name}_p50_ms"] = p50_ms(seconds)
            figures[f"cancel_{name}_p99_ms"] = p99_ms(seconds)
    figures |= await _cold_start()
    for megabytes in (10, 100):
        figures |= await _checkpoints(megabytes)
    figures["idle_cpu_percent"] = await _idle_cpu_percent()
    return figures


# --- latency -----------------------------------------------------------------------------------


async def _latency(session: Session) -> Figures:
    """`1+1` from submit to result, and an echo of the same bytes.

    Compared while parent and child have a core each; p50 and p99 are of runs placed freely.
    """
    request = Execute(execution_id=session.session_id, seq=1, payload=Code(source="1+1"))
    frame = bytes(encode_frame(request, session.config.child.max_frame_bytes))
    echoes: list[list[float]] = []
    executions: list[list[float]] = []
    free_echoes: list[float] = []
    free: list[float] = []
    async with EchoChild() as child:

        async def echo() -> None:
            await child.echo(frame)

        async def execute() -> None:
            await _one_plus_one(session)

        await _times(_WARM_UP_RUNS, echo)
        await _times(_WARM_UP_RUNS, execute)
        for _ in range(_ROUNDS):
            with apart([child.pid, _pid(session)]):
                echoes.append(await _times(_APART_RUNS, echo))
                executions.append(await _times(_APART_RUNS, execute))
            free_echoes += await _times(_FREE_RUNS, echo)
            free += await _times(_FREE_RUNS, execute)
    ratios = [p50_ms(ours) / p50_ms(raw) for ours, raw in zip(executions, echoes, strict=True)]
    return {
        "echo_p50_ms": median(map(p50_ms, echoes)),
        "exec_apart_p50_ms": median(map(p50_ms, executions)),
        "exec_over_echo": median(ratios),
        "echo_free_p50_ms": p50_ms(free_echoes),
        "exec_p50_ms": p50_ms(free),
        "exec_p99_ms": p99_ms(free),
        "exec_p99_over_p50": p99_ms(free) / p50_ms(free),
    }


async def _one_plus_one(session: Session) -> None:
    async for message in session.execute("1+1"):
        last = message
    assert isinstance(last, Result), last
    assert last.value == 2


async def _times(runs: int, work: Callable[[], Awaitable[None]]) -> list[float]:
    seconds: list[float] = []
    for _ in range(runs):
        with timed(seconds):
            await work()
    return seconds


# --- throughput --------------------------------------------------------------------------------


async def _throughput(session: Session) -> Figures:
    """Much output, received as messages by a consumer, and as bytes out of a raw pipe."""
    await session.run(_work.PREPARE_WRITE)
    lines: list[float] = []
    live_lines: list[float] = []
    held_lines: list[float] = []
    for _ in range(_OUTPUTS):
        lines.append(await _output_s(session, _work.PRINT_LINES, _work.LINES_BYTES))
        live_lines.append(await PipeChild(LIVE, _work.PRINT_LINES).seconds_for(_work.LINES_BYTES))
        held_lines.append(await PipeChild("", _work.PRINT_LINES).seconds_for(_work.LINES_BYTES))
    write: list[float] = []
    raw_write: list[float] = []
    for _ in range(_WRITES):
        write.append(await _output_s(session, _work.WRITE_AT_ONCE, _work.WRITE_BYTES))
        child = PipeChild(_work.PREPARE_WRITE, _work.WRITE_AT_ONCE)
        raw_write.append(await child.seconds_for(_work.WRITE_BYTES))
    await session.run("del data")
    return {
        "output_mb_s": _mb_s(_work.LINES_BYTES, lines),
        "pipe_output_mb_s": _mb_s(_work.LINES_BYTES, live_lines),
        "output_over_pipe": median(live_lines) / median(lines),
        "buffered_pipe_output_mb_s": _mb_s(_work.LINES_BYTES, held_lines),
        "output_over_buffered_pipe": median(held_lines) / median(lines),
        "write64_mb_s": _mb_s(_work.WRITE_BYTES, write),
        "pipe_write64_mb_s": _mb_s(_work.WRITE_BYTES, raw_write),
        "write64_over_pipe": median(raw_write) / median(write),
    }


def _mb_s(size: int, seconds: list[float]) -> float:
    return size / median(seconds) / 1e6


async def _output_s(session: Session, source: str, size: int) -> float:
    """From submit to result, with every byte received before it."""
    received = 0
    begun = time.perf_counter()
    async for message in session.execute(source):
        if isinstance(message, Output):
            received += len(message.data)
    seconds = time.perf_counter() - begun
    assert isinstance(message, Result), message
    assert received == size, received
    return seconds


# --- cancel ------------------------------------------------------------------------------------


async def _cancel_s(session: Session, source: str, stop_after: int) -> float:
    """From the call of `cancel` to the terminal message, which the consumer reads all the while."""
    received = 0
    execution_id = ""
    cancelling: asyncio.Task[str] | None = None
    begun = 0.0

    async def cancel() -> str:
        nonlocal begun
        await asyncio.sleep(0.002)  # the loop, or the sleep, is entered right behind the print
        begun = time.perf_counter()
        return await session.cancel(execution_id)

    async for message in session.execute(source):
        if isinstance(message, Ack):
            execution_id = message.execution_id
        elif isinstance(message, Output):
            received += len(message.data)
            if cancelling is None and received >= stop_after:
                cancelling = asyncio.create_task(cancel())
    seconds = time.perf_counter() - begun
    assert cancelling is not None
    assert isinstance(message, Error), message
    assert message.kind == "cancelled", message
    assert await cancelling == "interrupted"
    return seconds


# --- start and rest ----------------------------------------------------------------------------


async def _cold_start() -> Figures:
    """Start to READY, and the start of an interpreter that does nothing."""
    ready: list[float] = []
    bare: list[float] = []
    for _ in range(_STARTS):
        bare.append(await asyncio.to_thread(start_bare_s))
        session = Session()
        with timed(ready):
            await session.start()
        await session.shutdown()
    return {
        "cold_ready_ms": p50_ms(ready),
        "bare_start_ms": p50_ms(bare),
        "cold_ready_over_bare": median(ready) / median(bare),
    }


async def _idle_cpu_percent() -> float:
    """Share of one core that idle sessions and their parent use together."""
    sessions = [Session() for _ in range(_IDLE_SESSIONS)]
    try:
        await asyncio.gather(*(session.start() for session in sessions))
        await asyncio.gather(*(session.run("1+1") for session in sessions))
        await asyncio.sleep(1.0)
        pids = [os.getpid(), *map(_pid, sessions)]
        begun, used = time.monotonic(), cpu_s(pids)
        await asyncio.sleep(_IDLE_S)
        return (cpu_s(pids) - used) / (time.monotonic() - begun) * 100
    finally:
        await asyncio.gather(*(session.shutdown() for session in sessions))


# --- checkpoints -------------------------------------------------------------------------------


async def _checkpoints(megabytes: int) -> Figures:
    """Saves and restores of an array; `pickle` in the child itself, which moves nothing."""
    saves: list[float] = []
    restores: list[float] = []
    async with Session() as session, Session() as other:
        await session.run(f"import numpy\narray = numpy.arange({megabytes * 125_000}.)")
        await other.run("import numpy")
        peak_kib = (await session.run(_work.PEAK_KIB)).value
        for _ in range(_CHECKPOINTS):
            with timed(saves):
                saved = await session.checkpoint(timeout_s=None)
            with timed(restores):
                await other.restore(saved, "replace", timeout_s=None)
        grown_kib = (await session.run(_work.PEAK_KIB)).value - peak_kib
        plain = [(await session.run(_work.PICKLE_ARRAY)).value for _ in range(_CHECKPOINTS)]
    name = f"{megabytes}MB"
    return {
        f"save_{name}_ms": p50_ms(saves),
        f"save_{name}_MB_s": _mb_s(saved.size, saves),
        f"restore_{name}_ms": p50_ms(restores),
        f"save_{name}_over_pickle": median(saves) / median(dump for dump, _ in plain),
        f"restore_{name}_over_unpickle": median(restores) / median(load for _, load in plain),
        f"growth_MB_per_{name}_saved": grown_kib / 1024,
    }


def _pid(session: Session) -> int:
    pid = session.info.pid
    assert pid is not None
    return pid


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench session")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    figures = asyncio.run(measure())
    figures |= jupyter.measure()
    report(figures, BARS, as_json=as_json)


if __name__ == "__main__":
    main()
