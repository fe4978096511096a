"""A Celery worker pool whose tasks run in sessions.

Three parties: the *hub thread*, Celery's own, on which everything that Celery sees happens; the
*runtime*, one asyncio loop that owns the sessions; and the children. The runtime is authoritative
for which job runs where, and decides how each ended, exactly once. Celery hears of it through a
bridge, in order, on the hub thread. The hub turns the loop itself while it is awake, and the
*runtime thread* while it is not; what lives on the loop need not know which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capsule_tasks.taskpool.pool import TaskPool

__all__ = ["TaskPool"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: Celery's command line wants our remote commands only."""
    if name != "TaskPool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capsule_tasks.taskpool.pool import TaskPool  # noqa: PLC0415 - as said above

    return TaskPool
