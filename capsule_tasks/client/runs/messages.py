"""The Celery message of a run as bytes, so that any process can send it again.

The bytes are the JSON of a signature with its options: queue and priority, group, chord and chain,
callbacks, root and parent, stamps. The store of runs keeps them; only this module reads them.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.canvas import Signature
from kombu.exceptions import OperationalError
from kombu.utils import json

from capsule_tasks.errors import InvalidRunState, InvalidSetting, RunEnded, StorageError, reason_of
from capsule_tasks.storage import RunStore
from capsule_tasks.storage.runs.types import Status

log = logging.getLogger("capsule_tasks.client")

RUN_TASK = "capsule.run"

_OF_ONE_DELIVERY = ("redelivered", "consumer_tag", "delivery_tag", "message_count")
"""Parts of `delivery_info` that are not options of a publisher."""


def message_of(signature: Signature) -> bytes:
    """The message of a run that has not been delivered yet.

    A countdown becomes a time, so that a message that is sent again waits no longer.
    """
    options = {key: value for key, value in signature.options.items() if value is not None}
    now = datetime.now(UTC)
    if (countdown := options.pop("countdown", None)) is not None:
        options["eta"] = now + timedelta(seconds=countdown)
    if isinstance(expires := options.get("expires"), (int, float)):
        options["expires"] = now + timedelta(seconds=expires)
    return _written(signature.args, signature.kwargs, options)


def message_of_request(task: Any, request: Any = None) -> bytes:
    """The message of a run that a worker was just delivered, without its input, which is stored.

    Neither the time at which it was to start nor that at which it expired is kept: it has started.
    """
    request = task.request if request is None else request
    kwargs = {"agent": request.kwargs["agent"]}
    signature = task.signature_from_request(request, (), kwargs)
    options = {key: value for key, value in signature.options.items() if value is not None}
    for key in ("eta", "expires", *_OF_ONE_DELIVERY):
        options.pop(key, None)
    return _written((), kwargs, options)


def signature_of(app: Any, run_id: str, message: bytes) -> Signature:
    """The signature in a message, to be sent under the id of its run."""
    try:
        found = json.loads(message)
        args, kwargs, options = found["args"], found["kwargs"], found["options"]
        signature: Signature = app.signature(RUN_TASK, args, kwargs, options=options)
    except (ValueError, KeyError, TypeError) as fault:
        raise InvalidRunState(f"the message of run {run_id!r:.100}", repr(fault)) from fault
    return signature.set(task_id=run_id)


def at_once(message: bytes) -> bytes:
    """The message of a run without the time at which the run was to start, or to expire.

    A run that was cancelled before it started ends now, and not at that time.
    """
    try:
        found = json.loads(message)
        options = found["options"]
    except (ValueError, KeyError, TypeError):
        return message  # not one of ours, as `send` will say
    found["options"] = {key: options[key] for key in options if key not in ("eta", "expires")}
    text: str = json.dumps(found)
    return text.encode()


def send(app: Any, run_id: str, message: bytes) -> None:
    """Publish the message of a run under its id. Blocks; errors are those of the broker."""
    result = signature_of(app, run_id, message).apply_async(add_to_parent=False)
    if result.backend is not None:
        # Celery has subscribed to the result, on a thread that may end at any time. Whoever waits
        # for it subscribes again.
        result.backend.remove_pending_result(result)


async def send_and_note(
    app: Any, store: RunStore, run_id: str, message: bytes, updated_us: int
) -> None:
    """Send the message that a change of the run at `updated_us` needs.

    A broker or a Redis that is away is only logged: the run knows that it needs a message, and a
    worker sends it.
    """
    try:
        await asyncio.to_thread(send, app, run_id, message)
        await store.note_sent(run_id, updated_us)
    except (OperationalError, StorageError) as fault:
        log.warning("run %s was not sent; a worker sends it: %s", run_id, reason_of(fault))


async def send_stored(app: Any, store: RunStore, run_id: str, updated_us: int) -> None:
    """Send the stored message of a run, which its change at `updated_us` needs."""
    try:
        record = await store.read(run_id, with_snapshot=False)
    except StorageError as fault:
        log.warning("run %s was not sent; a worker sends it: %s", run_id, reason_of(fault))
        return
    if record.message:  # else whoever created it by hand drives it
        await send_and_note(app, store, run_id, at_once(record.message), updated_us)


async def cancel_run(app: Any, store: RunStore, run_id: str, by: str) -> Status:
    """Cancel a run: its status after that, `cancelled`, or `running` until its owner ends it.

    Raises RunEnded for a run that has completed or failed.
    """
    try:
        cancelled = await store.cancel(run_id, by=by)
    except RunEnded as ended:
        if ended.status == "cancelled":
            return "cancelled"
        raise
    if cancelled.resume:
        await send_stored(app, store, run_id, cancelled.updated_us)
    return cancelled.status


def _written(args: Any, kwargs: Any, options: dict[str, Any]) -> bytes:
    try:
        text: str = json.dumps({"args": list(args), "kwargs": kwargs, "options": options})
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidSetting("the options of a run", options, f"JSON: {fault}") from fault
    return text.encode()
