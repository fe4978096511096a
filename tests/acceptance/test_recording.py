"""The recording in README, and `scripts/record`, which makes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from capsule_tasks import Execution
from capsule_tasks.cli import capsule
from scripts._record import CALLER, RECORDING, ROOT, WATCHER, shop_source, transcript
from tests.acceptance.workers import HANG_S

STALE = "the recording is stale: run scripts/record"


def lines_of(pane: str) -> str:
    return "\n".join(
        text for shown_in, text in transcript(RECORDING.read_text()) if shown_in == pane
    )


def test_readme_shows_the_recording() -> None:
    assert str(RECORDING.relative_to(ROOT)) in (ROOT / "README.md").read_text()


def test_the_recording_shows_commands_methods_and_tasks_that_exist() -> None:
    commands = re.findall(r"^\$ celery -A shop capsule (\w+)", lines_of(WATCHER), re.MULTILINE)
    assert commands
    assert set(commands) <= capsule.commands.keys(), STALE
    methods = re.findall(r"execution\.(\w+)\(", lines_of(CALLER))
    assert {"cancel", "get", "respond", "snapshot"} <= set(methods)
    assert all(callable(getattr(Execution, method, None)) for method in methods), STALE
    tasks = re.findall(r"(\w+)\.delay\(", lines_of(CALLER))
    assert tasks
    assert all(f"@app.task\ndef {task}(" in shop_source() for task in tasks), STALE


@pytest.mark.full
def test_a_new_recording_shows_the_same(tmp_path: Path) -> None:
    file = tmp_path / "recording.svg"
    recorded = subprocess.run(
        [sys.executable, "-P", ROOT / "scripts/_record.py", "--output", file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    assert transcript(file.read_text()) == transcript(RECORDING.read_text()), STALE
