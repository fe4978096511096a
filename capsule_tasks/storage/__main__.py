"""`python -m capsule_tasks.storage`: look at what Redis holds, and move it."""

from __future__ import annotations

import argparse
import os
import sys

from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage.history import commands

EXIT_BROKEN_PIPE = 141
"""As a shell reports a process that wrote into a closed pipe: 128 + SIGPIPE."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m capsule_tasks.storage",
        description="What capsule_tasks keeps in Redis. The exit status is 1 if something failed "
        "or records were bad.",
    )
    commands.add_parser(parser.add_subparsers(required=True, metavar="WHAT"))
    arguments = parser.parse_args()
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would try again to write what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (CapsuleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return commands.FAILED
    return status


if __name__ == "__main__":
    sys.exit(main())
