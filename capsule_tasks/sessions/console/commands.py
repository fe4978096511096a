"""What a person can ask of a session besides running code: the `:commands` of the console."""

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
from capsule_tasks.sessions.info import SessionInfo
from capsule_tasks.sessions.session import Session


class CommandError(CallerError):
    """A command was not understood."""


class Leave(Exception):
    """The person wants to go."""


@dataclasses.dataclass(frozen=True)
class Command:
    """`call(session, *words)` does it and returns what there is to tell."""

    usage: str
    summary: str
    call: Callable[..., Coroutine[Any, Any, str]]
    works_while_running: bool = False

    def prepare(self, session: Session, words: list[str]) -> Coroutine[Any, Any, str]:
        """The work, ready to be awaited; CommandError if the words do not fit."""
        try:
            inspect.signature(self.call).bind(session, *words)
        except TypeError:
            raise CommandError(f"usage: {self.usage}") from None
        return self.call(session, *words)


def parse(line: str) -> tuple[Command, list[str]]:
    """The command that a line names, and the words behind it; CommandError if there is none."""
    try:
        name, *words = shlex.split(line)
    except ValueError as fault:
        raise CommandError(f"{line}: {fault}") from None
    command = COMMANDS.get(name)
    if command is None:
        raise CommandError(f"there is no command {name}; :help lists them")
    return command, words


async def _help(_session: Session) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.summary}" for command in COMMANDS.values()]
    lines.append("")
    lines.append("Anything else is Python; `await` works at the top level. A blank line ends a")
    lines.append("block. Ctrl-C stops what runs, Ctrl-D leaves. While code runs, these work too:")
    lines.append(" ".join(n for n, command in COMMANDS.items() if command.works_while_running))
    return "\n".join(lines)


async def _info(session: Session) -> str:
    info = session.info
    rows = [
        ("session", f"{info.session_id}: {info.state}, restarted {info.restarts} times"),
        ("child", _child(info)),
        ("usage", _usage(info)),
        ("executions", f"{info.execution_count}, {info.error_count} of them with an error"),
        ("running", ", ".join(info.running) or "nothing"),
        ("inputs", _inputs(info)),
        ("messages", _messages(info)),
        ("last error", info.last_error or "none"),
    ]
    return "\n".join(f"{name:<11}{value}" for name, value in rows)


def _child(info: SessionInfo) -> str:
    if info.pid is None:
        return "none"
    about = info.metadata
    if not about:
        return f"pid {info.pid}, starting"
    text = f"pid {info.pid}, Python {about['python']}, protocol version {about['protocol_version']}"
    return f"{text}, unresponsive" if info.health.unresponsive else text


def _usage(info: SessionInfo) -> str:
    beat, reported_at = info.last_heartbeat, info.last_heartbeat_at
    if beat is None or reported_at is None:
        return "not reported yet"
    return (
        f"{beat.rss_bytes / 2**20:.1f} MiB of memory, {beat.cpu_s:.2f} s of CPU, {beat.threads} "
        f"threads, {beat.namespace_size} names, {time.monotonic() - reported_at:.1f} s ago"
    )


def _inputs(info: SessionInfo) -> str:
    inputs = info.inputs
    return (
        f"{inputs.pending} open, {inputs.answered} answered, {inputs.timeouts} timed out, "
        f"{inputs.cancels} cancelled"
    )


def _messages(info: SessionInfo) -> str:
    queues = info.queues
    return (
        f"{queues.control_handled} control, {queues.bulk_handled} bulk, "
        f"{queues.buffered_messages} waiting ({queues.buffered_bytes} bytes)"
    )


async def _names(session: Session) -> str:
    summary = await session.namespace_summary()
    width = max((len(entry.name) for entry in summary.entries), default=0)
    lines = [
        f"{e.name:<{width}}  {'(withheld)' if e.redacted else f'{e.type_name}, {e.size} bytes'}"
        for e in summary.entries
    ]
    if summary.total > len(lines):
        lines.append(f"… and {summary.total - len(lines)} more")
    return "\n".join(lines) or "no names yet"


async def _stack(session: Session) -> str:
    return await session.stack() or "no stack was given"


async def _checkpoint(session: Session, file: str) -> str:
    saved = await session.checkpoint()
    assert saved.data is not None
    await asyncio.to_thread(_write_private, file, saved.data)
    lines = [f"saved {len(saved.saved)} names in {file} ({len(saved.data)} bytes)"]
    lines += [f"not saved: {name}: {why}" for name, why in saved.skipped.items()]
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
    begun = time.monotonic()
    await session.restart()
    return (
        f"a new child was ready after {(time.monotonic() - begun) * 1000:.0f} ms; it has no names"
    )


async def _quit(_session: Session) -> str:
    raise Leave


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


def _read(file: str) -> bytes:
    return Path(file).expanduser().read_bytes()


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
        Command(":restart", "begin anew with a new child", _restart),
        Command(":quit", "leave, as Ctrl-D does", _quit),
    )
}
