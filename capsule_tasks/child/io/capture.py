"""Whose output is it? The context says; where there is none, the only running execution."""

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

from capsule_tasks.child.io.output import (
    CapturedErrorStream,
    CapturedStream,
    Sink,
    UnattributedSink,
    plain_streams,
)
from capsule_tasks.child.stopping.deferred_stop import interruptible


class Capture:
    """Replaces the standard streams and keeps them attributed, through threads and forks."""

    def __init__(self, session_sink: Sink, running: Callable[[], list[Sink]]) -> None:
        self._session_sink = session_sink
        self._running = running
        stray = UnattributedSink(self.owner)
        self._var: contextvars.ContextVar[Sink | UnattributedSink] = contextvars.ContextVar(
            "capsule_sink", default=stray
        )
        self.stdout = CapturedStream("stdout", 1, self._var.get)
        self.stderr = CapturedErrorStream("stderr", 2, self._var.get)

    def install(self) -> None:
        self.originals: tuple[Any, Any] = (sys.__stdout__, sys.__stderr__)
        self._set_streams(self.stdout, self.stderr)
        _inherit_context_in_threads()
        os.register_at_fork(after_in_child=self._leave)

    def enter(self, sink: Sink) -> None:
        """Attribute what this context writes from now on to `sink`."""
        self._var.set(sink)

    def aside(self, call: Callable[..., object], *arguments: object) -> None:
        """Call with what is written being the session's, not an execution's.

        A stop of the execution waits until the call has returned.
        """

        def call_aside() -> None:
            self._var.set(self._session_sink)
            call(*arguments)

        contextvars.copy_context().run(call_aside)

    def attribute_by_context(self, stream: Any) -> None:
        """Have a text stream that writes to descriptor 1 or 2 heed `aside`, if it is one.

        Bytes in these descriptors are taken for output of the running execution.
        """
        number = _standard_descriptor(stream)
        if number is None or isinstance(stream, CapturedStream):
            return
        captured = self.stdout if number == 1 else self.stderr
        write, flush = stream.write, stream.flush

        @interruptible
        def write_or_aside(text: str) -> int:
            if self._var.get() is self._session_sink:
                return captured.write(text)
            count: int = write(text)
            return count

        @interruptible
        def flush_or_aside() -> None:
            if self._var.get() is not self._session_sink:  # which the pump sends in time
                flush()

        with contextlib.suppress(AttributeError):  # one of somebody's own making
            stream.write, stream.flush = write_or_aside, flush_or_aside

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """For code that is to find the process's own standard streams, as it did in the worker."""
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

    def owner(self) -> Sink:
        """The sink of the caller: its context's, the only running execution's, or the session's."""
        sink = self._var.get()
        if isinstance(sink, Sink):
            return sink
        running = self._running()
        return running[0] if len(running) == 1 else self._session_sink

    def _leave(self) -> None:
        """A forked copy of the child must not speak for the session: it writes plain text."""
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
        # A method, for whoever wraps it once more (Sentry does) and calls its function.
        thread.run = MethodType(lambda _: context.run(run), thread)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_context  # type: ignore[assignment,method-assign]
