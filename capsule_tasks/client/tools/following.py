"""Follows the execution of a tool call: its events become events of the run."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from contextlib import aclosing
from typing import Any

import msgspec

from capsule_tasks.client.execution import Execution
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import CapsuleError, InternalError, RunNotFound
from capsule_tasks.protocol.events import AttemptClaimed, Ended, SessionRestored
from capsule_tasks.protocol.messages import Gap, InputRequest, Output, Progress
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.storage.executions.types import Event

MAX_SHOWN_CHARS = 32 * 1024
"""The most output of one call in the events of its run; the execution's stream has the rest."""
_RUN_ENDS_S = 5.0
"""How long a call that was cancelled waits to learn whether its run ends, too."""

_IDS = uuid.UUID("6f1dbb0c-6b0e-4b7e-9d55-4f5ac2c0d3a1")
_stopping: set[asyncio.Task[None]] = set()
"""The event loop holds tasks weakly."""


def execution_id(ctx: ToolContext, number: int = 0) -> str:
    """The id of the execution of a tool call: the same for whoever makes this call again."""
    return str(uuid.uuid5(_IDS, "\0".join((ctx.run_id, ctx.key, str(number)))))


class BoundedText:
    """The beginning and the end of a text that may be of any size."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = ""
        self._tail: deque[str] = deque()
        self._tail_chars = 0
        self._left_out = 0

    def add(self, text: str) -> None:
        room = self._half - len(self._head)
        self._head += text[:room]
        if rest := text[room:]:
            self._tail.append(rest)
            self._tail_chars += len(rest)
            while self._tail and self._tail_chars - len(self._tail[0]) >= self._half:
                dropped = len(self._tail.popleft())
                self._tail_chars -= dropped
                self._left_out += dropped

    @property
    def text(self) -> str:
        tail = "".join(self._tail)
        more = max(0, len(tail) - self._half)
        left_out = self._left_out + more
        note = f"\n[{left_out} characters are left out here]\n" if left_out else ""
        return self._head + note + tail[more:]


def bounded(text: str, limit: int) -> str:
    """The text, or its beginning and its end with a note between them."""
    if len(text) <= limit:
        return text
    short = BoundedText(limit)
    short.add(text)
    return short.text


def as_text(value: Any) -> str:
    """A value as a model reads it: text as it is, others as JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value, enc_hook=repr).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


class Follower:
    """Watches one execution to its end, and publishes what it does as events of the run."""

    def __init__(self, ctx: ToolContext, execution: Execution, limit: int) -> None:
        self.execution = execution
        self.has_begun = False
        self.restored: SessionRestored | None = None
        self._ctx = ctx
        self._output = BoundedText(limit)
        self._missing_bytes = 0
        self._shown = 0

    @property
    def output(self) -> str:
        """The text that the execution wrote, with notes about what is missing."""
        note = f"[{self._missing_bytes} bytes of output are lost]\n" if self._missing_bytes else ""
        return note + self._output.text

    async def end(self, *, answers_input: bool = False) -> Event:
        """Wait for the last event. With `answers_input` each question gets the end of input."""
        self._publish("tool_execution", {"execution": self.execution.id})
        async with aclosing(self.execution.aevents()) as events:
            async for event in events:
                match event.message:
                    case Ended():
                        return event
                    case AttemptClaimed():
                        self.has_begun = True
                    case SessionRestored() as restored:
                        self.restored = restored
                    case Output(data=text):
                        self._output.add(text)
                        self._show(text)
                    case Gap(lost_bytes=lost):
                        self._missing_bytes += lost
                    case Progress(done=done, total=total, note=note):
                        about = {"done": done, "total": total, "note": note}
                        self._publish("tool_progress", about)
                    case InputRequest(id=request, prompt=prompt):
                        if answers_input:
                            await self.execution.arespond("", request_id=request, eof=True)
                        else:
                            self._publish("tool_question", {"prompt": prompt})
        raise InternalError(f"the events of execution {self.execution.id!r} came to no end")

    def _show(self, text: str) -> None:
        if self._shown <= MAX_SHOWN_CHARS:
            self._publish("tool_text", {"text": text[: MAX_SHOWN_CHARS - self._shown]})
        self._shown += len(text)

    def _publish(self, kind: str, data: dict[str, Any]) -> None:
        if self._ctx.publish is not None:
            about = {"tool": self._ctx.tool, "call_id": self._ctx.call_id}
            self._ctx.publish(kind, about | data)


async def stop_with_run(ctx: ToolContext, execution: Execution) -> None:
    """Cancel the execution of a call that is cut, if that is so because its run ends.

    A durable run that is only handed to another worker keeps the execution, which that worker
    waits for. So its end is waited for in the background. A run of this process ends here.
    """
    is_left_to_others = asyncio.Event()
    stopping = asyncio.create_task(_stop_with_run(ctx.run_id, execution, is_left_to_others))
    _stopping.add(stopping)
    stopping.add_done_callback(_stopping.discard)
    leaving = asyncio.create_task(is_left_to_others.wait())
    await asyncio.wait({stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()


async def _stop_with_run(run_id: str, execution: Execution, is_left: asyncio.Event) -> None:
    try:
        runs = (await watch_thread.watcher(execution.app)).runs
        record = await runs.read(run_id, with_snapshot=False)
        if not record.cancelled_by:
            is_left.set()
            await runs.wait(run_id, timeout_s=_RUN_ENDS_S)
    except RunNotFound:  # it is a run of this process
        pass
    except CapsuleError:  # the run goes on, or nobody can say
        is_left.set()
        return
    await execution.acancel()
