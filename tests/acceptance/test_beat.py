"""Celery's beat, a process of its own, and a worker that runs what it sends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.acceptance.workers import HANG_S, ROOT, Worker, unique


def test_a_task_that_is_due_is_sent_and_runs(redis_url: str, tmp_path: Path, pool: str) -> None:
    key = unique()
    schedule = {"tick": {"task": "set_mark", "schedule": 1.0, "args": [key]}}
    command = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", "beat", "-l", "INFO"]
    command += [f"--schedule={tmp_path / 'schedule'}", "--pidfile="]
    conf = json.dumps({"beat_schedule": schedule})
    with Worker(redis_url, tmp_path, pool=pool, TEST_CONF=conf) as worker:
        with (tmp_path / "beat.log").open("wb") as log:
            beat = subprocess.Popen(
                command, cwd=ROOT, env=worker.environment, stdout=log, stderr=log
            )
        try:
            for _ in range(2):
                worker.heard(key)
        finally:
            beat.terminate()
            beat.wait(HANG_S)  # with status 1 if the signal arrives while it sends
