"""`Session`: one child process that runs code, owned by one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
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
from capsule_tasks.protocol import messages as wire
from capsule_tasks.protocol.flow import message_cost, utf8_size
from capsule_tasks.protocol.ids import new_id
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions.arguments import check_one_of, check_seconds, check_text, check_type
from capsule_tasks.sessions.lifecycle import SessionLifecycle
from capsule_tasks.sessions.process.live_child import LiveChild
from capsule_tasks.sessions.states import ACCEPTING, SessionState
from capsule_tasks.sessions.stopping import StopOutcome
from capsule_tasks.sessions.stream import ExecutionStream, Stop
from capsule_tasks.settings import MIB, ByteCount, check_value

MAX_CHECKPOINT_BYTES = 256 * MIB

OnBusy = Literal["refuse", "wait"]

_NOT_SENT: dict[type[Exception], wire.ErrorKind] = {
    FrameTooLarge: wire.ErrorKind.TOO_LARGE,
    SessionLost: wire.ErrorKind.LOST,
    UnicodeEncodeError: wire.ErrorKind.RAISED,  # as Python's own compiler does with such a source
    TypeError: wire.ErrorKind.RAISED,  # a header of a task that MessagePack cannot carry
    OverflowError: wire.ErrorKind.RAISED,
}


@dataclasses.dataclass(frozen=True)
class Completed:
    """The value and the output of a `run`.

    Of output beyond `routing.run_bytes` the newest is kept; `gaps` says how much was dropped.
    """

    value: Any
    stdout: str
    stderr: str
    result: wire.Result
    gaps: tuple[wire.Gap, ...] = ()
    """One for each stream of which output was dropped, here or in the child."""


class CollectedOutput:
    """The output of one execution; `max_bytes` includes a constant for each message."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._kept: deque[wire.Output] = deque()
        self.gaps: dict[wire.Stream, wire.Gap] = {}
        """One for each stream of which output was dropped."""

    def add(self, message: wire.Message) -> None:
        """Keep output, and count the output that the child has dropped."""
        if isinstance(message, wire.Output):
            self._kept.append(message)
            self._size += message_cost(message)
            while self._size > self._max_bytes:
                dropped = self._kept.popleft()
                self._size -= message_cost(dropped)
                self._count(dropped.stream, utf8_size(dropped.data), 1)
        elif isinstance(message, wire.Gap):
            self._count(message.stream, message.lost_bytes, message.lost_messages)

    def text(self, stream: wire.Stream) -> str:
        return "".join(output.data for output in self._kept if output.stream == stream)

    def _count(self, stream: wire.Stream, lost_bytes: int, lost_messages: int) -> None:
        gap = self.gaps.setdefault(stream, wire.Gap(stream=stream, lost_bytes=0, lost_messages=0))
        gap.lost_bytes += lost_bytes
        gap.lost_messages += lost_messages


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
    ) -> AsyncGenerator[wire.Message, None]:
        """Run source code; yields all its messages, its one terminal message last.

        The last message is a `Result` or an `Error`. After `timeout_s` the code is stopped, and
        ExecutionTimeout is raised behind its terminal message. Leaving the loop early stops the
        code too, and the session stays busy until it has stopped.
        """
        check_type("source", source, str)
        check_type("execution_id", execution_id, str, None)
        check_seconds("timeout_s", timeout_s)
        check_one_of("on_busy", on_busy, ("refuse", "wait"))
        child = await self._accepting("execute()")
        code = wire.Code(source=source)
        stream = self._begin(child, execution_id or new_id(), code, timeout_s, on_busy)
        try:
            while True:
                message = await stream.next()
                yield message
                if isinstance(message, wire.Terminal):
                    break
        finally:
            if stream.terminal is None:
                self._abandon(child, stream)
        if isinstance(message, wire.Error) and message.kind == wire.ErrorKind.TIMEOUT:
            timeout = ExecutionTimeout(message.execution_id, timeout_s or 0.0)
            timeout.add_note(f"the last known stack:\n{message.stack or '(none)'}")
            raise timeout

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
        if isinstance(message, wire.Error):
            failure = ExecutionFailed(message, f"{message.type}: {message.message}")
            if message.traceback:
                failure.add_note(message.traceback)
            raise failure
        assert isinstance(message, wire.Result)
        out, err = written.text("stdout"), written.text("stderr")
        return Completed(message.value, out, err, message, tuple(written.gaps.values()))

    def submit(
        self,
        payload: wire.Code | wire.TaskCall,
        consumer: Callable[[wire.Message], object],
        *,
        execution_id: str,
        timeout_s: float | None = None,
        on_busy: OnBusy = "wait",
    ) -> None:
        """Start an execution and call `consumer` with its messages, the terminal one last.

        The consumer is called on the event loop, and may submit the next execution. If it returns
        False, the code has no more credit for output until `resume_output` is called. Nothing is
        awaited: SessionStateError is raised if the session takes no executions right now. Limits
        and `timeout_s` are as in `execute`; a timeout shows in the terminal message only.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        child = self._accepting_now("submit()")
        self._begin(child, execution_id, payload, timeout_s, on_busy, consumer)

    def resume_output(self, execution_id: str) -> None:
        """Report that the consumer of an execution has room again; ignored after its end."""
        stream = self._child.streams.get(execution_id) if self._child is not None else None
        if stream is not None:
            stream.resume_output()

    async def _accepting(self, call: str) -> LiveChild:
        """The child, after a restart that is under way; or SessionStateError."""
        self._check_loop(call)
        if self._restarting is not None and not self._restarting.done():
            await asyncio.wait({self._restarting})
        return self._accepting_now(call)

    def _accepting_now(self, call: str) -> LiveChild:
        child = self._child
        if self._state not in ACCEPTING or child is None or child.is_over:
            hint = "call start()" if self._state is SessionState.CREATING else "call restart()"
            raise SessionStateError(call, self._state, hint)
        if child.stopper.condemners:
            hint = f"it is condemned by {child.stopper.condemned_by} and is about to be replaced"
            raise SessionStateError(call, self._state, hint)
        return child

    def _begin(
        self,
        child: LiveChild,
        execution_id: str,
        payload: wire.Code | wire.TaskCall,
        timeout_s: float | None,
        on_busy: OnBusy,
        consumer: Callable[[wire.Message], object] | None = None,
    ) -> ExecutionStream:
        """Send an execution; have it stopped at its CPU time limit and its caller's deadline."""
        if execution_id in child.streams:
            raise ValueError(f"execution {execution_id!r} is running already")
        stream = child.streams.open(execution_id, consumer)
        stream.limit_output(self.config.child.limits.output_bytes, self._on_excess)
        if isinstance(payload, wire.TaskCall):
            stream.task_name = payload.name
        self._move(SessionState.BUSY)
        self._last_used_at = time.monotonic()
        self._counters.execution_count += 1
        execute = wire.Execute(
            execution_id=execution_id, seq=stream.seq, payload=payload, on_busy=on_busy
        )
        try:
            child.post_bulk(execute)
        except tuple(_NOT_SENT) as error:
            child.router.remove(stream)
            kind, type_ = _NOT_SENT[type(error)], type(error).__name__
            terminal = wire.Error(
                execution_id=execution_id, kind=kind, type=type_, message=str(error)
            )
            self._on_stream_end(stream, terminal)
            return stream
        cpu_limit_s = self.config.child.limits.cpu_time_s
        if cpu_limit_s is not None:
            self._background.spawn(child.stopper.kill_at_cpu_limit(stream, cpu_limit_s))
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._on_deadline, child, stream, timeout_s)
            stream.ended.add_done_callback(lambda _: timer.cancel())
        return stream

    def _on_deadline(self, child: LiveChild, stream: ExecutionStream, timeout_s: float) -> None:
        if stream.terminal is None and not stream.abandoned:
            message = f"execution {stream.execution_id!r} ran longer than {timeout_s} s"
            self._background.spawn(child.stopper.stop_at_deadline(stream, message))

    def _on_excess(self, stream: ExecutionStream, reason: str) -> None:
        """Stop an execution that wrote too much: the child counts only what Python writes."""
        if self._child is not None and stream.terminal is None:
            self._background.spawn(
                self._child.stopper.stop(stream, Stop(wire.ErrorKind.LIMIT, reason))
            )

    def _abandon(self, child: LiveChild, stream: ExecutionStream) -> None:
        """Stop the code, whose consumer left the loop; the session is busy until it has stopped."""
        child.stopper.count_cancelled(stream)
        stream.abandon()
        if not child.is_over:
            stop = Stop(wire.ErrorKind.CANCELLED, "its consumer went away")
            self._background.spawn(child.stopper.stop(stream, stop))

    # --- stopping ------------------------------------------------------------------------------

    async def cancel(self, execution_id: str, grace_s: float | None = None) -> StopOutcome:
        """Stop one execution, by force if it has not ended after the grace.

        `interrupted`: the code stopped and the namespace is kept. `killed`: the child had to be
        killed and is replaced. `not_running`: there was nothing to stop.
        """
        check_type("execution_id", execution_id, str)
        check_seconds("grace_s", grace_s)
        self._check_reachable("cancel()")
        if self._child is None:
            return "not_running"
        cancel = self._child.stopper.cancel(execution_id, grace_s)
        return await self._on_own_loop(self._background.finish(cancel))

    async def interrupt(
        self, execution_id: str | None = None, *, force_restart: bool = False
    ) -> StopOutcome:
        """Raise KeyboardInterrupt in the code that runs, like Ctrl-C; the code may catch it.

        With `force_restart` a child in which something still runs after the grace is killed and
        replaced.
        """
        check_text("execution_id", execution_id)
        self._check_reachable("interrupt()")
        if self._child is None:
            return "not_running"
        interrupt = self._child.stopper.interrupt(execution_id, force=force_restart)
        return await self._on_own_loop(self._background.finish(interrupt))

    def soft_limit(self, execution_id: str) -> bool:
        """Raise SoftTimeLimitExceeded in one execution; False if there is no such execution."""
        child = self._child
        stream = child.streams.get(execution_id) if child is not None else None
        if child is None or stream is None:
            return False
        child.send_control(wire.SoftLimit(execution_id=execution_id, seq=stream.seq))
        return True

    def signal(self, signum: int) -> None:
        """Send a signal to the child alone; nothing happens if there is none."""
        if self._child is not None:
            self._child.process.signal(signum)

    # --- questions and answers -----------------------------------------------------------------

    async def input_response(
        self, text: str, *, request_id: str, execution_id: str, eof: bool = False
    ) -> None:
        """Answer an InputRequest, or end its input; UnknownInputRequest if it is not open."""
        check_type("text", text, str)
        check_type("request_id", request_id, str)
        check_type("execution_id", execution_id, str)
        self._check_reachable("input_response()")
        await self._on_own_loop(self._input_response(text, request_id, execution_id, eof))

    async def _input_response(
        self, text: str, request_id: str, execution_id: str, eof: bool
    ) -> None:
        child = self._child
        if child is None or not child.router.take_answer(request_id, execution_id):
            raise UnknownInputRequest(request_id, execution_id)
        answer = wire.InputResponse(
            execution_id=execution_id, request_id=request_id, text=text, eof=eof
        )
        try:
            await child.send_bulk(answer)
        except (FrameTooLarge, UnicodeEncodeError):
            child.router.return_answer(request_id)
            raise

    async def receive_message(self, timeout_s: float | None = None) -> Any:
        """The next message of no execution; TimeoutError, or SessionLost when the child ends."""
        check_seconds("timeout_s", timeout_s)
        self._check_loop("receive_message()")
        child = self._child
        if child is None or (child.is_over and not child.router.session_messages):
            raise SessionStateError("receive_message()", self._state, "there is no child")
        async with asyncio.timeout(timeout_s):
            return await child.router.receive()

    async def namespace_summary(self, timeout_s: float | None = 5.0) -> wire.NamespaceSummary:
        """Names, types and sizes in the namespace; never values. Works while code runs."""
        check_seconds("timeout_s", timeout_s)
        child = await self._accepting("namespace_summary()")
        reply: wire.NamespaceSummary = await child.ask(wire.NamespaceRequest(), timeout_s)
        return reply

    async def stack(self, execution_id: str | None = None) -> str:
        """The Python stacks of one execution or of the whole child, also while the GIL is held."""
        check_text("execution_id", execution_id)
        child = await self._accepting("stack()")
        return await child.stopper.stack_text(execution_id)

    async def checkpoint(
        self, timeout_s: float | None = 30.0, *, max_bytes: int = MAX_CHECKPOINT_BYTES
    ) -> SavedNamespace:
        """Save the namespace; names that cannot be saved are reported, with the reason.

        SnapshotError if the saved namespace would have more than `max_bytes`.
        """
        check_seconds("timeout_s", timeout_s)
        check_value("max_bytes", max_bytes, ByteCount)
        child = await self._accepting("checkpoint()")
        request = wire.Checkpoint(max_bytes=max_bytes)
        with child.router.collecting(request, child.piece_bytes) as arriving:
            reply: wire.Checkpointed = await self._ask_slowly(child, request, timeout_s)
        if reply.error:
            raise SnapshotError(f"the namespace was not saved: {reply.error}")
        if arriving.size != reply.size:
            raise SnapshotError(f"{arriving.size} of {reply.size} bytes of the namespace arrived")
        return SavedNamespace(
            pieces=tuple(arriving.pieces),
            saved=reply.saved,
            skipped=reply.skipped,
            python=reply.python,
            packages=reply.packages,
        )

    async def restore(
        self,
        data: bytes | Sequence[bytes] | SavedNamespace,
        mode: Literal["merge", "replace"] = "merge",
        timeout_s: float | None = 30.0,
        *,
        on_sent: Callable[[], object] = lambda: None,
    ) -> wire.Restored:
        """Restore a saved namespace; what came back, and what could not, with the reasons.

        `on_sent` is called once the child has been sent all data, which may be freed then.
        On SnapshotError, and on any other failure, nothing has changed.
        """
        pieces = _pieces_of(data)
        check_one_of("mode", mode, ("merge", "replace"))
        check_seconds("timeout_s", timeout_s)
        child = await self._accepting("restore()")
        request = wire.Restore(size=sum(map(len, pieces)), mode=mode)
        reply: wire.Restored = await self._ask_slowly(child, request, timeout_s, pieces, on_sent)
        if reply.error:
            raise SnapshotError(f"the namespace was not restored: {reply.error}")
        return reply

    async def _ask_slowly(
        self,
        child: LiveChild,
        request: wire.Message,
        timeout_s: float | None,
        pieces: Sequence[bytes] = (),
        on_sent: Callable[[], object] = lambda: None,
    ) -> Any:
        """Send a request that runs user code in the child; cancel it there when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                async with child.sending_pieces:
                    for piece in _cut(pieces, child.piece_bytes):
                        await child.send_bulk(wire.RestorePiece(restore_id=request.id, data=piece))
                    on_sent()
                # Sent before anything else runs, so that no pieces of another restore come between.
                return await child.ask(request, None, bulk=True)
        except (TimeoutError, asyncio.CancelledError):
            child.send_control(wire.Cancel(execution_id=request.id, seq=0))
            raise


def _pieces_of(data: object) -> Sequence[bytes]:
    pieces = data.pieces if isinstance(data, SavedNamespace) else data
    if isinstance(pieces, bytes):
        return [pieces]
    if isinstance(pieces, (list, tuple)) and all(isinstance(piece, bytes) for piece in pieces):
        return pieces
    raise TypeError(f"data must be bytes, or a list of bytes, not {type(data).__name__}")


def _cut(pieces: Sequence[bytes], size: int) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), size):
            yield piece[start : start + size]
