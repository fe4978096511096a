"""A Celery worker pool whose tasks run in sessions.

Three parties: the *hub thread*, Celery's own, on which everything that Celery sees happens; the
*runtime*, one asyncio loop that owns the sessions; and the children. The runtime is authoritative
for which job runs where, and decides how each ended, exactly once. Celery hears of it through a
bridge, in order, on the hub thread. The hub turns the loop itself while it is awake, and the
*runtime thread* while it is not; what lives on the loop need not know which.
"""

from capsule_tasks.taskpool.pool import TaskPool

__all__ = ["TaskPool"]
