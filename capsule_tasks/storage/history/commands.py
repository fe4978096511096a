"""Commands for histories: show, export, import, clear. Each returns an exit status."""

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
"""Something was not done, or done only in part; standard error says what."""


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `history` and its commands to a program's commands."""
    history = groups.add_parser("history", help="show, export, import or clear a session's history")
    commands = history.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help_: str
    ) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=help_, description=help_)
        parser.set_defaults(run=run)
        parser.add_argument("session", help="id of the session")
        url = redis_url_of_environment() or DEFAULT_URL
        url_help = f"of Redis (default: $CAPSULE_REDIS_URL, or {DEFAULT_URL})"
        parser.add_argument("--url", default=url, help=url_help)
        parser.add_argument("--prefix", default="capsule", help="of the keys (%(default)s)")
        return parser

    show = command("show", run_show, "show the size and times of a history, and its latest items")
    show.add_argument("--last", type=int, default=SHOWN, help="number of items (%(default)s)")
    export = command("export", run_export, "write each item as a line of JSON")
    export.add_argument("--to", metavar="FILE", type=Path, help="instead of standard output")
    load = command("import", run_import, "append lines of JSON as items, all in one step")
    load.add_argument("--from", dest="source", metavar="FILE", type=Path, help="not standard input")
    load.add_argument("--strict", action="store_true", help="import nothing if a line is bad")
    clear = command("clear", run_clear, "remove a history and its quarantine")
    clear.add_argument("--yes", action="store_true", help="else only show what would be removed")


def run_show(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as history:
        info = history.info()
        snapshot = history.read(max(0, arguments.last))
    if not info.exists:
        return _fail(f"session {arguments.session!r} has no history")
    expires = "never" if info.expires_in_s is None else f"in {info.expires_in_s:.0f} s"
    # ASCII on one line, like the items below, whatever the id contains.
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
    if bad and arguments.strict:
        return _fail(f"nothing imported: {bad} bad lines")
    with _opened(arguments) as history:
        # The version of an empty read replaces nothing, so the items are appended, in one step.
        history.replace(history.read(0).version, items)
    print(f"{len(items)} items imported, {bad} bad lines skipped", file=sys.stderr)
    return FAILED if bad else OK


def run_clear(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as history:
        info = history.info()
        if not arguments.yes:
            what = f"{info.items} items and {info.quarantined} records in quarantine"
            return _fail(f"{what} would be removed; say --yes to remove them")
        history.clear_session()
    print(f"{info.items} items removed", file=sys.stderr)
    return OK


def _opened(arguments: argparse.Namespace) -> SyncHistory:
    settings = HistorySettings(prefix=arguments.prefix)
    return SyncHistory(arguments.session, arguments.url, settings=settings)


def _parsed(lines: Iterable[bytes]) -> tuple[list[Item], int]:
    """The items of lines of JSON, and the number of bad lines, which are reported and skipped."""
    items: list[Item] = []
    bad = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(decoded(line.strip()))
        except Unreadable as why:
            print(f"line {number} is skipped: {why}", file=sys.stderr)
            bad += 1
    return items, bad


def _write(items: Iterable[Item], stream: TextIO) -> None:
    # ASCII, since a terminal's encoding may lack characters of an item.
    stream.writelines(json.dumps(item) + "\n" for item in items)


def _warn_about_quarantine(snapshot: Snapshot) -> int:
    if snapshot.corrupt:
        return _fail(f"{snapshot.corrupt} corrupt records skipped")
    return OK


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return FAILED
