"""Deliver a Celery task with a step over and over, killed at a chosen line; report what is left.

    python -m tests.chaos.step_victim URL POINTS SEED FOLDER

Each delivery is a fork. A trace function counts the lines that Python runs, those of redis-py and
of asyncio included, and at the chosen one the process kills itself with SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import redis
from celery import Celery

import capsule_tasks
from capsule_tasks.errors import EffectUncertain
from capsule_tasks.storage.keys import StepKeys

app = Celery("victim", broker="memory://")


def effect(folder: str, task_id: str) -> str:
    """The effect is the line in the file; its return value is known only to its caller."""
    given = os.urandom(8).hex()
    descriptor = os.open(Path(folder) / task_id, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{given}\n".encode())
    os.close(descriptor)
    lines.effect = lines.count
    return given


async def effect_later(folder: str, task_id: str) -> str:
    await asyncio.sleep(0)
    return effect(folder, task_id)


@app.task(bind=True)
def charge(self: Any, folder: str) -> str:
    return capsule_tasks.step("charge", effect, folder, self.request.id)


@app.task(bind=True)
def charge_later(self: Any, folder: str) -> str:
    async def run() -> str:
        return await capsule_tasks.step("charge", effect_later, folder, self.request.id)

    return asyncio.run(run())


class Lines:
    """Counts lines as they run, and ends the process at one of them."""

    def __init__(self, last: int, is_behind: bool = False) -> None:
        self.count = 0
        self.effect = 0
        self._last = last
        self._is_behind = is_behind

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            begin = self.effect if self._is_behind else 0
            if self.count - begin == self._last and (begin or not self._is_behind):
                os.kill(os.getpid(), signal.SIGKILL)
        return self


lines = Lines(0)


def deliver(
    task: Any, task_id: str, folder: Path, last_line: int = 0, is_behind: bool = False
) -> dict[str, Any] | None:
    """Deliver in a process of its own; return its report, or None if it was killed.

    `last_line` counts from the beginning, or from where the effect has happened.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        global lines  # noqa: PLW0603  the effect says at which line it happened
        lines = Lines(last_line, is_behind)
        sys.settrace(lines)
        outcome: dict[str, Any] = {"uncertain": False, "output": None}
        try:
            outcome["output"] = task.apply(args=(str(folder),), task_id=task_id, throw=True).get()
        except EffectUncertain:
            outcome["uncertain"] = True
        except BaseException as error:  # noqa: BLE001  it is reported, and the test fails
            outcome["error"] = repr(error)
        sys.settrace(None)
        os.write(writer, json.dumps({**outcome, "lines": lines.count}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read()
    os.waitpid(pid, 0)
    found: dict[str, Any] | None = json.loads(report) if report else None
    return found


def effects(folder: Path, task_id: str) -> list[str]:
    path = folder / task_id
    return path.read_text().split() if path.exists() else []


def lines_of(task: Any, folder: Path) -> int:
    """Count the lines of a whole delivery; waiting for replies makes it a few more or fewer."""
    counts = []
    for number in range(4):
        outcome = deliver(task, f"whole-{task.name}-{number}", folder)
        assert outcome is not None, "a delivery that was not killed reported nothing"
        assert "error" not in outcome, outcome
        counts.append(int(outcome["lines"]))
    return min(counts)


def main(url: str, points: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    app.conf.capsule_redis_url = url
    chance = random.Random(seed)
    tasks = (charge, charge_later)
    deliver(charge, "warm-up", folder)
    whole = [lines_of(task, folder) for task in tasks]
    reports = []
    client = redis.Redis.from_url(url)
    for number in range(points):
        task, entire = tasks[number % 2], whole[number % 2]
        task_id = f"task-{number}"
        # The effect and its record are a few dozen lines apart: half of the kills are there.
        is_behind = number % 4 > 1
        last_line = chance.randint(1, 100) if is_behind else chance.randint(1, entire)
        last_line = 2 if number == 2 else last_line
        first = deliver(task, task_id, folder, last_line, is_behind)
        after_kill = effects(folder, task_id)
        recorded = bool(client.hexists(StepKeys(task_id).steps, "output:charge"))
        rest = [deliver(task, task_id, folder) for _ in range(2)]
        reports.append(
            {
                "line": f"{last_line} {'behind the effect' if is_behind else f'of {entire}'}",
                "was_killed": first is None,
                "recorded": recorded,
                "happened": bool(after_kill),
                "outcomes": [one for one in (first, *rest) if one is not None],
                "effects": effects(folder, task_id),
            }
        )
    return reports


if __name__ == "__main__":
    given_url, given_points, given_seed, given_folder = sys.argv[1:]
    found = main(given_url, int(given_points), int(given_seed), Path(given_folder))
    sys.stdout.write(json.dumps(found))
