"""`sys.stdout`, `sys.stderr` and `progress` of a session, and whose output they take.

Output belongs to the sink of the context, else to the only running execution.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from capsule_tasks.child.io.sink import OutputSink, StderrText
from capsule_tasks.child.stopping.deferred_stop import deferred_stop, interruptible
from capsule_tasks.protocol.messages import Progress, RunEvent
from capsule_tasks.protocol.values import sendable

_MAX_NOTE = 4096
_owners: list[Callable[[], OutputSink]] = []
"""In a session, one function that finds the sink of the calling code; elsewhere empty."""


@interruptible
def progress(done: float, total: float | None = None, note: str = "") -> None:
    """Publish how far this execution is. Outside of an execution the call does nothing."""
    for owner in _owners:
        sink = owner()
        if sink.execution_id is not None:
            sink.send(
                Progress(
                    execution_id=sink.execution_id,
                    done=float(done),
                    total=None if total is None else float(total),
                    note=sendable(str(note))[:_MAX_NOTE],
                )
            )
        deferred_stop.raise_pending()


def publish_run_event(event: RunEvent, *, is_last: bool = False) -> bool:
    """Publish an event of the run that this execution drives; whether it was sent.

    It is not sent without credit, unless it is the last one of the run.
    """
    for owner in _owners:
        sink = owner()
        if sink.execution_id is not None:
            event.execution_id = sink.execution_id
            return sink.send(event, needs_credit=not is_last)
    return False


class SessionStream(io.TextIOBase):
    """`sys.stdin`, `sys.stdout` or `sys.stderr` of a session; there is no terminal behind it."""

    def isatty(self) -> bool:
        return False

    def reconfigure(self, **_options: object) -> None:
        """Accept the call, with which many programs start, and change nothing."""

    def close(self) -> None:
        """Stay open: later executions use the same stream (`quit()` closes its input)."""


class CapturedStream(SessionStream):
    """`sys.stdout` or `sys.stderr` of a session: text goes to the sink of the caller's context."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = write_through = False

    def __init__(
        self,
        descriptor: int,
        context_sink: Callable[[], OutputSink | None],
        owner: Callable[[], OutputSink],
    ) -> None:
        """`owner` finds the sink of a caller whose context names none."""
        self._owner = owner
        self._descriptor = descriptor
        self.mode = "w"
        self.name = "<stderr>" if descriptor == 2 else "<stdout>"
        self.buffer = _Buffer(self)
        is_stderr = descriptor == 2
        kind = StderrText if is_stderr else str

        @interruptible
        def write(text: str) -> int:
            sink = context_sink()
            if sink is None:
                sink = owner()
            if type(text) is not kind:  # always so for stderr
                text = kind(text if type(text) is str else _plain(text))
                if is_stderr:
                    # Set before the text is appended: a flush in between would send it as stdout.
                    sink.uses_stderr = True
            sink.parts.append(text)
            count = len(text)
            size = sink.size = sink.size + count
            if size >= sink.flush_at_chars:
                sink.flush_if_due()
                deferred_stop.raise_pending()
            return count

        # A function of this stream is found and called faster than a method: `print` takes 3/4.
        self.write = write  # type: ignore[method-assign]

    @interruptible
    def flush(self) -> None:
        self._owner().flush_ready()
        deferred_stop.raise_pending()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The raw descriptor. Bytes written there are sent too, in no order with the text."""
        return self._descriptor


class _Buffer(io.RawIOBase):
    """`sys.stdout.buffer`: bytes are decoded as UTF-8 and written to the text stream."""

    def __init__(self, text: CapturedStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    @interruptible
    def write(self, data: object) -> int:
        raw = memoryview(data)  # type: ignore[arg-type]
        self._text.write(self._decoder.decode(bytes(raw)))
        return raw.nbytes

    @interruptible
    def flush(self) -> None:
        self._text.write(self._decoder.decode(b"", final=True))
        self._text.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        """Stay open, like the text stream."""


def _plain(text: object) -> str:
    """The characters of a string without its class, whose methods are user code."""
    if not isinstance(text, str):
        raise TypeError(f"write() argument must be str, not {type(text).__name__}")
    return str.__str__(text)


class Capture:
    """Replaces the standard streams and keeps them attributed, through threads and forks."""

    def __init__(self, session_sink: OutputSink, running: Callable[[], list[OutputSink]]) -> None:
        self._session_sink = session_sink
        self._running = running
        self._var: contextvars.ContextVar[OutputSink | None] = contextvars.ContextVar(
            "capsule_sink", default=None
        )
        self.enter: Callable[[OutputSink], object] = self._var.set
        """Attributes output of this context to a sink from now on."""
        self.stdout = CapturedStream(1, self._var.get, self.owner)
        self.stderr = CapturedStream(2, self._var.get, self.owner)

    def install(self) -> None:
        self.originals: tuple[Any, Any] = (sys.__stdout__, sys.__stderr__)
        self._set_streams(self.stdout, self.stderr)
        _owners[:] = [self.owner]
        _inherit_context_in_threads()
        os.register_at_fork(after_in_child=self._write_plainly)

    def as_session(self, call: Callable[..., object], *arguments: object) -> None:
        """Call with output attributed to the session instead of an execution.

        A stop of the execution waits until the call has returned.
        """

        def call_as_session() -> None:
            self._var.set(self._session_sink)
            call(*arguments)

        contextvars.copy_context().run(call_as_session)

    def attribute_by_context(self, stream: Any) -> None:
        """Have a text stream that writes to descriptor 1 or 2 heed `as_session`.

        Without this the parent takes bytes in these descriptors for output of the running
        execution. Other streams stay as they are.
        """
        number = _standard_descriptor(stream)
        if number is None or isinstance(stream, CapturedStream):
            return
        captured = self.stdout if number == 1 else self.stderr
        write, flush = stream.write, stream.flush

        @interruptible
        def write_attributed(text: str) -> int:
            if self._var.get() is self._session_sink:
                return captured.write(text)
            count: int = write(text)
            return count

        @interruptible
        def flush_attributed() -> None:
            if self._var.get() is not self._session_sink:  # the pump sends session output in time
                flush()

        with contextlib.suppress(AttributeError):  # a class of the user's with `__slots__`, say
            stream.write, stream.flush = write_attributed, flush_attributed

    @contextlib.contextmanager
    def without_capture(self) -> Iterator[None]:
        """Give code the process's own standard streams, as it found them in the worker."""
        out, err = self.originals
        self._set_streams(out, err)
        try:
            yield
        finally:
            for stream in (out, err):
                with contextlib.suppress(Exception):
                    stream.flush()
            self._set_streams(self.stdout, self.stderr)

    def _set_streams(self, out: Any, err: Any) -> None:
        sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = err  # type: ignore[misc]

    def owner(self) -> OutputSink:
        """The sink of the caller: its context's, the only running execution's, or the session's."""
        sink = self._var.get()
        if sink is not None:
            return sink
        running = self._running()
        return running[0] if len(running) == 1 else self._session_sink

    def _write_plainly(self) -> None:
        """In a forked copy of the child, which must not send frames: write plain text."""
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(descriptor, "w", closefd=False),
                "utf-8",
                "backslashreplace",
                write_through=True,
            )
            for descriptor in (1, 2)
        )
        self.stdout.write = sys.stdout.write  # type: ignore[method-assign]
        self.stderr.write = sys.stderr.write  # type: ignore[method-assign]


def _standard_descriptor(stream: Any) -> int | None:
    """1 or 2 for a text stream that writes there, under whatever number."""
    if not isinstance(stream, io.TextIOBase):
        return None
    try:
        target = os.fstat(stream.fileno())
        return next((n for n in (1, 2) if os.path.samestat(target, os.fstat(n))), None)
    except (OSError, ValueError):
        return None


def _inherit_context_in_threads() -> None:
    """Have threads start in a copy of the context that starts them."""
    start = threading.Thread.start

    @interruptible
    def start_in_context(thread: threading.Thread) -> None:
        context, run = contextvars.copy_context(), thread.run
        # A method, because libraries (Sentry) wrap it once more and call its function.
        thread.run = MethodType(lambda _: context.run(run), thread)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_context  # type: ignore[assignment,method-assign]
