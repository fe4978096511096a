"""Attribution of output: to the sink of the context, else to the only running execution."""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.io.streams import CapturedStream, plain_streams
from capsule_tasks.child.stopping.deferred_stop import interruptible


class Capture:
    """Replaces the standard streams and keeps them attributed, through threads and forks."""

    def __init__(self, session_sink: OutputSink, running: Callable[[], list[OutputSink]]) -> None:
        self._session_sink = session_sink
        self._running = running
        self._var: contextvars.ContextVar[OutputSink | None] = contextvars.ContextVar(
            "capsule_sink", default=None
        )
        self.stdout = CapturedStream(1, self._var.get, self.owner)
        self.stderr = CapturedStream(2, self._var.get, self.owner)

    def install(self) -> None:
        self.originals: tuple[Any, Any] = (sys.__stdout__, sys.__stderr__)
        self._set_streams(self.stdout, self.stderr)
        _inherit_context_in_threads()
        os.register_at_fork(after_in_child=self._write_plainly)

    def enter(self, sink: OutputSink) -> None:
        """Attribute output of this context to `sink` from now on."""
        self._var.set(sink)

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
        sys.stdout, sys.stderr = plain_streams()
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
