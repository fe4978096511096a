"""The examples of durable runs in the guide and in the README run against a real worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from capsule_tasks.testing import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, eventually

EXAMPLE = re.compile(
    r"<!-- not run: [^\n]*test_guide_of_runs.py[^\n]* -->\n```python\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def examples(page: str) -> list[str]:
    return EXAMPLE.findall((ROOT / page).read_text())


def printed_by(app: str, program: str, directory: Path) -> str:
    """What a program prints beside a worker whose app is `shop.py`."""
    with PrivateServer(directory / "redis") as server:
        return _printed_by(app, program, server.url, directory)


def _printed_by(app: str, program: str, redis_url: str, directory: Path) -> str:
    (directory / "shop.py").write_text(app)
    environment = {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": f"{directory}:{ROOT}"}
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-c", "1", "-l", "INFO"]
    log_file = directory / "worker.log"
    with log_file.open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--without-mingle", "--without-gossip"],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        eventually(lambda: " ready." in log_file.read_text(), "a worker that is ready")
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr + log_file.read_text()
        return ended.stdout
    finally:
        worker.terminate()
        worker.wait(HANG_S)


def test_the_guide_goes_from_the_start_of_a_run_to_its_end(tmp_path: Path) -> None:
    app, program = examples("docs/runs.md")
    printed = printed_by(app, program, tmp_path)
    assert printed == 'bare:refund {"order":42,"euros":9}\nI refunded 9 euros.\n'


def test_the_example_of_the_readme_is_a_run_that_waits(tmp_path: Path) -> None:
    app, _ = examples("docs/runs.md")
    (example,) = examples("README.md")
    # The agent of the guide, which has a model; the README shows one without.
    registered = r"^agent = .*?^capsule\.runs\.register\([^\n]*\n"
    program, count = re.subn(registered, "", example, flags=re.DOTALL | re.MULTILINE)
    assert count == 1
    printed = printed_by(app, f"from shop import capsule\n{program}", tmp_path)
    assert printed == 'bare:refund {"order":42,"euros":9}\nI refunded 9 euros.\n'
