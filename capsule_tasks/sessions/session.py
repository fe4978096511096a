"""`Session`: one warm child, owned by one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from capsule_tasks.errors import (
    ExecutionFailed,
    ExecutionTimeout,
    FrameTooLarge,
    SessionLost,
    SessionStateError,
    SnapshotError,
    UnknownInputRequest,
)
from capsule_tasks.protocol.messages import (
    Cancel,
    Checkpoint,
    Checkpointed,
    Code,
    Error,
    ErrorKind,
    Execute,
    Gap,
    InputResponse,
    Message,
    NamespaceRequest,
    NamespaceSummary,
    Restore,
    Restored,
    Result,
    SoftLimit,
    TaskCall,
    Terminal,
    new_id,
)
from capsule_tasks.sessions.arguments import (
    check_one_of,
    check_seconds,
    check_text,
    check_type,
)
from capsule_tasks.sessions.collected_output import CollectedOutput
from capsule_tasks.sessions.lifecycle import SessionLifecycle
from capsule_tasks.sessions.process.live_child import LiveChild
from capsule_tasks.sessions.states import ACCEPTING, SessionState
from capsule_tasks.sessions.stopping import StopOutcome, Stopper
from capsule_tasks.sessions.stream import ExecutionStream, Stop

OnBusy = Literal["refuse", "wait"]

_NOT_SENT: dict[type[Exception], ErrorKind] = {
    FrameTooLarge: ErrorKind.TOO_LARGE,
    SessionLost: ErrorKind.LOST,
    UnicodeEncodeError: ErrorKind.RAISED,  # as Python's own compiler does with such a source
    TypeError: ErrorKind.RAISED,  # a header of a task that MessagePack cannot carry
    OverflowError: ErrorKind.RAISED,
}


@dataclasses.dataclass(frozen=True)
class Completed:
    """What `run` returns: the value, and what was written on the way.

    Of output beyond `routing.run_bytes` the newest is kept; `gaps` says what was lost.
    """

    value: Any
    stdout: str
    stderr: str
    result: Result
    gaps: tuple[Gap, ...] = ()
    """One for each stream of which something was dropped, here or in the child."""


class Session(SessionLifecycle):
    """A Python subprocess that runs code, streams its output and can be stopped at any time.

    Use it as an async context manager, or call `start` and `shutdown`. It belongs to the event
    loop that started it; `cancel`, `interrupt` and `input_response` may be awaited on any loop.
    """

    # --- executing -----------------------------------------------------------------------------

    async def execute(
        self,
        source: str,
        *,
        execution_id: str | None = None,
        timeout_s: float | None = None,
        on_busy: OnBusy = "refuse",
    ) -> AsyncGenerator[Message, None]:
        """Run source code; yields everything it says, its one terminal message last.

        The last message is a `Result` or an `Error`. After `timeout_s` the code is stopped and,
        behind its terminal message, ExecutionTimeout is raised. Leaving the loop early stops the
        code too, and the session stays busy until it has stopped.
        """
        check_type("source", source, str)
        check_type("execution_id", execution_id, str, None)
        check_seconds("timeout_s", timeout_s)
        check_one_of("on_busy", on_busy, ("refuse", "wait"))
        child, stopper = await self._accepting("execute()")
        execution_id = execution_id or new_id()
        if execution_id in child.router.streams:
            raise ValueError(f"execution {execution_id!r} is running already")
        stream = self._open(child, execution_id)
        try:
            self._send(child, stream, Code(source=source), on_busy)
            self._limit_time(stopper, stream, timeout_s)
            while True:
                message = await stream.next()
                yield message
                if isinstance(message, Terminal):
                    break
        finally:
            if stream.terminal is None:
                self._abandon(child, stopper, stream)
        if isinstance(message, Error) and message.kind == ErrorKind.TIMEOUT:
            raise _timeout_error(message, timeout_s or 0.0)

    async def run(
        self,
        source: str,
        *,
        execution_id: str | None = None,
        timeout_s: float | None = None,
        on_busy: OnBusy = "refuse",
    ) -> Completed:
        """Run source code to its end and return its value; ExecutionFailed if it has none."""
        written = CollectedOutput(self.config.routing.run_bytes)
        async for message in self.execute(
            source, execution_id=execution_id, timeout_s=timeout_s, on_busy=on_busy
        ):
            written.add(message)
        if isinstance(message, Error):
            failure = ExecutionFailed(message, f"{message.type}: {message.message}")
            if message.traceback:
                failure.add_note(message.traceback)
            raise failure
        assert isinstance(message, Result)
        out, err = written.text("stdout"), written.text("stderr")
        return Completed(message.value, out, err, message, written.gaps())

    def submit(
        self,
        payload: Code | TaskCall,
        consumer: Callable[[Message], object],
        *,
        execution_id: str,
        timeout_s: float | None = None,
        on_busy: OnBusy = "wait",
    ) -> None:
        """Begin an execution whose messages `consumer` is called with, its terminal one last.

        It is called on the event loop, and may submit the next one. If it returns False, the code
        has no more credit for output until `resume_output` is called. Nothing is awaited: if the
        session does not take executions right now, SessionStateError is raised. Limits and
        `timeout_s` are as in `execute`; only the terminal message says that the time was up.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        child, stopper = self._taken_on("submit()")
        if execution_id in child.router.streams:
            raise ValueError(f"execution {execution_id!r} is running already")
        stream = self._open(child, execution_id, consumer)
        if isinstance(payload, TaskCall):
            stream.task_name = payload.name
        self._send(child, stream, payload, on_busy)
        self._limit_time(stopper, stream, timeout_s)

    def resume_output(self, execution_id: str) -> None:
        """The consumer of an execution has room again; nothing happens if it is over."""
        stream = self._child.router.streams.get(execution_id) if self._child is not None else None
        if stream is not None:
            stream.resume_output()

    async def _accepting(self, call: str) -> tuple[LiveChild, Stopper]:
        """The child, if it takes executions; one that is being replaced is waited for."""
        self._check_loop(call)
        if self._restarting is not None and not self._restarting.done():
            await asyncio.wait({self._restarting})
        return self._taken_on(call)

    def _taken_on(self, call: str) -> tuple[LiveChild, Stopper]:
        child, stopper = self._child, self._stopper
        if self._state not in ACCEPTING or child is None or stopper is None or child.is_over:
            hint = "call start()" if self._state is SessionState.CREATING else "call restart()"
            raise SessionStateError(call, self._state, hint)
        if stopper.condemners:
            hint = f"it is condemned by {stopper.condemned_by} and is about to be replaced"
            raise SessionStateError(call, self._state, hint)
        return child, stopper

    def _open(
        self,
        child: LiveChild,
        execution_id: str,
        consumer: Callable[[Message], object] | None = None,
    ) -> ExecutionStream:
        stream = child.open_stream(execution_id, consumer)
        stream.limit_output(self.config.child.limits.output_bytes, self._on_excess)
        self._move(SessionState.BUSY)
        self._last_used_at = time.monotonic()
        self._counters.execution_count += 1
        return stream

    def _send(
        self, child: LiveChild, stream: ExecutionStream, payload: Code | TaskCall, on_busy: OnBusy
    ) -> None:
        execute = Execute(
            execution_id=stream.execution_id, seq=stream.seq, payload=payload, on_busy=on_busy
        )
        try:
            child.post_bulk(execute)
        except tuple(_NOT_SENT) as error:
            child.close_stream(stream)
            terminal = Error(
                execution_id=stream.execution_id,
                kind=_NOT_SENT[type(error)],
                type=type(error).__name__,
                message=str(error),
            )
            self._on_stream_end(stream, terminal)

    def _limit_time(
        self, stopper: Stopper, stream: ExecutionStream, timeout_s: float | None
    ) -> None:
        """Have the execution stopped at its limit of CPU time and at its caller's deadline."""
        if stream.terminal is not None:
            return
        cpu_limit_s = self.config.child.limits.cpu_time_s
        if cpu_limit_s is not None:
            self._spawn(stopper.kill_at_cpu_limit(stream, cpu_limit_s))
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._on_deadline, stopper, stream, timeout_s)
            stream.ended.add_done_callback(lambda _: timer.cancel())

    def _on_deadline(self, stopper: Stopper, stream: ExecutionStream, timeout_s: float) -> None:
        if stream.terminal is None and not stream.abandoned:
            message = f"execution {stream.execution_id!r} ran longer than {timeout_s} s"
            self._spawn(stopper.stop_at_deadline(stream, message))

    def _on_excess(self, stream: ExecutionStream, reason: str) -> None:
        """Stop what wrote too much: the child counts only what Python writes, and may lie."""
        if self._stopper is not None and stream.terminal is None:
            self._spawn(self._stopper.stop(stream, Stop(ErrorKind.LIMIT, reason)))

    def _abandon(self, child: LiveChild, stopper: Stopper, stream: ExecutionStream) -> None:
        """The consumer is gone: stop the work; the session is busy until it has stopped."""
        stopper.count_cancelled(stream)
        stream.abandon()
        if not child.is_over:
            stop = Stop(ErrorKind.CANCELLED, "its consumer went away")
            self._spawn(stopper.stop(stream, stop))

    # --- stopping ------------------------------------------------------------------------------

    async def cancel(self, execution_id: str, grace_s: float | None = None) -> StopOutcome:
        """Stop one execution, by force if it has not ended after the grace.

        `interrupted`: it stopped by itself and the namespace is kept. `killed`: the child had to
        be killed and is replaced. `not_running`: there was nothing to stop.
        """
        check_type("execution_id", execution_id, str)
        check_seconds("grace_s", grace_s)
        self._check_reachable("cancel()")
        stopper = self._stopper
        if stopper is None:
            return "not_running"
        return await self._on_own_loop(
            self._until_child_ends(stopper.cancel(execution_id, grace_s))
        )

    async def interrupt(
        self, execution_id: str | None = None, *, force_restart: bool = False
    ) -> StopOutcome:
        """Raise KeyboardInterrupt in what runs, like Ctrl-C; the code may catch it.

        With `force_restart` a child in which something still runs after the grace is killed and
        replaced.
        """
        check_text("execution_id", execution_id)
        self._check_reachable("interrupt()")
        if self._stopper is None:
            return "not_running"
        interrupt = self._stopper.interrupt(execution_id, force=force_restart)
        return await self._on_own_loop(self._until_child_ends(interrupt))

    def soft_limit(self, execution_id: str) -> bool:
        """Raise in one execution that its soft time limit has passed; False if there is none."""
        child = self._child
        stream = child.router.streams.get(execution_id) if child is not None else None
        if child is None or stream is None:
            return False
        child.send_control(SoftLimit(execution_id=execution_id, seq=stream.seq))
        return True

    def signal(self, signum: int) -> None:
        """Send a signal to the child alone; nothing happens if there is none."""
        if self._child is not None:
            self._child.process.signal(signum)

    # --- questions and answers -----------------------------------------------------------------

    async def input_response(
        self, text: str, *, request_id: str, execution_id: str, eof: bool = False
    ) -> None:
        """Answer an InputRequest, or end its input; UnknownInputRequest if nobody waits for it."""
        for name, value in (
            ("text", text),
            ("request_id", request_id),
            ("execution_id", execution_id),
        ):
            check_type(name, value, str)
        self._check_reachable("input_response()")
        await self._on_own_loop(self._input_response(text, request_id, execution_id, eof))

    async def _input_response(
        self, text: str, request_id: str, execution_id: str, eof: bool
    ) -> None:
        child = self._child
        if child is None or not child.router.take_answer(request_id, execution_id):
            raise UnknownInputRequest(request_id, execution_id)
        answer = InputResponse(execution_id=execution_id, request_id=request_id, text=text, eof=eof)
        try:
            await child.send_bulk(answer)
        except (FrameTooLarge, UnicodeEncodeError):
            child.router.return_answer(request_id)
            raise

    async def receive_message(self, timeout_s: float | None = None) -> Any:
        """The next message of no execution; TimeoutError, or SessionLost when the child goes."""
        check_seconds("timeout_s", timeout_s)
        self._check_loop("receive_message()")
        child = self._child
        if child is None or (child.is_over and not child.router.session_messages):
            raise SessionStateError("receive_message()", self._state, "there is no child to hear")
        async with asyncio.timeout(timeout_s):
            return await child.router.receive()

    async def namespace_summary(self, timeout_s: float | None = 5.0) -> NamespaceSummary:
        """Names, types and sizes in the namespace; never values. Works while code runs."""
        check_seconds("timeout_s", timeout_s)
        child, _ = await self._accepting("namespace_summary()")
        reply: NamespaceSummary = await child.ask(NamespaceRequest(), timeout_s)
        return reply

    async def stack(self, execution_id: str | None = None) -> str:
        """The Python stacks of one execution or of the whole child, also while the GIL is held."""
        check_text("execution_id", execution_id)
        _, stopper = await self._accepting("stack()")
        return await stopper.stack_text(execution_id)

    async def checkpoint(self, timeout_s: float | None = 30.0) -> Checkpointed:
        """Save the namespace; names that cannot be saved are reported, with the reason."""
        check_seconds("timeout_s", timeout_s)
        child, _ = await self._accepting("checkpoint()")
        reply: Checkpointed = await self._ask_slowly(child, Checkpoint(), timeout_s)
        if reply.data is None:
            raise SnapshotError(f"the namespace was not saved: {reply.error}")
        return reply

    async def restore(
        self,
        data: bytes | Checkpointed,
        mode: Literal["merge", "replace"] = "merge",
        timeout_s: float | None = 30.0,
    ) -> tuple[str, ...]:
        """Bring a saved namespace back; the names restored. On failure nothing has changed."""
        saved = data.data if isinstance(data, Checkpointed) else data
        if not isinstance(saved, bytes):
            raise TypeError(f"data must be bytes, not {type(saved).__name__}")
        check_one_of("mode", mode, ("merge", "replace"))
        check_seconds("timeout_s", timeout_s)
        child, _ = await self._accepting("restore()")
        reply: Restored = await self._ask_slowly(child, Restore(data=saved, mode=mode), timeout_s)
        if reply.error:
            raise SnapshotError(f"the namespace was not restored: {reply.error}")
        return reply.names

    async def _ask_slowly(self, child: LiveChild, request: Message, timeout_s: float | None) -> Any:
        """A request that runs user code in the child: when the time is up it is cancelled there."""
        try:
            return await child.ask(request, timeout_s, bulk=True)
        except (TimeoutError, asyncio.CancelledError):
            child.send_control(Cancel(execution_id=request.id, seq=0))
            raise


def _timeout_error(error: Error, timeout_s: float) -> ExecutionTimeout:
    timeout = ExecutionTimeout(error.execution_id, timeout_s)
    timeout.add_note(f"the last known stack:\n{error.stack or '(none)'}")
    return timeout
