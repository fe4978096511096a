"""The modules that a task passes, as `tests/acceptance/test_hops.py` counts them, in order.

With streams on and off, acknowledged late and early; `--calls` prints every call of ours.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.test_hops import TASKS, counted, hop_worker, title, ways_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench hops")
    parser.add_argument("--calls", action="store_true", help="print every call, codecs included")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        for streams in ("on", "off"):
            with hop_worker(server.url, Path(directory), streams) as worker:
                for task in TASKS:
                    for way, calls in ways_of(worker, task).items():
                        passed = counted(calls)
                        print(title(streams, task, way, passed), end="")
                        lines = calls if arguments.calls else passed
                        print(*(f"  {line}" for line in lines), "", sep="\n")


if __name__ == "__main__":
    main()
