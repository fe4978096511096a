"""Stacks from a child that may be unable to answer: first asked, then taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from capsule_tasks.protocol.messages import Stack
from capsule_tasks.sessions.process import STACK_SIGNAL, ChildProcess

_READ_BYTES = 64 * 1024
_QUIET_S = 0.003
"""A dump comes in many small writes; so long a silence after the first is its end."""


async def dump(process: ChildProcess, timeout_s: float) -> str:
    """What `faulthandler` writes on a signal, GIL or not; empty if the process is stopped."""
    loop = asyncio.get_running_loop()
    if process.wires.stacks < 0 or process.exited.done():
        return ""
    leftover(process)
    arrived = asyncio.Event()
    loop.add_reader(process.wires.stacks, arrived.set)
    deadline = time.monotonic() + timeout_s
    text = ""
    try:
        process.signal(STACK_SIGNAL)
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), min(left, _QUIET_S) if text else left)
            arrived.clear()
            more = leftover(process)
            if not more and text:
                break
            text += more
    finally:
        if process.wires.stacks >= 0:
            loop.remove_reader(process.wires.stacks)
    return _without_machinery(text)


def leftover(process: ChildProcess) -> str:
    """What is in the pipe already: also the last words of a child that crashed."""
    text = b""
    with contextlib.suppress(OSError):
        while process.wires.stacks >= 0 and (data := os.read(process.wires.stacks, _READ_BYTES)):
            text += data
    return text.decode("utf-8", "replace")


def to_text(stacks: list[Stack]) -> str:
    """Stacks as a traceback reads, outermost frame first."""
    lines: list[str] = []
    for stack in stacks:
        owner = f" of execution {stack.execution_id}" if stack.execution_id else ""
        lines.append(f"{stack.kind} {stack.name}{owner} (most recent call last):")
        lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in stack.frames]
    return "\n".join(lines)


def _without_machinery(text: str) -> str:
    kept = [line for line in text.splitlines() if "capsule_tasks/child/" not in line]
    return "\n".join(kept)
