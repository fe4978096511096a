"""The Celery app of the streams benchmark."""

from __future__ import annotations

import sys
import time

from tests.benchmarks._app import app


@app.task(name="clock")
def clock(count: int, pause_s: float) -> None:
    """Print what time it is, so that a watcher knows how old it is."""
    for _ in range(count):
        print(f"{time.time():.6f}")
        time.sleep(pause_s)


@app.task(name="flood")
def flood(seconds: float) -> None:
    line = "x" * 4095 + "\n"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sys.stdout.write(line)


@app.task(name="spin")
def spin() -> None:
    while True:
        time.sleep(0.01)


__all__ = ["app"]
