"""A flight recorder: what each session saw lately, and the report when something hangs."""

from __future__ import annotations

import asyncio
import io
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

from capsule_tasks.protocol.messages import Heartbeat, Message, Output, Terminal
from capsule_tasks.sessions import Session, SessionState

T = TypeVar("T")
_FRAMES = 6
_RESTING = (SessionState.READY, SessionState.IDLE)


class Recorder:
    """Watches one session; `violations` are broken promises that no caller would notice."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.violations: list[str] = []
        self._log: deque[str] = deque(maxlen=300)
        self._ends: dict[str, int] = {}
        self._resting_since = 0.0
        session.add_message_interceptor(self._see)
        session.add_state_listener(self._on_state)

    def note(self, text: str) -> None:
        self._log.append(f"{time.monotonic():.4f} {text}")

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        """Await `work`; after so long it counts as hanging, and the report shows where."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            raise AssertionError(f"{what} hangs\n{await self.report()}")
        return task.result()

    async def report(self) -> str:
        """The event log, the session, every task and thread, and the child."""
        out = io.StringIO()
        print(f"--- session {self.session.session_id}", *self._log, sep="\n", file=out)
        print(f"--- info\n{self.session.info}", file=out)
        for task in asyncio.all_tasks():
            print(f"--- {task!r}", file=out)
            task.print_stack(limit=_FRAMES, file=out)
        for ident, frame in sys._current_frames().items():
            print(f"--- thread {ident}", file=out)
            traceback.print_stack(frame, limit=_FRAMES, file=out)
        print(f"--- child\n{await self._child()}", file=out)
        return out.getvalue()

    async def _child(self) -> str:
        child: Any = self.session._child
        if child is None or child.is_over:
            return "there is none"
        pid = child.process.pid
        return f"{pid} {child.process.process_stats()}\n{await child.process.dump_stacks(1.0)}"

    def _on_state(self, old: SessionState, new: SessionState) -> None:
        self.note(f"state {old} -> {new}")
        child: Any = self.session._child
        if new is SessionState.WARMING:
            self._ends.clear()
        if new in _RESTING:
            self._resting_since = time.monotonic()
            if running := self.session.info.running:
                self.violations.append(f"{new} while {running} run")
            if child is None or child.is_over:
                self.violations.append(f"{new} without a live child")

    def _see(self, message: Message) -> None:
        if isinstance(message, Heartbeat):
            executions = [name for name in message.running if "/" in name]  # not a checkpoint
            late = message.timestamp > self._resting_since and self.session.state in _RESTING
            if late and executions:
                self.violations.append(f"{self.session.state} while {executions} run")
            return
        self.note(_summary(message))
        if isinstance(message, Terminal):
            ends = self._ends[message.execution_id] = self._ends.get(message.execution_id, 0) + 1
            if ends > 1:
                self.violations.append(f"{message.execution_id} was ended twice by the child")


def _summary(message: Message) -> str:
    fields = [type(message).__name__]
    for name in ("execution_id", "in_reply_to", "kind", "type", "done", "reason", "error"):
        value = getattr(message, name, None)
        if value:
            fields.append(f"{name}={value}")
    if isinstance(message, Output):
        fields.append(f"{message.stream} {len(message.data)} characters {message.data[:30]!r}")
    return " ".join(fields)
