"""This checkout beside an earlier commit: CPU per task, rates and latency of workers in turns.

The commit is unpacked beside an environment of its own. What is measured, and how, is this
checkout's `tasks` benchmark for both; only the workers differ.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import Bar, report, use_plain_interpreters
from tests.benchmarks._worker import Kind
from tests.benchmarks.tasks import EARLY, LATE, ROUNDS, take_turns

KINDS = {
    "streams_on": LATE["capsule"],
    "streams_off": LATE["streams_off"],
    "early": EARLY["capsule_early"],
}
MOST_CPU = 1.03
LEAST_RATE = 0.9


def bars() -> list[Bar]:
    found = []
    for name, kind in KINDS.items():
        found.append(Bar(f"cpu_per_task_{name}_over_base", "<=", MOST_CPU))
        rates = ("drain", "steady") if kind.acks_late else ("drain",)
        found += [Bar(f"{rate}_{name}_over_base", ">=", LEAST_RATE) for rate in rates]
    return found


def install(commit: str, directory: Path) -> str:
    """Unpack a commit and install it as its own scripts do; its interpreter."""
    command = ["git", "archive", "--format=tar", commit]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(directory, filter="data")
    subprocess.run(
        ["bash", "-euc", ". scripts/_env.sh && environment .venv base"],
        cwd=directory,
        env=os.environ | {"PYTHON": sys._base_executable},  # type: ignore[attr-defined]
        check=True,
    )
    return str(directory / ".venv/bin/python")


def measure(url: str, base_python: str, rounds: int) -> dict[str, float]:
    both: dict[str, Kind] = {}
    for name, kind in KINDS.items():
        both |= {name: kind, f"{name}_base": replace(kind, python=base_python)}
    runs = take_turns(url, both, rounds)
    figures: dict[str, float] = {}
    for name, found in runs.items():
        figures |= found.figures(name)
    for name in KINDS:
        for figure, value in runs[name].over(runs[f"{name}_base"]).items():
            figures[f"{figure}_{name}_over_base"] = value
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench compare")
    parser.add_argument("commit", help="what to compare with, for example main~1")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often they take turns")
    arguments = parser.parse_args()
    use_plain_interpreters()
    with tempfile.TemporaryDirectory() as directory:
        base_python = install(arguments.commit, Path(directory) / "base")
        with PrivateServer(Path(directory) / "redis") as server:
            figures = measure(server.url, base_python, arguments.rounds)
    report(figures, bars(), as_json=arguments.json)


if __name__ == "__main__":
    main()
