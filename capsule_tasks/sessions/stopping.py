"""Ending executions before their time: cancels, deadlines, interrupts, and force at last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Literal

from capsule_tasks.errors import SessionLost
from capsule_tasks.protocol.messages import (
    Cancel,
    CancelReply,
    Error,
    ErrorKind,
    Interrupt,
    InterruptReply,
    StackReply,
    StackRequest,
)
from capsule_tasks.sessions import probe
from capsule_tasks.sessions.incarnation import Doom, Incarnation
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.stream import ExecutionStream, Stop
from capsule_tasks.settings import TimeoutSettings

log = logging.getLogger("capsule_tasks.sessions")

StopOutcome = Literal["interrupted", "killed", "not_running"]

_FORCED = (ErrorKind.KILLED, ErrorKind.LOST_WITH_NEIGHBOUR)
_ASKED = (ErrorKind.CANCELLED, ErrorKind.TIMEOUT)


class Stopper:
    """Stops what runs in one child: asks first, kills the child when the grace is over.

    What was done is never guessed: it is read off the terminal message and the child's reply.
    """

    def __init__(self, child: Incarnation, timeouts: TimeoutSettings, counters: Counters) -> None:
        self._child = child
        self._timeouts = timeouts
        self._counters = counters
        self.condemned_by: str | None = None
        """The execution that would not stop, while its neighbours may still finish."""

    async def cancel(self, execution_id: str, grace_s: float | None) -> StopOutcome:
        stream = self._child.router.streams.get(execution_id)
        if stream is None:
            return "not_running"
        begun = time.monotonic()
        outcome = await self.stop(stream, Stop(ErrorKind.CANCELLED, "cancelled"), grace_s)
        self._counters.cancel_latencies_ms.append((time.monotonic() - begun) * 1000)
        self._counters.executions_cancelled += outcome != "not_running"
        return outcome

    async def stop(
        self, stream: ExecutionStream, stop: Stop, grace_s: float | None = None
    ) -> StopOutcome:
        """Ask, wait for the grace, then force. Calls for one execution may overlap."""
        grace_s = self._timeouts.grace_s if grace_s is None else grace_s
        stream.stop = stream.stop or stop
        cancel = Cancel(
            execution_id=stream.execution_id,
            seq=stream.seq,
            grace_s=grace_s,
            credit=self._child.allow_cancel_credit(stream),
        )
        reply = self._child.router.expect(cancel.id)
        self._child.send_control(cancel)
        try:
            await asyncio.wait(
                {stream.ended, reply}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not stream.ended.done() and not reply.done():
                await self._force(stream)
            return await self._outcome(stream, reply)
        finally:
            reply.cancel()

    async def stop_at_deadline(self, stream: ExecutionStream, message: str) -> None:
        """The caller's time is up: keep where the code was, then stop it."""
        stack = await self.stack_text(stream.execution_id)
        await self.stop(stream, Stop(ErrorKind.TIMEOUT, message, stack))

    async def interrupt(self, execution_id: str | None, *, force: bool) -> StopOutcome:
        """KeyboardInterrupt in one execution, or in all; with `force` they have to end of it."""
        targets = [
            stream
            for stream in self._child.router.streams.values()
            if execution_id in (None, stream.execution_id)
        ]
        if not targets:
            return "not_running"
        done: StopOutcome = "not_running"
        with contextlib.suppress(TimeoutError):
            reply: InterruptReply = await self._child.ask(
                Interrupt(execution_id=execution_id), self._timeouts.grace_s
            )
            done = reply.done
        if force:
            await asyncio.wait({stream.ended for stream in targets}, timeout=self._timeouts.grace_s)
            stubborn = [stream for stream in targets if not stream.ended.done()]
            if stubborn:
                await self._force(stubborn[0])
                return "killed"
        return done

    async def stack_text(self, execution_id: str | None) -> str:
        """The stacks from the control thread, or from `faulthandler` if it cannot answer."""
        timeout_s = self._timeouts.stack_s
        try:
            reply: StackReply = await self._child.ask(
                StackRequest(execution_id=execution_id), timeout_s
            )
        except (TimeoutError, SessionLost):
            return await probe.dump(self._child.process, timeout_s)
        return probe.to_text(reply.stacks)

    async def _outcome(
        self, stream: ExecutionStream, reply: asyncio.Future[CancelReply]
    ) -> StopOutcome:
        """Terminal message and reply come on different channels; either may be first."""
        with contextlib.suppress(TimeoutError, SessionLost):
            async with asyncio.timeout(self._timeouts.grace_s + self._timeouts.stack_s):
                if not stream.ended.done() and (await asyncio.shield(reply)).done != "not_running":
                    await asyncio.shield(stream.ended)
                if not stream.ended.done():
                    return "not_running"
                terminal = stream.ended.result()
                if isinstance(terminal, Error) and terminal.kind in _ASKED + _FORCED:
                    return "killed" if stream.was_killed else "interrupted"
                return (await asyncio.shield(reply)).done
        return "not_running"

    async def _force(self, stream: ExecutionStream) -> None:
        """Kill the child of an execution that will not stop; its neighbours get `drain_s`."""
        await self._let_neighbours_finish(stream)
        if stream.ended.done() and self.condemned_by is None:
            return
        stack = await probe.dump(self._child.process, self._timeouts.stack_s)
        stop = stream.stop
        timed_out = stop is not None and stop.kind is ErrorKind.TIMEOUT
        self._child.kill(
            Doom(
                f"its child was killed because {stream.execution_id} did not stop",
                ErrorKind.LOST_WITH_NEIGHBOUR,
                target=stream.execution_id,
                target_kind=ErrorKind.TIMEOUT if timed_out else ErrorKind.KILLED,
                stack=stack or (stop.stack if stop is not None else ""),
            )
        )
        await asyncio.shield(self._child.gone)

    async def _let_neighbours_finish(self, stream: ExecutionStream) -> None:
        neighbours = [s.ended for s in self._child.router.streams.values() if s is not stream]
        if not neighbours:
            return
        self.condemned_by = self.condemned_by or stream.execution_id
        log.warning(
            "a child is condemned: %s does not stop; %d others may finish",
            stream.execution_id,
            len(neighbours),
        )
        everyone: asyncio.Future[Any] = asyncio.gather(*map(asyncio.shield, neighbours))
        await asyncio.wait({everyone}, timeout=self._timeouts.drain_s)
        everyone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await everyone
