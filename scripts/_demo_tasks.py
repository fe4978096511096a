"""A Redis server, a worker, Flower where it is installed, and a pipeline of tasks through it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from capsule_tasks.testing.servers import PrivateServer, free_port  # noqa: E402 - the path comes first

_URLS = ("CAPSULE_BROKER_URL", "CAPSULE_RESULT_URL", "REDIS_URL")
PAGES = 100
WAIT_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.add_argument("--stay", action="store_true", help="keep everything running until Ctrl-C")
    stays = parser.parse_args().stay
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        # The stock app asks these first, and somebody's own Redis is none of the demo's.
        os.environ |= dict.fromkeys(_URLS, server.url)
        log = Path(directory) / "worker.log"
        with log.open("wb") as sink, process(sink, "worker", "-c", "2", "-l", "INFO"):
            print(f"Redis   {server.url}")
            run_pipeline(log)
            with flower(Path(directory)) as address:
                print(f"Flower  {address}")
                if stays:
                    print("\nCtrl-C ends it.")
                    with contextlib.suppress(KeyboardInterrupt):
                        signal.pause()


@contextlib.contextmanager
def process(sink: object, *arguments: str) -> Iterator[None]:
    """One command of Celery with the stock app, ended with the block."""
    command = [sys.executable, "-m", "celery", "-A", "workers", *arguments]
    running = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)  # type: ignore[call-overload]
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def run_pipeline(log: Path) -> None:
    """A group of coroutines, a chord of blocking tasks, and a chain behind them."""
    from celery import chain, chord, group

    from workers.app import app
    from workers.pipeline import fetch, report, square, total

    started = time.monotonic()
    pages = group(fetch.s(page) for page in range(PAGES))().get(timeout=WAIT_S)
    print(f"group   {PAGES} pages awaited beside each other in {time.monotonic() - started:.1f} s")
    started = time.monotonic()
    pipeline = chain(
        chord([square.s(page) for page in pages], total.s()), report.s("sum of squares")
    )
    told = pipeline.delay().get(timeout=WAIT_S)
    expected = sum(number * number for page in pages for number in page)
    assert told == f"sum of squares: {expected}", told
    print(f"chord   {told}, in {time.monotonic() - started:.1f} s")
    stats = app.control.inspect(timeout=5).stats() or {}
    for name, worker in stats.items():
        for session in worker["pool"]["sessions"]:
            tasks, kind, pid = session["tasks"], session["kind"], session["pid"]
            print(f"session {kind} child {pid} of {name} has run {tasks} tasks")
    lines = [line for line in log.read_text().splitlines() if "squaring" in line]
    print(f"log     {len(lines)} lines that tasks printed, the last: {lines[-1] if lines else '-'}")


@contextlib.contextmanager
def flower(directory: Path) -> Iterator[str]:
    """Flower's address once it answers; or why there is none."""
    if importlib.util.find_spec("flower") is None:
        yield "is not installed: pip install 'capsule-tasks[flower]'"
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (directory / "flower.log").open("wb") as sink:
        with process(sink, "flower", f"--port={port}", "--address=127.0.0.1"):
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    urllib.request.urlopen(f"{url}/healthcheck", timeout=5).read()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            yield f"{url}/workers"


if __name__ == "__main__":
    main()
