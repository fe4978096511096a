"""From what Celery applies to what a child is sent."""

from __future__ import annotations

import inspect
from typing import Any

from kombu.serialization import dumps

from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.protocol.values import NotCarried

_DECODED = ("args", "kwargs")
"""The request dict repeats them beside the body; the child decodes them anew."""


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
    """A message of the first protocol came decoded: its own bytes travel, if they are there."""
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


def is_redelivered(headers: Any) -> bool:
    """Whether a message was delivered before, by its request's headers."""
    about = headers.get("delivery_info")
    return bool(about and about.get("redelivered"))


def is_coroutine_task(task: Any) -> bool:
    """Whether a task is made with `async def`, in whatever way."""
    functions = (
        getattr(task, "_orig_run", None),
        getattr(task, "run", None),
        type(task).__call__,
    )
    return any(
        inspect.iscoroutinefunction(function) or hasattr(function, "capsule_coroutine")
        for function in functions
    )
