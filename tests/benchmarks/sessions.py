"""Code executions and named sessions through a worker, beside a Jupyter kernel and a plain task.

    scripts/bench sessions [--json]

- *execute*: `1+1` in a live named session, from the call in the producer to its value, through
  Redis; beside a Jupyter kernel that its own client drives directly. Both take turns.
- *fresh*: `capsule.execute("1+1").get()`, beside the start of a forked sandbox plus a task that
  does nothing.
- *adopt*: the first call of a session that no worker holds.
- *restore*: the first call of a session with 10 MB in its checkpoint, less that of an empty one.
- *memory*: PSS of idle sessions that have imported NumPy.
- *idle*: CPU of a worker with idle sessions, and of these.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.settings import PoolSettings, Profile
from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import (
    Bar,
    cpu_s,
    p50_ms,
    p99_ms,
    report,
    timed,
    use_plain_interpreters,
)
from tests.benchmarks._worker import WAIT_S, Kind, producer, tree, worker
from tests.benchmarks.peers import jupyter

BARS = (
    Bar("execute_p50_over_jupyter", "<=", 0.8),
    Bar("execute_p99_over_p50", "<=", 4),
    Bar("fresh_execute_over_task", "<=", 1.3),
    Bar("idle_cpu_percent", "<", 0.5),
)
_ROUNDS = 5
_EXECUTIONS = 300
_WARM_UP = 50
_FRESH = 60
_STARTS = 60
_ADOPTED = 20
_RESTORED = 6
_TEN_MB = "import os; data = os.urandom(10_000_000)"
_IDLE_SESSIONS = 8
_IDLE_S = 10.0

Figures = dict[str, float]


def measure(url: str) -> Figures:
    with worker(url, Kind(app="sessions_app")) as pid:
        app = producer(url)
        capsule = Capsule(app)
        figures = _execute(capsule.session("live"))
        figures |= _fresh(capsule, app)
        figures |= _adopt(capsule)
        figures |= _restore(capsule)
        figures |= _idle(capsule, pid)
        app.close()
    return figures


def _execute(session: NamedSession) -> Figures:
    """`1+1` in both, in turns. The first call adopts the session."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    _call(session)
    with jupyter.kernel() as (_, client):
        for _ in range(_WARM_UP):
            _call(session)
            jupyter.execute(client, "1+1")
        for _ in range(_ROUNDS):
            ours.append([])
            for _ in range(_EXECUTIONS):
                with timed(ours[-1]):
                    _call(session)
            theirs.append([])
            for _ in range(_EXECUTIONS):
                with timed(theirs[-1]):
                    jupyter.execute(client, "1+1")
    together = [seconds for run in ours for seconds in run]
    return {
        "execute_p50_ms": p50_ms(together),
        "execute_p99_ms": p99_ms(together),
        "execute_p99_over_p50": p99_ms(together) / p50_ms(together),
        "jupyter_p50_ms": p50_ms([seconds for run in theirs for seconds in run]),
        "execute_p50_over_jupyter": median(
            p50_ms(mine) / p50_ms(other) for mine, other in zip(ours, theirs, strict=True)
        ),
    }


def _call(session: NamedSession) -> None:
    value = session.execute("1+1").get(timeout=WAIT_S)
    assert value == 2, value


def _fresh(capsule: Capsule, app: Celery) -> Figures:
    """A fresh sandbox for each execution; the task before it is the same way without one."""
    fresh: list[float] = []
    task: list[float] = []
    capsule.execute("1+1").get(timeout=WAIT_S)
    app.send_task("nothing").get(timeout=WAIT_S)
    for _ in range(_FRESH):
        with timed(task):
            app.send_task("nothing").get(timeout=WAIT_S)
        with timed(fresh):
            assert capsule.execute("1+1").get(timeout=WAIT_S) == 2
    ready = asyncio.run(_forked_ready_s())
    return {
        "fresh_execute_p50_ms": p50_ms(fresh),
        "task_p50_ms": p50_ms(task),
        "fork_ready_p50_ms": p50_ms(ready),
        "fresh_execute_over_task": p50_ms(fresh) / (p50_ms(ready) + p50_ms(task)),
    }


async def _forked_ready_s() -> list[float]:
    """From the start of a sandbox that is forked from a template to READY."""
    profile = Profile.sandbox(pool=PoolSettings(min_idle=0, max_sessions=1), imports=("numpy",))
    forked: list[float] = []
    async with SessionPool({"sandbox": profile}) as pool:
        for _ in range(_STARTS):
            session = Session(profile.session, spawner=pool.spawner("sandbox"))
            with timed(forked):
                await session.start()
            await session.terminate()
    return forked


def _adopt(capsule: Capsule) -> Figures:
    """The first call, of one session after the other."""
    adopted: list[float] = []
    for number in range(_ADOPTED):
        session = capsule.session(f"adopted-{number}")
        with timed(adopted):
            _call(session)
        session.close()
    return {"adopt_p50_ms": p50_ms(adopted), "adopt_p99_ms": p99_ms(adopted)}


def _restore(capsule: Capsule) -> Figures:
    """Two sessions that evict each other from the only place: one with 10 MB, one empty."""
    large, small = (capsule.session(name, profile="alone") for name in ("large", "small"))
    large.execute(_TEN_MB).get(timeout=WAIT_S)
    restored: list[float] = []
    evicted: list[float] = []
    for _ in range(_RESTORED):
        with timed(evicted):  # the checkpoint of the large one comes first
            _call(small)
        with timed(restored):
            assert large.execute("len(data)").get(timeout=WAIT_S) == 10_000_000
    return {
        "restore_10MB_ms": p50_ms(restored),
        "evict_10MB_ms": p50_ms(evicted),
    }


def _idle(capsule: Capsule, pid: int) -> Figures:
    """Sessions with NumPy that do nothing: what they hold, and what they use."""
    before = {process.pid for process in tree(pid)}
    for number in range(_IDLE_SESSIONS):
        source = "import numpy; numpy.arange(10).sum().item()"
        assert capsule.session(f"idle-{number}").execute(source).get(timeout=WAIT_S) == 45
    children = [process for process in tree(pid) if process.pid not in before]
    pss = sum(process.memory_full_info().pss for process in children) / _IDLE_SESSIONS
    time.sleep(5.0)  # the last checks of what has just run
    pids = [process.pid for process in tree(pid)]
    begun, used_s = time.monotonic(), cpu_s(pids)
    time.sleep(_IDLE_S)
    used_s = cpu_s([one for one in pids if psutil.pid_exists(one)]) - used_s
    return {
        "session_pss_mib": pss / 2**20,
        "sessions_per_GB": 1e9 / pss,
        "idle_cpu_percent": used_s / (time.monotonic() - begun) * 100,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench sessions")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    as_json: bool = parser.parse_args().json
    use_plain_interpreters()
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        figures = measure(server.url)
    report(figures, BARS, as_json=as_json)


if __name__ == "__main__":
    main()
