"""kill -9 at random lines of a task with a step: the effect happens at most once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POINTS = max(40, int(200 * float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))))
SEED = os.environ.get("CAPSULE_CHAOS_SEED", "20261118")

pytestmark = pytest.mark.chaos


def test_an_effect_happens_at_most_once_and_a_recorded_output_is_never_lost(
    valkey_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.chaos.step_victim", valkey_url, str(POINTS), SEED]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert len(reports) == POINTS
    for report in reports:
        assert not any("error" in each for each in report["outcomes"]), report
        assert len(report["effects"]) <= 1, report
        outputs = [each["output"] for each in report["outcomes"] if not each["uncertain"]]
        assert all([output] == report["effects"] for output in outputs), report
        if report["recorded"]:
            assert len(outputs) == len(report["outcomes"]), f"a recorded output is lost: {report}"
        if not outputs:
            assert all(each["uncertain"] for each in report["outcomes"]), report
    kinds = {(report["happened"], report["recorded"]) for report in reports}
    assert sum(report["was_killed"] for report in reports) >= POINTS * 0.7
    assert kinds >= {(False, False), (True, False), (True, True)}, "kills came at too few places"
