"""`python -m capsule_tasks.sessions`: a session by hand."""

from __future__ import annotations

import argparse
import os
import re
import sys

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.sessions.console import Console
from capsule_tasks.sessions.console.local import LocalSession
from capsule_tasks.settings import ChildSettings, LimitSettings, SessionConfig

EXIT_BROKEN_PIPE = 141
"""The status that a shell reports for a process that SIGPIPE killed: 128 + SIGPIPE."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m capsule_tasks.sessions",
        description="Python in a session of its own: type code, or pipe it in. With a pipe the "
        "exit status is 1 if the last execution failed.",
    )
    parser.add_argument("-c", "--warmup", metavar="CODE", help="run CODE before the first prompt")
    parser.add_argument("--cwd", metavar="DIR", help="the child's working directory")
    parser.add_argument(
        "--memory", metavar="SIZE", type=_size, help="limit the child's memory, as in 512M or 2G"
    )
    arguments = parser.parse_args()
    try:
        limits = LimitSettings(memory_bytes=arguments.memory)
    except InvalidSetting as error:
        parser.error(str(error))
    child = ChildSettings(limits=limits)
    config = SessionConfig(child=child, cwd=arguments.cwd, warmup=arguments.warmup)
    try:
        return Console(LocalSession(config)).main()
    except BrokenPipeError:
        # The interpreter would try to write the rest at its exit, and report that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _size(text: str) -> int:
    """`512M` in bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 512M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


if __name__ == "__main__":
    sys.exit(main())
