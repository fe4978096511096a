"""`scripts/demo`, as a visitor runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.workers import ROOT, eventually, is_running, unique

MOST_S = 120
"""The demo takes about fifteen seconds on an idle machine."""


def left_by(mark: str) -> list[int]:
    """Processes that were started by the demo, directly or not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return [pid for pid in found if is_running(pid)]


def test_the_demo_shows_each_part_and_leaves_nothing_running(tmp_path: Path) -> None:
    mark = unique("demo")
    environment = {**os.environ, "DEMO_MARK": mark, "TMPDIR": str(tmp_path)}
    installed = {path: path.stat().st_mtime for path in (ROOT / ".venv").glob(".installed-*")}
    if {"embedded", "flower"} - {path.name.removeprefix(".installed-") for path in installed}:
        pytest.skip("scripts/demo would make an environment first: these tests run in another one")
    demo = subprocess.run(
        [ROOT / "scripts/demo"],
        cwd=tmp_path,
        env=environment,
        timeout=MOST_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    for line in (
        r"Redis +redis://127\.0\.0\.1:\d+",
        r" +\d+\.\d+ s  printed +January is done",
        r" +\d+\.\d+ s  progress +3 of 3",
        r"  stopped \d+\.\d ms after the call",
        r" +'published'",
        r" +\d+\.\d+ s  lost +with its worker; another attempt follows",
        r" +'receipt (\w+) for 42 euros, shipped to Lyon'",
        r" +(PermissionError: .*Permission denied: '/etc/passwd'|this machine cannot confine)",
        r"  group +100 pages, 0\.2 s each, were awaited together in \d",
        r"  chord +sum of squares: \d+, in \d",
        r"  session +blocking child \d+ of \w+@demo has run \d+ tasks",
        r"  session +async child \d+ of \w+@demo has run 1\d\d tasks",
        r"Flower +http://127\.0\.0\.1:\d+/workers",
    ):
        assert re.search(f"^{line}", demo.stdout, re.MULTILINE), f"{line}:\n{demo.stdout}"
    receipts = dict(re.findall(r"process (\d+): receipt (\w+)", demo.stdout))
    assert len(receipts) > 1, "the task ran on one worker only"
    assert len(set(receipts.values())) == 1, "the step ran twice"
    eventually(lambda: not left_by(mark), f"the end of {left_by(mark)}")
    assert not list(tmp_path.iterdir())
    now = {path: path.stat().st_mtime for path in (ROOT / ".venv").glob(".installed-*")}
    assert now == installed, "the environment of the tests was installed again"
