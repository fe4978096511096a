"""A Celery worker pool whose tasks run in sessions.

Three parties: the *hub thread*, Celery's own, on which everything that Celery sees happens; the
*runtime*, one asyncio loop that owns the sessions; and the children. The runtime is authoritative
for which task runs where, and decides how each ended, exactly once. Ends are reported to Celery
through a bridge, in order, on the hub thread. The hub thread runs the loop itself while it is
awake, and the *runtime thread* runs it otherwise; code on the loop need not know which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capsule_tasks.taskpool.pool import TaskPool

__all__ = ["TaskPool"]


def __getattr__(name: str) -> Any:
    """Import the pool on first use: Celery's command line needs only our remote commands."""
    if name != "TaskPool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capsule_tasks.taskpool.pool import TaskPool  # noqa: PLC0415 - see above

    return TaskPool
