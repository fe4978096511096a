"""`scripts/bench pool`: what borrowing costs, and what a forked session saves."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.messages import Code, Execute
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.settings import PoolSettings, Profile
from tests.benchmarks._measure import (
    Bar,
    cpu_s,
    p50_ms,
    p99_ms,
    report,
    timed,
    use_plain_interpreters,
)
from tests.benchmarks.peers.bare import EchoChild

BARS = (
    Bar("acquire_p50_ms", "<=", 0.1),
    Bar("fork_ready_p50_ms", "<=", 5.0),
    Bar("fork_uss_over_cold_uss", "<=", 0.25),
    Bar("idle_cpu_percent", "<", 0.5),
)
_ACQUIRES = 5000
_STARTS = 60
_IDLE_SESSIONS = 8
_IDLE_S = 10.0
_ROUNDS = 3000
_PRELOADED = ("numpy", "asyncio")

Figures = dict[str, float]


async def measure() -> Figures:
    figures = await _acquire()
    figures |= await _starts()
    figures |= await _throughput()
    figures["idle_cpu_percent"] = await _idle_cpu_percent()
    return figures


async def _acquire() -> Figures:
    """Acquire and release of a session that is idle."""
    taken: list[float] = []
    async with SessionPool(
        {"app": Profile.app(pool=PoolSettings(min_idle=2, fresh=False))}
    ) as pool:
        pool.release(await pool.acquire())
        for _ in range(_ACQUIRES):
            with timed(taken):
                session = await pool.acquire()
            pool.release(session)
            await asyncio.sleep(0)
    return {"acquire_p50_ms": p50_ms(taken), "acquire_p99_ms": p99_ms(taken)}


async def _starts() -> Figures:
    """READY of a sandbox forked with NumPy, of a cold one that imports it, and their memory."""
    warm = _sandbox("fork")
    figures: Figures = {}
    async with SessionPool({"code": warm}) as pool:
        spawner = pool.spawner("code")
        forked: list[float] = []
        held = []
        for _ in range(_STARTS):
            session = Session(warm.session, spawner=spawner)
            with timed(forked):
                await session.start()
            held.append(session)
            if len(held) > _IDLE_SESSIONS:
                await held.pop(0).terminate()
        assert spawner.cold_starts == 0
        fork_uss = median(_uss_bytes(session) for session in held)
        for session in held:
            await session.terminate()
    cold: list[float] = []
    cold_uss: list[float] = []
    preload = "\n".join(f"import {name}" for name in _PRELOADED)
    for _ in range(_STARTS // 6):
        session = Session(msgspec.structs.replace(warm.session, warmup=preload))
        with timed(cold):
            await session.start()
        cold_uss.append(_uss_bytes(session))
        await session.terminate()
    figures["fork_ready_p50_ms"] = p50_ms(forked)
    figures["fork_ready_p99_ms"] = p99_ms(forked)
    figures["cold_ready_p50_ms"] = p50_ms(cold)
    figures["fork_uss_mib"] = fork_uss / 2**20
    figures["cold_uss_mib"] = median(cold_uss) / 2**20
    figures["fork_uss_over_cold_uss"] = fork_uss / median(cold_uss)
    return figures


async def _throughput() -> Figures:
    """Warm `1+1` through acquire, execute and release, two sessions busy; beside bare echoes."""
    profile = Profile.app(pool=PoolSettings(min_idle=2, max_sessions=2, fresh=False))

    async with SessionPool({"app": profile}) as pool:

        async def borrow() -> None:
            async with pool.borrow() as session:
                async for _ in session.execute("1+1"):
                    pass

        await asyncio.gather(borrow(), borrow())
        rate = await _rate([borrow, borrow])
    frame = bytes(
        encode_frame(Execute(execution_id="x" * 20, seq=1, payload=Code(source="1+1")), 2**20)
    )
    async with EchoChild() as first, EchoChild() as second:
        echo_rate = await _rate([lambda: first.echo(frame), lambda: second.echo(frame)])
    return {
        "throughput_per_s": rate,
        "echo_per_s": echo_rate,
        "throughput_over_echo": rate / echo_rate,
    }


async def _rate(workers: Sequence[object]) -> float:
    async def repeat(call: object) -> None:
        for _ in range(_ROUNDS):
            await call()  # type: ignore[operator]

    begun = time.perf_counter()
    await asyncio.gather(*map(repeat, workers))
    return len(workers) * _ROUNDS / (time.perf_counter() - begun)


async def _idle_cpu_percent() -> float:
    """Share of one core that a pool of idle sessions, its template and its parent use together."""
    settings = PoolSettings(min_idle=_IDLE_SESSIONS, max_sessions=_IDLE_SESSIONS)
    async with SessionPool({"app": Profile(pool=settings)}) as pool:
        while pool.info().idle < _IDLE_SESSIONS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        info = pool.info()
        pids = [os.getpid(), info.template_pid, *(session.pid for session in info.sessions)]
        watched = [pid for pid in pids if pid is not None]
        assert len(watched) == _IDLE_SESSIONS + 2
        begun, used = time.monotonic(), cpu_s(watched)
        await asyncio.sleep(_IDLE_S)
        return (cpu_s(watched) - used) / (time.monotonic() - begun) * 100


def _sandbox(start: str) -> Profile:
    profile = Profile.sandbox(pool=PoolSettings(min_idle=0), imports=_PRELOADED)
    return msgspec.structs.replace(profile, start=start)


def _uss_bytes(session: Session) -> float:
    """Memory that would be free if this process alone ended."""
    rollup = Path(f"/proc/{session.info.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Private"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench pool")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    report(asyncio.run(measure()), BARS, as_json=as_json)


if __name__ == "__main__":
    main()
