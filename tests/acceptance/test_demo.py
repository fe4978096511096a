"""`scripts/demo`, as a visitor runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.workers import ROOT, eventually, is_running, unique

MOST_S = 120
"""It takes about ten seconds on an idle machine."""


def left_by(mark: str) -> list[int]:
    """Whoever was started by it, however far from home."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has gone, or is somebody else's
            continue
    return [pid for pid in found if is_running(pid)]


def test_it_shows_each_part_and_leaves_nothing_running(tmp_path: Path) -> None:
    mark = unique("demo")
    environment = {**os.environ, "DEMO_MARK": mark, "TMPDIR": str(tmp_path)}
    installed = {path: path.stat().st_mtime for path in (ROOT / ".venv").glob(".installed-*")}
    if {"embedded", "flower"} - {path.name.removeprefix(".installed-") for path in installed}:
        pytest.skip("it would make an environment first: these tests run in another one")
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
        r"group +100 pages awaited beside each other in \d",
        r"chord +sum of squares: \d+, in \d",
        r"session blocking child \d+ of celery@\S+ has run \d+ tasks",
        r"session async child \d+ of celery@\S+ has run 100 tasks",
        r"log +100 lines that tasks printed, the last: \S",
        r"Flower +http://127\.0\.0\.1:\d+/workers",
    ):
        assert re.search(f"^{line}", demo.stdout, re.MULTILINE), f"{line}:\n{demo.stdout}"
    eventually(lambda: not left_by(mark), f"the end of {left_by(mark)}")
    assert not list(tmp_path.iterdir())
    now = {path: path.stat().st_mtime for path in (ROOT / ".venv").glob(".installed-*")}
    assert now == installed, "what the tests run in was installed anew"
