"""Whose output is it? The context says; where there is none, the only running execution."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Callable
from types import MethodType

from capsule_tasks.child.landing import leavable
from capsule_tasks.child.output import (
    CapturedErrorStream,
    CapturedStream,
    Sink,
    StraySink,
    plain_streams,
)


class Capture:
    """Replaces the standard streams and keeps them attributed, through threads and forks."""

    def __init__(self, session_sink: Sink, running: Callable[[], list[Sink]]) -> None:
        self._session_sink = session_sink
        self._running = running
        stray = StraySink(self.owner)
        self._var: contextvars.ContextVar[Sink | StraySink] = contextvars.ContextVar(
            "capsule_sink", default=stray
        )
        self.stdout = CapturedStream("stdout", 1, self._var.get)
        self.stderr = CapturedErrorStream("stderr", 2, self._var.get)

    def install(self) -> None:
        sys.stdout = sys.__stdout__ = self.stdout  # type: ignore[assignment,misc]
        sys.stderr = sys.__stderr__ = self.stderr  # type: ignore[assignment,misc]
        _inherit_context_in_threads()
        os.register_at_fork(after_in_child=self._leave)

    def enter(self, sink: Sink) -> None:
        """Attribute what this context writes from now on to `sink`."""
        self._var.set(sink)

    def aside(self, call: Callable[..., object], *arguments: object) -> None:
        """Call with what is written being the session's, not an execution's."""

        def enter_aside() -> None:
            self._var.set(self._session_sink)
            call(*arguments)

        contextvars.copy_context().run(enter_aside)

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


def _inherit_context_in_threads() -> None:
    """Have threads start in a copy of the context that starts them."""
    start = threading.Thread.start

    @leavable
    def start_in_context(thread: threading.Thread) -> None:
        context, run = contextvars.copy_context(), thread.run
        # A method, for whoever wraps it once more (Sentry does) and calls its function.
        thread.run = MethodType(lambda _: context.run(run), thread)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_context  # type: ignore[assignment,method-assign]
