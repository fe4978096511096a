"""Calls that user code in a session may make: `progress`."""

from __future__ import annotations

from collections.abc import Callable

from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.stopping.deferred_stop import deferred_stop, interruptible
from capsule_tasks.protocol.messages import Progress
from capsule_tasks.protocol.values import sendable

_MAX_NOTE = 4096

_owners: list[Callable[[], OutputSink]] = []
"""In a session, one function that finds the sink of the calling code; elsewhere empty."""


def connect(owner: Callable[[], OutputSink]) -> None:
    """Called once, when the child starts."""
    _owners[:] = [owner]


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
        if deferred_stop.is_pending:
            deferred_stop.raise_pending()
