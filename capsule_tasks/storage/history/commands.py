"""Commands on histories: show, export, import, clear. Each returns an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from capsule_tasks.settings import HistorySettings, redis_url_of_environment
from capsule_tasks.storage.codec import Item, Unreadable, decoded
from capsule_tasks.storage.history.history import SyncHistory
from capsule_tasks.storage.history.types import Snapshot

DEFAULT_URL = "redis://localhost:6379/0"
SHOWN = 20

OK = 0
FAILED = 1
"""Something was not done, or only in part; standard error says what."""


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Put `history` with its commands among a program's commands."""
    history = groups.add_parser("history", help="show, export, import or clear a session's history")
    commands = history.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help_: str) -> _Parser:
        parser = commands.add_parser(name, help=help_, description=help_)
        parser.set_defaults(run=run)
        parser.add_argument("session", help="id of the session")
        parser.add_argument(
            "--url",
            default=redis_url_of_environment() or DEFAULT_URL,
            help=f"of Redis (default: CAPSULE_REDIS_URL of the environment, or {DEFAULT_URL})",
        )
        parser.add_argument("--prefix", default="capsule", help="of keys (default: %(default)s)")
        return parser

    show = command("show", run_show, "what is known of a history, and its latest items")
    show.add_argument("--last", type=int, default=SHOWN, help="items (default: %(default)s)")
    export = command("export", run_export, "every item as a line of JSON")
    export.add_argument("--to", metavar="FILE", type=Path, help="instead of standard output")
    load = command("import", run_import, "append lines of JSON, all in one step")
    load.add_argument("--from", dest="source", metavar="FILE", type=Path, help="not standard input")
    load.add_argument("--strict", action="store_true", help="import nothing if a line is bad")
    clear = command("clear", run_clear, "remove a history with its quarantine")
    clear.add_argument("--yes", action="store_true", help="without it only says what would go")


_Parser = argparse.ArgumentParser


def run_show(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as history:
        info = history.info()
        snapshot = history.read(max(0, arguments.last))
    if not info.exists:
        print(f"no history of session {arguments.session!r}", file=sys.stderr)
        return FAILED
    expires = "never" if info.expires_in_s is None else f"in {info.expires_in_s:.0f} s"
    # As the items below: a line of its own, whatever the id and the terminal are.
    print(f"session      {ascii(info.session_id)[1:-1]}")
    print(f"items        {info.items} ({info.bytes} bytes), {info.quarantined} in quarantine")
    print(f"created      {info.created_at:%Y-%m-%d %H:%M:%S} UTC")
    print(f"updated      {info.updated_at:%Y-%m-%d %H:%M:%S} UTC")
    print(f"expires      {expires}")
    print()
    _write(snapshot.items, sys.stdout)
    return _warn_about_quarantine(snapshot)


def run_export(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as history:
        snapshot = history.read()
    with arguments.to.open("w") if arguments.to else nullcontext(sys.stdout) as stream:
        _write(snapshot.items, stream)
    print(f"{len(snapshot.items)} items exported", file=sys.stderr)
    return _warn_about_quarantine(snapshot)


def run_import(arguments: argparse.Namespace) -> int:
    source = arguments.source.open("rb") if arguments.source else nullcontext(sys.stdin.buffer)
    with source as stream:
        items, bad = _parsed(stream)
    for number, why in bad:
        print(f"line {number} is skipped: {why}", file=sys.stderr)
    if bad and arguments.strict:
        print(f"nothing imported: {len(bad)} bad lines", file=sys.stderr)
        return FAILED
    with _opened(arguments) as history:
        # Nothing is read, so nothing is replaced: the lines come to stand at the end, in one step.
        history.replace(history.read(0).version, items)
    print(f"{len(items)} items imported, {len(bad)} bad lines skipped", file=sys.stderr)
    return FAILED if bad else OK


def run_clear(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as history:
        info = history.info()
        if not arguments.yes:
            print(
                f"{info.items} items and {info.quarantined} records in quarantine would go; "
                "say --yes to remove them",
                file=sys.stderr,
            )
            return FAILED
        history.clear_session()
    print(f"{info.items} items removed", file=sys.stderr)
    return OK


def _opened(arguments: argparse.Namespace) -> SyncHistory:
    settings = HistorySettings(prefix=arguments.prefix)
    return SyncHistory(arguments.session, arguments.url, settings=settings)


def _parsed(lines: Iterable[bytes]) -> tuple[list[Item], list[tuple[int, str]]]:
    items: list[Item] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(decoded(line.strip()))
        except Unreadable as why:
            bad.append((number, str(why)))
    return items, bad


def _write(items: Iterable[Item], stream: TextIO) -> None:
    # ASCII, so that a terminal's encoding cannot refuse what a model said.
    stream.writelines(json.dumps(item) + "\n" for item in items)


def _warn_about_quarantine(snapshot: Snapshot) -> int:
    if snapshot.corrupt:
        print(f"{snapshot.corrupt} corrupt records skipped", file=sys.stderr)
        return FAILED
    return OK
