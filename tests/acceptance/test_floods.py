"""Tasks that write more than is kept: what is lost is counted, and memory stays bounded."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from capsule_tasks.client import Execution
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.workers import Worker


@pytest.mark.parametrize("mode", ["drop_oldest", "block"])
def test_every_byte_of_a_flood_is_there_or_counted(tmp_path: Path, mode: str) -> None:
    """Whatever is not there is in a gap, to the byte; with `block` nothing is missing."""
    size = 3_000_000
    with (
        PrivateServer(tmp_path / "broker") as broker,
        PrivateServer(tmp_path / "streams", port=free_port()) as streams,
    ):
        with Worker(
            broker.url,
            tmp_path,
            TEST_STREAMS_URL=streams.url,
            TEST_OUTPUT=mode,
            TEST_LIVE=str(8 * size),
        ) as worker:
            worker.app.conf.capsule_redis_url = streams.url
            execution = Execution.of(worker.send("flood", size))
            events = list(execution.events())
        written = sum(len(e.message.data) for e in events if isinstance(e.message, Output))
        lost = sum(e.message.lost_bytes for e in events if isinstance(e.message, Gap))
        assert written + lost == size
        if mode == "block":
            assert lost == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", ["drop_oldest", "block"])
def test_a_gigabyte_costs_bounded_memory_everywhere(tmp_path: Path, mode: str) -> None:
    """The watcher takes its time; the worker, its children, Redis and the watcher stay small."""
    size = 1_000_000_000
    most = 0
    with PrivateServer(tmp_path / "redis") as server:  # noqa: SIM117  one needs the other
        with Worker(server.url, tmp_path, TEST_OUTPUT=mode) as worker:
            client = worker.app.backend.client
            before, ours = rss_of(worker.pid), own_rss()
            execution = Execution.of(worker.send("flood", size))
            written = lost = 0
            for event in execution.events():
                if isinstance(event.message, Output):
                    written += len(event.message.data)
                    time.sleep(0.0005)
                elif isinstance(event.message, Gap):
                    lost += event.message.lost_bytes
                most = max(most, rss_of(worker.pid)) if event.seq % 50 == 0 else most
            peak = client.info("memory")["used_memory_peak"]
            grown = own_rss() - ours
    assert isinstance(event.message, Ended)
    assert event.message.outcome == Outcome.SUCCEEDED
    assert written + lost == size
    assert most - before < 100 * 2**20
    assert peak < 50 * 2**20
    assert grown < 50 * 2**20


def own_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rss_of(pid: int) -> int:
    """Bytes of a process and all below it."""
    total = 0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(rss_of(int(child)) for child in (task / "children").read_text().split())
    return total
