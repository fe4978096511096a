"""What code that runs in a session can say about itself."""

from __future__ import annotations

from collections.abc import Callable

from capsule_tasks.child.io.output import Sink
from capsule_tasks.child.stopping.deferred_stop import interruptible, landing
from capsule_tasks.protocol.messages import Progress
from capsule_tasks.protocol.values import sendable

_MAX_NOTE = 4096

_owners: list[Callable[[], Sink]] = []
"""Empty outside of a session; in one, who knows whose code is running."""


def connect(owner: Callable[[], Sink]) -> None:
    """Called once, when the child starts."""
    _owners[:] = [owner]


@interruptible
def progress(done: float, total: float | None = None, note: str = "") -> None:
    """Tell whoever watches this execution how far it is. Outside of one it does nothing."""
    for owner in _owners:
        sink = owner()
        if sink.execution_id is not None:
            sink.say(
                Progress(
                    execution_id=sink.execution_id,
                    done=float(done),
                    total=None if total is None else float(total),
                    note=sendable(str(note))[:_MAX_NOTE],
                )
            )
        if landing.pending:
            landing.raise_pending()
