"""Stopping executions: cancels, deadlines, limits and interrupts; a kill is the last resort."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Literal

from capsule_tasks.errors import FrameTooLarge, SessionLost
from capsule_tasks.protocol import messages as wire
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.stream import ExecutionStream, Stop
from capsule_tasks.settings import TimeoutSettings

if TYPE_CHECKING:
    from capsule_tasks.sessions.process.live_child import LiveChild

log = logging.getLogger("capsule_tasks.sessions")

StopOutcome = Literal["interrupted", "killed", "not_running"]

_FORCED = (wire.ErrorKind.KILLED, wire.ErrorKind.LOST_WITH_NEIGHBOUR)
_CPU_TICK_S = 0.01
"""The kernel counts CPU time in steps of this."""
_REQUESTED = (wire.ErrorKind.CANCELLED, wire.ErrorKind.TIMEOUT)
_MAX_NAMED = 10


@dataclasses.dataclass(frozen=True)
class KillReason:
    """Why a child ends, and what that means for its executions."""

    message: str
    kind: wire.ErrorKind
    target: str | None = None
    """The execution at fault; the others are lost with it."""
    stack: str = ""
    replace: bool = False
    """Whether the session should go on with a new child."""
    expected: bool = True
    """Whether the session ended the child; False for an exit or a fault of the child's own."""
    is_asked: bool = False
    """Whether the session's owner sent the child a signal that ends it."""
    ran: tuple[str, ...] = ()
    """The executions that were lost with the child."""

    def __str__(self) -> str:
        """For the log: what became of the child, with its executions."""
        ran = ", ".join(self.ran[:_MAX_NAMED]) or "nothing"
        if len(self.ran) > _MAX_NAMED:
            ran += f" and {len(self.ran) - _MAX_NAMED} more"
        lost = "ended its child as asked" if self.is_asked else "lost its child"
        return f"{lost}, which ran {ran}: {self.message}"


class Stopper:
    """Stops executions of one child: asks first, kills the child when the grace is over.

    The answers are never guessed: they come from the terminal message and the child's reply.
    """

    def __init__(self, child: LiveChild, timeouts: TimeoutSettings, counters: Counters) -> None:
        self._child = child
        self._timeouts = timeouts
        self._counters = counters
        self.condemners: dict[str, None] = {}

    @property
    def condemned_by(self) -> str | None:
        """The execution that does not stop, so that the child is about to be killed."""
        return next(iter(self.condemners), None)

    async def cancel(self, execution_id: str, grace_s: float | None) -> StopOutcome:
        stream = self._child.streams.get(execution_id)
        if stream is None:
            return "not_running"
        started = time.monotonic()
        outcome = await self.stop(stream, Stop(wire.ErrorKind.CANCELLED, "cancelled"), grace_s)
        self._counters.cancel_latencies_ms.append((time.monotonic() - started) * 1000)
        if outcome != "not_running":
            self.count_cancelled(stream)
        return outcome

    def count_cancelled(self, stream: ExecutionStream) -> None:
        """Count a cancelled execution once, however many callers cancel it."""
        self._counters.executions_cancelled += not stream.is_counted
        stream.is_counted = True

    async def stop(
        self, stream: ExecutionStream, stop: Stop, grace_s: float | None = None
    ) -> StopOutcome:
        """Ask, wait for the grace, then kill. Calls for one execution may overlap."""
        grace_s = self._timeouts.grace_s if grace_s is None else grace_s
        stream.stop = stream.stop or stop
        cancel = wire.Cancel(
            execution_id=stream.execution_id,
            seq=stream.seq,
            grace_s=grace_s,
            credit=stream.allow_cancel_credit(),
        )
        reply = self._child.router.expect(cancel)
        self._child.send_control(cancel)
        try:
            await asyncio.wait(
                {stream.ended, reply}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not stream.ended.done() and not reply.done():
                if stream.is_running or not self._running_neighbours(stream):
                    await self._force(stream)
                else:
                    self._child.end_unstarted(stream)
            return await self._outcome(stream, reply)
        finally:
            reply.cancel()

    async def stop_at_deadline(self, stream: ExecutionStream, message: str) -> None:
        """Record the stack of an execution whose deadline has passed, then stop it."""
        stack = await self.stack_text(stream.execution_id)
        await self.stop(stream, Stop(wire.ErrorKind.TIMEOUT, message, stack))

    async def kill_at_cpu_limit(self, stream: ExecutionStream, limit_s: float) -> None:
        """Kill the child of an execution that is past its limit of CPU time by the grace.

        The child stops the code at the limit itself, unless the code holds the GIL or catches the
        exception.
        """
        moments: set[asyncio.Future[Any]] = {stream.started, stream.ended}
        await asyncio.wait(moments, return_when=asyncio.FIRST_COMPLETED)
        process = self._child.process
        begun_at, used = process.process_stats()[1], 0.0
        max_used = limit_s + self._timeouts.grace_s
        while used < max_used:  # the limit cannot have been reached before
            await asyncio.wait({stream.ended}, timeout=max(max_used - used, _CPU_TICK_S))
            if stream.ended.done():
                return
            used = process.process_stats()[1] - begun_at
        message = f"CPU time limit of {limit_s} s: {used:.3f} s were used"
        stream.stop = stream.stop or Stop(wire.ErrorKind.LIMIT, message)
        await self._force(stream)

    async def interrupt(self, execution_id: str | None, *, force: bool) -> StopOutcome:
        """Raise KeyboardInterrupt in one execution or in all; with `force` kill what goes on."""
        targets = [
            stream
            for stream in self._child.streams.values()
            if execution_id in (None, stream.execution_id)
        ]
        if not targets:
            return "not_running"
        done: StopOutcome = "not_running"
        interrupted = [stream for stream in targets if stream.is_running]
        try:
            reply: wire.InterruptReply = await self._child.ask(
                wire.Interrupt(execution_id=execution_id), self._timeouts.grace_s
            )
            done = reply.done
            interrupted = [s for s in targets if s.execution_id in reply.execution_ids]
        except FrameTooLarge:  # the ids of many executions do not fit; they were interrupted
            done = "interrupted"
        except TimeoutError:
            pass  # the child does not answer: nothing was interrupted
        except SessionLost:  # another caller's cancel, or the code itself, ended the child first
            return "killed" if any(map(_was_forced, targets)) else "not_running"
        if force and interrupted:
            ends = {stream.ended for stream in interrupted}
            await asyncio.wait(ends, timeout=self._timeouts.grace_s)
            for stream in interrupted:
                if not stream.ended.done():
                    await self._force(stream)
                    return "killed"
        return done

    async def stack_text(self, execution_id: str | None = None) -> str:
        """The stacks from the control thread, or from `faulthandler` if it cannot answer.

        Of one execution, or of the whole child.
        """
        stacks = await self._ask_for_stacks(execution_id)
        if stacks is None:
            return await self._child.process.dump_stacks(self._timeouts.stack_s)
        return _to_text(stacks)

    async def _ask_for_stacks(self, execution_id: str | None) -> list[wire.Stack] | None:
        request = wire.StackRequest(execution_id=execution_id)
        try:
            reply: wire.StackReply = await self._child.ask(request, self._timeouts.stack_s)
        except (TimeoutError, SessionLost, FrameTooLarge):
            return None
        return reply.stacks

    async def _outcome(
        self, stream: ExecutionStream, reply: asyncio.Future[wire.CancelReply]
    ) -> StopOutcome:
        """Wait for terminal message and reply: they come on different channels, in any order."""
        with contextlib.suppress(TimeoutError, SessionLost):
            async with asyncio.timeout(self._timeouts.grace_s + self._timeouts.stack_s):
                if not stream.ended.done() and (await asyncio.shield(reply)).done != "not_running":
                    await asyncio.shield(stream.ended)
                if not stream.ended.done():
                    return "not_running"
                terminal = stream.ended.result()
                if isinstance(terminal, wire.Error) and terminal.kind in _REQUESTED + _FORCED:
                    return "killed" if stream.was_killed else "interrupted"
                return (await asyncio.shield(reply)).done
        return "not_running"

    async def _force(self, stream: ExecutionStream) -> None:
        """Kill the child of an execution that will not stop; its neighbours get `drain_s`.

        The child takes no executions meanwhile. It lives on if the execution stops after all.
        """
        self.condemners[stream.execution_id] = None
        try:
            reason = f"{stream.execution_id} did not stop"
            if self._running_neighbours(stream):
                reason += await self._main_thread_holder(stream)
                await self._let_neighbours_finish(stream, reason)
            stack = await self.stack_text(stream.execution_id)
            if not stream.ended.done():
                kill_reason = KillReason(
                    f"its child was killed because {reason}",
                    wire.ErrorKind.LOST_WITH_NEIGHBOUR,
                    replace=True,
                    target=stream.execution_id,
                    stack=stack or (stream.stop.stack if stream.stop is not None else ""),
                )
                self._child.kill(kill_reason)
                await asyncio.shield(self._child.ended)
        finally:
            self.condemners.pop(stream.execution_id, None)

    async def _main_thread_holder(self, stream: ExecutionStream) -> str:
        """Which neighbour has the main thread, so that no coroutine can be stopped; else empty."""
        own = (None, stream.execution_id)
        for stack in await self._ask_for_stacks(None) or ():
            if stack.kind == "thread" and stack.execution_id not in own:
                at = f" ({stack.frames[-1].function})" if stack.frames else ""
                return f" (the main thread was in {stack.execution_id}{at})"
        return ""

    def _running_neighbours(self, stream: ExecutionStream) -> list[ExecutionStream]:
        """Executions that have started. One that waits cannot finish, and loses nothing."""
        streams = self._child.streams.values()
        return [other for other in streams if other is not stream and other.is_running]

    async def _let_neighbours_finish(self, stream: ExecutionStream, reason: str) -> None:
        neighbours = {neighbour.ended for neighbour in self._running_neighbours(stream)}
        log.warning(
            "child takes nothing new and will be killed: %s; %d neighbours may finish",
            *(reason, len(neighbours)),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.drain_s):
                while neighbours and not stream.ended.done():
                    await asyncio.wait(
                        {*neighbours, stream.ended}, return_when=asyncio.FIRST_COMPLETED
                    )
                    neighbours = {ended for ended in neighbours if not ended.done()}


def _was_forced(stream: ExecutionStream) -> bool:
    return isinstance(stream.terminal, wire.Error) and stream.terminal.kind in _FORCED


def _to_text(stacks: list[wire.Stack]) -> str:
    """Stacks in the form of a traceback, outermost frame first."""
    lines: list[str] = []
    for stack in stacks:
        owner = f" of execution {stack.execution_id}" if stack.execution_id else ""
        lines.append(f"{stack.kind} {stack.name}{owner} (most recent call last):")
        lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in stack.frames]
    return "\n".join(lines)
