"""A Celery worker pool whose tasks run in sessions.

Three parties: the *hub thread*, Celery's own, on which everything that Celery sees happens; the
*runtime thread*, one asyncio loop that owns the sessions; and the children. The runtime is
authoritative for which job runs where, and decides how each ended, exactly once. The hub thread
hears of it through a bridge, in order, and calls Celery's callbacks. Neither waits for the other,
except when the pool stops.
"""

from capsule_tasks.taskpool.pool import TaskPool

__all__ = ["TaskPool"]
