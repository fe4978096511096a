"""A session of this process as what a console runs code in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Literal, cast

import capsule_tasks
from capsule_tasks.errors import SessionLost, SessionStateError
from capsule_tasks.protocol import messages as wire
from capsule_tasks.sessions.console.commands import (
    Command,
    CommandError,
    commands_of,
    namespace_table,
    table,
)
from capsule_tasks.sessions.console.foreground import show
from capsule_tasks.sessions.console.frontend import Frontend
from capsule_tasks.sessions.info import Health
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import SessionConfig


class LocalSession:
    """A session that starts and ends with its console. Shows what belongs to no execution, too."""

    def __init__(self, config: SessionConfig) -> None:
        self.session = Session(config)
        self.session.add_state_listener(self._on_state)
        self.session.add_health_listener(self._on_health)
        self.commands = COMMANDS
        self._tasks: set[asyncio.Task[object]] = set()

    async def start(self, frontend: Frontend, is_idle: Callable[[], bool]) -> str:
        self._frontend, self._is_idle = frontend, is_idle
        started_at = time.monotonic()
        await self.session.start()
        elapsed_ms = (time.monotonic() - started_at) * 1000
        python = self.session.info.metadata["python"]
        return (
            f"capsule_tasks {capsule_tasks.__version__}: Python {python} in a session of its own, "
            f"ready after {elapsed_ms:.0f} ms."
        )

    async def stop(self) -> None:
        await self.session.shutdown()
        await self._listen()  # what `atexit` and `finally` wrote

    async def kill(self) -> None:
        await self.session.terminate()
        await self._listen()

    def execute(self, source: str, execution_id: str) -> AsyncGenerator[wire.Message, None]:
        return self.session.execute(source, execution_id=execution_id, on_busy="wait")

    async def answer(self, question: wire.InputRequest, line: str | None) -> None:
        await self.session.input_response(
            line or "",
            request_id=question.id,
            execution_id=question.execution_id,
            eof=line is None,
        )

    async def cancel(self, execution_id: str) -> str:
        return await self.session.cancel(execution_id)

    def _on_state(self, old: SessionState, new: SessionState) -> None:
        if old is SessionState.WARMING and new is SessionState.READY:
            self._spawn(self._listen())
        if new is SessionState.ERROR and self._is_idle():
            self._frontend.note(f"{self.session.info.last_error}; :restart starts a new child")

    def _on_health(self, health: Health) -> None:
        how = "does not respond; :restart replaces it" if health.unresponsive else "responds again"
        self._frontend.note(f"the child {how}")

    async def _listen(self) -> None:
        """Show late output and the child's own log."""
        with contextlib.suppress(SessionLost, SessionStateError, BrokenPipeError):
            while True:
                show(self._frontend, await self.session.receive_message())

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- commands ----------------------------------------------------------------------------------


async def _info(target: LocalSession) -> str:
    info = target.session.info
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
    return table(
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


async def _names(target: LocalSession) -> str:
    summary = await target.session.namespace_summary()
    return namespace_table(summary.entries, summary.total)


async def _stack(target: LocalSession) -> str:
    return await target.session.stack() or "no stack was given"


async def _checkpoint(target: LocalSession, file: str) -> str:
    saved = await target.session.checkpoint()
    await asyncio.to_thread(_write_private, file, saved.pieces)
    lines = [f"saved {len(saved.saved)} names in {file} ({saved.size} bytes)"]
    lines += [f"not saved: {name}: {reason}" for name, reason in saved.skipped.items()]
    return "\n".join(lines)


async def _restore(target: LocalSession, file: str, mode: str = "merge") -> str:
    if mode not in ("merge", "replace"):
        raise CommandError(f"unknown mode {mode!r}: merge keeps other names, replace drops them")
    data = await asyncio.to_thread(_read, file)
    restored = await target.session.restore(data, cast("Literal['merge', 'replace']", mode))
    names = restored.names
    lines = [f"restored {len(names)} names: {', '.join(names)}" if names else "restored no names"]
    lines += [f"lost: {name}: {reason}" for name, reason in restored.lost.items()]
    lines += [f"{name}: {versions}" for name, versions in restored.differences.items()]
    return "\n".join(lines)


async def _interrupt(target: LocalSession) -> str:
    outcome = await target.session.interrupt()
    return "nothing is running" if outcome == "not_running" else outcome


async def _restart(target: LocalSession) -> str:
    started_at = time.monotonic()
    await target.session.restart()
    elapsed_ms = (time.monotonic() - started_at) * 1000
    return f"a new child was ready after {elapsed_ms:.0f} ms; it has no names"


def _read(file: str) -> bytes:
    return Path(file).expanduser().read_bytes()


def _write_private(file: str, pieces: Iterable[bytes]) -> None:
    """Write a file that only its owner may read: all of it under its name, or nothing."""
    path = Path(file).expanduser()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as half:
            half.writelines(pieces)
            half.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


COMMANDS = commands_of(
    Command(":info", "state, process, memory, counts", _info, works_while_running=True),
    Command(":names", "names, types and sizes", _names, works_while_running=True),
    Command(":stack", "where every thread is", _stack, works_while_running=True),
    Command(":checkpoint FILE", "save the namespace", _checkpoint),
    Command(":restore FILE [merge|replace]", "bring a saved namespace back", _restore),
    Command(":interrupt", "KeyboardInterrupt in what runs", _interrupt, works_while_running=True),
    Command(":restart", "start again with a new child", _restart),
)
