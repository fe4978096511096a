"""Remote commands of our own: `celery inspect capsule_health`, `celery inspect capsule_stack ID`.

They run on the hub thread. Imported in a worker, and in Celery's command line, which refuses
commands that it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker.control import Panel, inspect_command
from kombu.pidbox import Node

_NO_POOL = {"error": "this worker's pool is not capsule_tasks.taskpool:TaskPool"}


@inspect_command()
def capsule_health(state: Any, **_: Any) -> Any:
    """Whether the pool is healthy, the reasons if not, and the state of each child."""
    pool = state.consumer.pool
    return pool.health() if hasattr(pool, "health") else _NO_POOL


@inspect_command(args=[("task_id", str)], signature="<task id>")
def capsule_stack(state: Any, task_id: str, all_frames: bool = False, **_: Any) -> Any:
    """The stack of a running task: files, lines and functions, never values."""
    pool = state.consumer.pool
    if not hasattr(pool, "stack_of"):
        return _NO_POOL
    return pool.stack_of(task_id, all_frames=bool(all_frames))


class MailboxNode(Node):
    """A worker's mailbox. A command may return a future: its answer comes later."""

    def reply(self, data: Any, *address: Any, **options: Any) -> None:
        answer = data.get(self.hostname)
        if isinstance(answer, Future):
            answer.add_done_callback(
                lambda given: self.reply({self.hostname: given.result()}, *address, **options)
            )
        else:
            super().reply(data, *address, **options)


def _keeping(name: str) -> Callable[..., Any]:
    """Celery's own command of that name, which also stores the revokes for workers that miss it.

    Its description and its answer stay the same.
    """
    own: Callable[..., Any] = Panel.data[name]
    if hasattr(own, "keeps_revokes"):
        return own

    @functools.wraps(own)
    def command(state: Any, *args: Any, **kwargs: Any) -> Any:
        revokes = getattr(state.consumer, "capsule_revokes", None)
        if revokes is not None:
            ids = kwargs.get("task_id")
            revokes.store(
                ids=map(str, maybe_list(ids) or ()), stamps=_stamps(kwargs.get("headers"))
            )
        return own(state, *args, **kwargs)

    # Not by `__wrapped__`: other packages may have wrapped Celery's own.
    command.keeps_revokes = True  # type: ignore[attr-defined]
    return command


def _stamps(headers: Any) -> list[tuple[str, Any]]:
    """The headers as Celery reads them: a mapping, or `header=value` from a command line.

    Values keep their types, since Celery compares them with those of the task.
    """
    if isinstance(headers, list):
        headers = dict(header.split("=")[:2] for header in headers if "=" in header)
    return [
        (str(header), value)
        for header, values in (headers or {}).items()
        for value in maybe_list(values) or ()
        if isinstance(value, (str, int, float))
    ]


Panel.data |= {
    name: _keeping(name) for name in ("revoke", "terminate", "revoke_by_stamped_headers")
}
