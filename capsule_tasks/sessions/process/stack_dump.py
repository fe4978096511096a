"""Stacks of a child that does not answer, taken with `faulthandler`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from capsule_tasks.protocol.messages import Stack
from capsule_tasks.sessions.process.child_process import STACK_SIGNAL, ChildProcess

_READ_BYTES = 64 * 1024
_QUIET_S = 0.003
"""A dump comes in many small writes; after such a pause it may have ended."""
_FINISH_S = 1.0
"""For the rest of a dump that has started: on a busy machine it pauses in the middle."""


async def dump(process: ChildProcess, timeout_s: float) -> str:
    """The stacks that `faulthandler` writes on a signal, even while the GIL is held.

    Empty if the process is stopped. Concurrent callers share one dump.
    """
    if process.descriptors.stacks < 0 or process.exited.done():
        return ""
    if process.dumping is None or process.dumping.done():
        process.dumping = asyncio.get_running_loop().create_task(_dump(process, timeout_s))
    return await asyncio.shield(process.dumping)


async def _dump(process: ChildProcess, timeout_s: float) -> str:
    if process.process_stats()[0] == "T":
        return ""
    loop = asyncio.get_running_loop()
    read_final_output(process)
    arrived = asyncio.Event()
    loop.add_reader(process.descriptors.stacks, arrived.set)
    deadline = time.monotonic() + timeout_s
    text = ""
    never_handling = process.threads_blocking(STACK_SIGNAL)
    try:
        process.signal(STACK_SIGNAL)
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), min(left, _QUIET_S) if text else left)
            arrived.clear()
            at_end = process.exited.done() or (
                text and process.threads_blocking(STACK_SIGNAL) <= never_handling
            )
            more = read_final_output(process)
            if more and not text:
                deadline = max(deadline, time.monotonic() + _FINISH_S)
            text += more
            if at_end:
                break
    finally:
        if process.descriptors.stacks >= 0:
            loop.remove_reader(process.descriptors.stacks)
    return _without_internal_frames(text)


def read_final_output(process: ChildProcess) -> str:
    """The text in the pipe: the rest of a dump, or the final output of a child that crashed."""
    text = b""
    with contextlib.suppress(OSError):
        while process.descriptors.stacks >= 0 and (
            data := os.read(process.descriptors.stacks, _READ_BYTES)
        ):
            text += data
    return text.decode("utf-8", "replace")


def to_text(stacks: list[Stack]) -> str:
    """Stacks in the form of a traceback, outermost frame first."""
    lines: list[str] = []
    for stack in stacks:
        owner = f" of execution {stack.execution_id}" if stack.execution_id else ""
        lines.append(f"{stack.kind} {stack.name}{owner} (most recent call last):")
        lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in stack.frames]
    return "\n".join(lines)


def _without_internal_frames(text: str) -> str:
    kept = [line for line in text.splitlines() if "capsule_tasks/child/" not in line]
    return "\n".join(kept)
