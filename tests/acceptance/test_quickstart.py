"""The quickstart, followed literally."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

from tests.acceptance.workers import HANG_S, ROOT

PAGE = (ROOT / "docs/quickstart.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(*command: str, answers: str = "", **options: Any) -> str:
    ended = subprocess.run(
        command,
        input=answers,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
        **options,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_each_step_works_as_written(redis_url: str, tmp_path: Path) -> None:
    start_redis, start_worker, open_prompt, commands, stop_redis = blocks("sh")
    shop, watch, cancel = blocks("python")
    assert start_redis == "./scripts/redis start --port 6390\n"
    assert stop_redis == "./scripts/redis stop\n"
    prepare, _, last = open_prompt.removesuffix("\n").rpartition("\n")
    assert last == "python"
    assert start_worker == f"{prepare}\ncelery -A shop worker\n"
    activate, export = prepare.splitlines()
    assert activate == ". .venv/bin/activate"
    assert export == "export REDIS_URL=redis://localhost:6390"

    (tmp_path / "shop.py").write_text(shop)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "PATH": path, "REDIS_URL": redis_url, "PYTHONPATH": str(tmp_path)},
    }
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            ["celery", "-A", "shop", "worker"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **options,
        )
    try:
        printed = run(sys.executable, "-c", f"{watch}\n{cancel}", answers="yes\n", **options)
        # Without a name, the command waits two seconds for workers, whether they are busy or not.
        commands = commands.replace("health ", f"health -t {HANG_S} -d celery@{gethostname()} ")
        shown = run("bash", "-c", commands, **options)
    finally:
        worker.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(HANG_S)
        worker.kill()
        worker.wait()
    assert worker.returncode == 1  # of Celery, after Ctrl-C
    assert "quarter 4 of 2026 is done\npublish the report? report of 2026: published" in printed
    assert re.search(r"this loop never ends\n+\w+\ncancelled\n$", printed), printed
    assert re.search(r"^celery@\S+: healthy", shown, re.MULTILINE), shown
    assert "-- cancelled" in shown, shown
    assert re.search(r"cancelled +shop\.spin", shown), shown
