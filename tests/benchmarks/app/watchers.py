"""One process that watches ten thousand executions, while another lets some of them speak."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from capsule_tasks.client.watching.watcher import ExecutionWatcher, StreamCursor, StreamWatch
from capsule_tasks.protocol.messages import Output
from capsule_tasks.settings import ExecutionSettings
from tests.benchmarks._measure import p50_ms, p99_ms


async def watch(url: str, count: int, expected: int) -> dict[str, float]:
    watcher = ExecutionWatcher(url, ExecutionSettings(), None)
    late: list[float] = []
    seen = asyncio.Event()
    attached = 0

    async def one(number: int) -> None:
        nonlocal attached
        watch = StreamWatch(watcher, StreamCursor(f"watched-{number}", None))
        async for event in watch.events():
            if isinstance(event.message, Output):
                late.append(time.time() - float(event.message.data))
                if len(late) >= expected:
                    seen.set()
            else:
                attached += 1

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    while attached < count:
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    cpu = time.process_time()
    await asyncio.wait_for(seen.wait(), 120)
    used = time.process_time() - cpu
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await watcher.close()
    return {"rss_mb": rss_mb, "p50_ms": p50_ms(late), "p99_ms": p99_ms(late), "cpu_s": used}


if __name__ == "__main__":
    found = asyncio.run(watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(found), flush=True)
