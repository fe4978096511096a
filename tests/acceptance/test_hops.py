"""Count the modules of ours that a task passes on its way to its first line, and from its end.

Which modules a run passes varies a little: the child's Ack comes alone or together with the end,
and a heartbeat may come in between. Only modules that every counted run passes are counted.
`scripts/bench hops [--calls]` prints them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.acceptance.workers import Worker

LIMITS = {
    ("on", "delivered"): 21,
    ("on", "ended"): 22,
    ("off", "delivered"): 18,
    ("off", "ended"): 15,
}
"""Modules with streams on and off: one more than was measured, since under load a heartbeat or a
late Ack adds one. Decision 025 says why they are not the 15 that were aimed at."""
CODECS = {"protocol.codec", "protocol.messages", "protocol.events", "protocol.ids"}
"""Not counted: they turn messages into bytes and back, decide nothing, and pass nothing on."""
WAYS = {
    "delivered": "the delivered message to the first line of the task",
    "ended": "the child's terminal message to the acknowledgement",
}
TASKS = ("hop_late", "hop_early")
_WARM_UP = 4
_COUNTED = 8


def ways_of(worker: Worker, task: str) -> dict[str, list[str]]:
    """The calls on both ways, in the modules that every run passes: a heartbeat passes others."""
    runs = []
    for number in range(_WARM_UP + _COUNTED):
        begun = worker.get(task)
        found = json.loads(worker.heard("hops"))
        if number >= _WARM_UP:
            runs.append({"delivered": found["delivered"] + begun, "ended": found["ended"]})
    return {way: common([run[way] for run in runs]) for way in WAYS}


def common(runs: list[list[str]]) -> list[str]:
    shared = set.intersection(*(set(modules(run)) for run in runs))
    return [call for call in runs[-1] if module(call) in shared]


def modules(calls: Iterable[str]) -> list[str]:
    """In the order of their first calls."""
    return list(dict.fromkeys(map(module, calls)))


def module(call: str) -> str:
    return call.partition(":")[0]


def counted(calls: Iterable[str]) -> list[str]:
    return [name for name in modules(calls) if name not in CODECS]


def hop_worker(url: str, directory: Path, streams: str) -> Worker:
    """One child, no other messages than the test's, and no log lines from the child."""
    return Worker(
        url,
        directory,
        "--without-heartbeat",
        "--loglevel=WARNING",
        concurrency=1,
        app="tests.acceptance.hop_app",
        TEST_STREAMS="1" if streams == "on" else "0",
    )


def title(streams: str, task: str, way: str, passed: list[str]) -> str:
    count = f"{len(passed)} modules, of at most {LIMITS[streams, way]}"
    return f"streams {streams}, {task}, from {WAYS[way]}: {count}\n"


@pytest.mark.parametrize("streams", ["on", "off"])
def test_a_task_passes_few_modules(redis_url: str, tmp_path: Path, streams: str) -> None:
    with hop_worker(redis_url, tmp_path, streams) as worker:
        for task in TASKS:
            for way, calls in ways_of(worker, task).items():
                assert "protocol.codec" in modules(calls), "the codec is on every way"
                passed, limit = counted(calls), LIMITS[streams, way]
                assert len(passed) <= limit, title(streams, task, way, passed) + "\n".join(passed)
