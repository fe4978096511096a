"""Hosted sessions while Redis is away, after it was restarted, and in a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from capsule_tasks.protocol.events import RespondCommand
from capsule_tasks.testing.servers import PrivateServer
from tests.integration.hosting import Caller, HostWorker, Results
from tests.streaming import eventually


async def test_a_call_runs_on_while_redis_stands_still(tmp_path: Path, prefix: str) -> None:
    results: Results = {}
    with PrivateServer(tmp_path / "redis") as server:
        caller = Caller(server.url, prefix)
        async with HostWorker(server.url, prefix, results, lease_s=0.3) as worker:
            await caller.run("user-1", "n = 1")
            go, done = tmp_path / "go", tmp_path / "done"
            call = await caller.submit(
                "user-1",
                "import os, pathlib, time\n"
                "print('runs', flush=True)\n"
                f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
                f"pathlib.Path({str(done)!r}).touch()\n"
                "n + 1",
            )
            waiting = await caller.submit("user-1", "n + 2")
            async with asyncio.timeout(30):
                while await caller.printed(call) != "runs\n":
                    await asyncio.sleep(0.005)
            pid, incarnation = worker.pid("user-1"), worker.publisher.lease.incarnation
            os.kill(server.pid, signal.SIGSTOP)
            go.touch()
            await eventually(done.exists)
            await asyncio.sleep(0.5)  # longer than the lease
            os.kill(server.pid, signal.SIGCONT)
            assert (await caller.ended(call)).result_text == "2"
            assert (await caller.ended(waiting)).result_text == "3"
            assert worker.pid("user-1") == pid
            await eventually(lambda: worker.publisher.lease.incarnation != incarnation)
            await eventually(lambda: set(results) >= {call, waiting})
        await caller.close()


async def test_calls_and_namespaces_of_sessions_in_a_cluster(cluster_url: str, prefix: str) -> None:
    results: Results = {}
    caller = Caller(cluster_url, prefix)
    async with HostWorker(cluster_url, prefix, results) as worker:
        for name in ("a", "b", "c", "d"):
            await caller.run(name, "n = 41")
        call = await caller.submit("a", "input('?')")
        await caller.asks(call)
        await caller.executions.send_command(call, RespondCommand(text="yes"))
        assert (await caller.ended(call)).result_text == "'yes'"
        assert len(worker.hosted) == 4
    async with HostWorker(cluster_url, prefix, results):
        for name in ("a", "b", "c", "d"):
            assert (await caller.run(name, "n + 1")).result_text == "42"
            await caller.settled(name)
    await caller.close()
