"""Remote commands of our own: `celery inspect capsule_health`, `celery inspect capsule_stack ID`.

They run on the hub thread. Imported in a worker, and in Celery's command line, which refuses
commands that it does not know.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

_NO_POOL = {"error": "this worker's pool is not capsule_tasks.taskpool:TaskPool"}


@inspect_command()
def capsule_health(state: Any, **_: Any) -> Any:
    """Whether sessions can be had, if not why not, and how each one is."""
    pool = state.consumer.pool
    return pool.health() if hasattr(pool, "health") else _NO_POOL


@inspect_command(args=[("task_id", str)], signature="<task id>")
def capsule_stack(state: Any, task_id: str, **_: Any) -> Any:
    """Where the code of a running task is: files, lines and functions, never values."""
    pool = state.consumer.pool
    return pool.stack_of(task_id) if hasattr(pool, "stack_of") else _NO_POOL
