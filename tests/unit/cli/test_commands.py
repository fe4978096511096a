"""The commands that Celery loads by its entry point."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_does_not_load_rich() -> None:
    check = "import sys, capsule_tasks.cli; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
