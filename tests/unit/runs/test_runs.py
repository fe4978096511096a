"""The public names of runs, and what loading the package costs."""

from __future__ import annotations

import subprocess
import sys

import capsule_tasks
from capsule_tasks import runs


def test_every_public_name_is_there() -> None:
    assert [name for name in runs.__all__ if not hasattr(runs, name)] == []
    assert [name for name in capsule_tasks.__all__ if not hasattr(capsule_tasks, name)] == []
    assert not hasattr(runs, "no_such_name")


def test_states_are_read_without_the_modules_of_agents() -> None:
    program = (
        "import sys, capsule_tasks.runs as runs; runs.RunState;"
        "print([name for name in sys.modules if name.startswith('capsule_tasks.runs.agents')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"
