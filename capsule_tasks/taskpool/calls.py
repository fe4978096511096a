"""Make the call that a child is sent, and its origin, from the task that Celery applies."""

from __future__ import annotations

import inspect
from typing import Any

from kombu.serialization import dumps

from capsule_tasks.errors import InvalidId
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.protocol.values import NotCarried
from capsule_tasks.storage.keys import escaped

_MAX_MEMBERS = 2**27
"""Members that a bitmap in Redis may count without being a danger to it: 16 MiB."""
_DECODED = ("args", "kwargs")
"""The request dict repeats them; the child decodes them from the body."""


def task_call(arguments: Any, request: Any) -> TaskCall:
    """The call of `(task name, id, request dict, body, content type, encoding)`.

    NotCarried if its arguments came decoded and cannot be encoded again.
    """
    name, task_id, headers, body, content_type, encoding = arguments
    carried = {key: value for key, value in headers.items() if key not in _DECODED}
    protocol: Any = 2
    if content_type is None:
        content_type, encoding, body, protocol = _encode_again(body, request, carried)
    is_text = isinstance(body, str)
    return TaskCall(
        name=name,
        task_id=task_id,
        request=carried,
        body=body.encode("utf-8", "surrogatepass") if is_text else bytes(body),
        is_text=is_text,
        content_type=content_type,
        content_encoding=encoding,
        protocol=protocol,
    )


def _encode_again(body: Any, request: Any, headers: dict[str, Any]) -> tuple[Any, Any, Any, int]:
    """A message of the first protocol comes decoded: send its own bytes, if they are there."""
    message = getattr(request, "message", None)
    if message is not None and getattr(message, "content_type", None):
        for key in ("callbacks", "errbacks", "chord", "taskset"):
            headers.pop(key, None)
        return message.content_type, message.content_encoding, message.body, 1
    try:
        content_type, encoding, data = dumps(body, serializer="json")
    except Exception as fault:
        raise NotCarried(f"the arguments of the task: {fault}") from fault
    return content_type, encoding, data, 2


def origin_of(
    call: TaskCall,
    headers: Any,
    request: Any,
    *,
    is_async: bool,
    can_defer_ack: bool,
    limits: tuple[float | None, float | None],
) -> Origin:
    """What decides about a task's life: its message, and its settings as they are now."""
    task: Any = getattr(request, "task", None)
    acks_late = bool(getattr(task, "acks_late", False))
    redelivers_when_lost = acks_late and bool(task.reject_on_worker_lost)
    continues_after_loss = redelivers_when_lost
    if task is not None and getattr(task, "retry_on_worker_lost", False):
        max_retries = task.max_retries
        continues_after_loss = max_retries is None or int(headers.get("retries") or 0) < max_retries
    delivery_info = headers.get("delivery_info")
    group, index = group_of(headers)
    soft_limit_s, hard_limit_s = limits
    return Origin(
        execution_id=call.task_id,
        task=call.name,
        is_async=is_async,
        group=group,
        index=index,
        is_retry=bool(headers.get("retries")),
        is_redelivered=bool(delivery_info and delivery_info.get("redelivered")),
        acks_late=acks_late,
        ack_waits_for_claim=can_defer_ack and not acks_late,
        redelivers_when_lost=redelivers_when_lost,
        continues_after_loss=continues_after_loss,
        redelivers_over_limit=acks_late and not task.acks_on_timeout,
        soft_limit_s=soft_limit_s,
        hard_limit_s=hard_limit_s,
    )


def group_of(headers: Any) -> tuple[str, int]:
    """The group of a task and its index there; none if no key can be made of the group id."""
    group, index = headers.get("group"), headers.get("group_index")
    if group is None or not isinstance(index, int) or not 0 <= index < _MAX_MEMBERS:
        return ("", -1)
    try:
        escaped("group id", group)
    except InvalidId:
        return ("", -1)
    return (group, index)


def is_coroutine_task(task: Any) -> bool:
    """Whether a task is a coroutine: by `async def`, also of a class-based or wrapped task."""
    functions = (
        getattr(task, "_orig_run", None),
        getattr(task, "run", None),
        type(task).__call__,
    )
    return any(
        inspect.iscoroutinefunction(function) or hasattr(function, "capsule_coroutine")
        for function in functions
    )
