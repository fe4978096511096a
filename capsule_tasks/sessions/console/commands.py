"""The `:commands` of the console."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, cast

from capsule_tasks.errors import CallerError
from capsule_tasks.sessions.session import Session

_ALSO = """
Anything else is Python; `await` works at the top level. A blank line ends a block. Ctrl-C stops
what runs, Ctrl-D leaves. While code runs, these commands work too:
"""


class CommandError(CallerError):
    """A command was not understood."""


class Leave(Exception):
    """The person wants to go."""


@dataclasses.dataclass(frozen=True)
class Command:
    """`call(session, *words)` does it and returns what there is to show."""

    usage: str
    summary: str
    call: Callable[..., Coroutine[Any, Any, str]]
    works_while_running: bool = False


def parse(session: Session, line: str) -> tuple[Command, Callable[[], Coroutine[Any, Any, str]]]:
    """The command that a line names, and the call of it; CommandError if there is none."""
    try:
        name, *words = shlex.split(line)
    except ValueError as fault:
        raise CommandError(f"{line}: {fault}") from None
    if name not in COMMANDS:
        raise CommandError(f"there is no command {name}; :help lists them")
    command = COMMANDS[name]
    try:
        inspect.signature(command.call).bind(session, *words)
    except TypeError:
        raise CommandError(f"usage: {command.usage}") from None
    return command, lambda: command.call(session, *words)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


async def _help(_session: Session) -> str:
    usages = _table([(command.usage, command.summary) for command in COMMANDS.values()])
    also = " ".join(name for name, command in COMMANDS.items() if command.works_while_running)
    return f"{usages}\n{_ALSO}{also}"


async def _info(session: Session) -> str:
    info = session.info
    beat, inputs, queues = info.last_heartbeat, info.inputs, info.queues
    child = usage = "none yet"
    if info.metadata:
        child = (
            f"pid {info.pid}, Python {info.metadata['python']}, "
            f"protocol version {info.metadata['protocol_version']}"
            f"{', unresponsive' if info.health.unresponsive else ''}"
        )
    if beat is not None:
        usage = (
            f"{beat.rss_bytes / 2**20:.1f} MiB of memory, {beat.cpu_s:.2f} s of CPU, "
            f"{beat.threads} threads, {beat.namespace_size} names, "
            f"{time.monotonic() - (info.last_heartbeat_at or 0):.1f} s ago"
        )
    answers = f"{inputs.answered} answered, {inputs.timeouts} timed out, {inputs.cancels} cancelled"
    handled = f"{queues.control_handled} control, {queues.bulk_handled} bulk"
    return _table(
        [
            ("session", f"{info.session_id}: {info.state}, restarted {info.restarts} times"),
            ("child", child),
            ("usage", usage),
            ("executions", f"{info.execution_count}, {info.error_count} of them with an error"),
            ("running", ", ".join(info.running) or "nothing"),
            ("inputs", f"{inputs.pending} open, {answers}"),
            ("messages", f"{handled}, {queues.buffered_messages} waiting"),
            ("last error", info.last_error or "none"),
        ]
    )


async def _names(session: Session) -> str:
    summary = await session.namespace_summary()
    rows = [
        (entry.name, "(withheld)" if entry.redacted else f"{entry.type_name}, {entry.size} bytes")
        for entry in summary.entries
    ]
    if summary.total > len(rows):
        rows.append(("…", f"and {summary.total - len(rows)} more"))
    return _table(rows) or "no names yet"


async def _stack(session: Session) -> str:
    return await session.stack() or "no stack was given"


async def _checkpoint(session: Session, file: str) -> str:
    saved = await session.checkpoint()
    assert saved.data is not None
    await asyncio.to_thread(_write_private, file, saved.data)
    lines = [f"saved {len(saved.saved)} names in {file} ({len(saved.data)} bytes)"]
    lines += [f"not saved: {name}: {reason}" for name, reason in saved.skipped.items()]
    return "\n".join(lines)


async def _restore(session: Session, file: str, mode: str = "merge") -> str:
    if mode not in ("merge", "replace"):
        raise CommandError(f"unknown mode {mode!r}: merge keeps other names, replace drops them")
    data = await asyncio.to_thread(_read, file)
    names = await session.restore(data, cast("Literal['merge', 'replace']", mode))
    return f"restored {len(names)} names: {', '.join(names)}" if names else "restored no names"


async def _interrupt(session: Session) -> str:
    outcome = await session.interrupt()
    return "nothing is running" if outcome == "not_running" else outcome


async def _restart(session: Session) -> str:
    started_at = time.monotonic()
    await session.restart()
    elapsed_ms = (time.monotonic() - started_at) * 1000
    return f"a new child was ready after {elapsed_ms:.0f} ms; it has no names"


async def _quit(_session: Session) -> str:
    raise Leave


def _read(file: str) -> bytes:
    return Path(file).expanduser().read_bytes()


def _write_private(file: str, data: bytes) -> None:
    """Write a file that only its owner may read: all of it under its name, or nothing."""
    path = Path(file).expanduser()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as half:
            half.write(data)
            half.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command(":help", "this list", _help, works_while_running=True),
        Command(":info", "state, process, memory, counts", _info, works_while_running=True),
        Command(":names", "names, types and sizes", _names, works_while_running=True),
        Command(":stack", "where every thread is", _stack, works_while_running=True),
        Command(":checkpoint FILE", "save the namespace", _checkpoint),
        Command(":restore FILE [merge|replace]", "bring a saved namespace back", _restore),
        Command(
            ":interrupt", "KeyboardInterrupt in what runs", _interrupt, works_while_running=True
        ),
        Command(":restart", "start again with a new child", _restart),
        Command(":quit", "leave, as Ctrl-D does", _quit),
    )
}
