"""The calls that executions run: of a Celery task, or of source code that somebody sent."""

from __future__ import annotations

import msgspec

from capsule_tasks.protocol.messages import TaskCall


class CodeCall(msgspec.Struct, kw_only=True):
    """Source code for a session, sent under the name of a task or of a session."""

    name: str
    task_id: str
    """The id of the execution."""
    source: str
    timeout_s: float | None = None
    """After so long the code is stopped."""
    started_at: float = 0.0
    """When the child took it, by the monotonic clock."""
    message: TaskCall | None = None
    """The task message that brought the code, whose tracer is to end it."""


AnyCall = TaskCall | CodeCall


def retries_of(call: AnyCall) -> int:
    """How often Celery has retried the task; each retry is a message of its own."""
    return 0 if isinstance(call, CodeCall) else call.request.get("retries") or 0
