"""The start of a child: spawn, handshake, warmup, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from capsule_tasks.errors import SessionStartFailed
from capsule_tasks.protocol.messages import Code, Error, Execute, Output, Terminal, new_id
from capsule_tasks.sessions.process import stack_dump
from capsule_tasks.sessions.process.child_process import ChildProcess
from capsule_tasks.sessions.process.live_child import LiveChild
from capsule_tasks.sessions.process.spawn import ChildDescriptors, Spawner
from capsule_tasks.sessions.stream import ExecutionStream
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from capsule_tasks.system.sandbox import directories

log = logging.getLogger("capsule_tasks.sessions")


async def start_process(spawner: Spawner, config: SessionConfig) -> ChildProcess:
    """Start a child process; nothing is left of one that did not start."""
    marker = new_id()  # of this child; a session may have had another one before
    with contextlib.ExitStack() as undo:
        sandbox_directory = None
        if config.child.sandbox is not None:
            directories.sweep_once()
            sandbox_directory = directories.SandboxDirectory()
            undo.callback(sandbox_directory.remove)
            config = msgspec.structs.replace(config, cwd=sandbox_directory.home)
        descriptors = undo.enter_context(ChildDescriptors())
        spawned = await spawner.spawn(descriptors, config, marker)
        undo.pop_all()
    return ChildProcess(spawned, descriptors, marker, asyncio.get_running_loop(), sandbox_directory)


async def await_ready(child: LiveChild, timeouts: TimeoutSettings) -> None:
    """Wait for the child's answer to Hello; SessionStartFailed carries its stack if none came."""
    try:
        async with asyncio.timeout(timeouts.ready_s):
            await asyncio.shield(child.ready)
    except TimeoutError:
        reason = f"the child was not ready within {timeouts.ready_s} s"
        raise await _failure(child, timeouts, reason) from None


async def warm_up(child: LiveChild, source: str, timeouts: TimeoutSettings) -> None:
    """Run the warmup code as an execution; its output goes to the log."""
    stream = child.open_stream("warmup")
    execute = Execute(
        execution_id=stream.execution_id,
        seq=stream.seq,
        payload=Code(source=source, filename="<warmup>"),
    )
    try:
        async with asyncio.timeout(timeouts.warmup_s):
            await child.send_bulk(execute)
            terminal = await _end_of(stream)
    except TimeoutError:
        reason = f"the warmup ran longer than {timeouts.warmup_s} s"
        raise await _failure(child, timeouts, reason) from None
    if isinstance(terminal, Error):
        failure = SessionStartFailed(f"the warmup failed: {terminal.type}: {terminal.message}")
        failure.add_note(terminal.traceback)
        raise failure


async def _end_of(stream: ExecutionStream) -> Terminal:
    while not isinstance(message := await stream.next(), Terminal):
        if isinstance(message, Output):
            log.debug("warmup: %s", message.data.rstrip())
    return message


async def _failure(child: LiveChild, timeouts: TimeoutSettings, reason: str) -> SessionStartFailed:
    stack = await stack_dump.dump(child.process, timeouts.stack_s)
    failure = SessionStartFailed(reason)
    failure.add_note(f"its last stack:\n{stack or '(it gave none)'}")
    return failure
