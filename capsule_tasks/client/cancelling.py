"""Cancel executions, one or thousands: each is sent one command, and all share one wait."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.client.revokes import store_revokes
from capsule_tasks.client.runs.messages import RUN_TASK, cancel_run
from capsule_tasks.client.watching.results import stored_ends
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.client.watching.watcher import (
    MAX_OUTAGE_S,
    ExecutionWatcher,
    end_from_index,
    in_batches,
)
from capsule_tasks.errors import RunEnded, RunNotFound, reason_of
from capsule_tasks.protocol.events import CancelCommand, Command, Ended
from capsule_tasks.storage.executions.types import State

log = logging.getLogger("capsule_tasks.client")

CancelAnswer = Literal["requested", "pending", "over"]
"""`requested`: a worker runs the execution and was sent the command. `pending`: no worker has
claimed the execution; the one that claims it reads the command. `over`: the execution has ended."""


async def cancel_all(
    app: Any, ids: Iterable[str], grace_s: float | None
) -> dict[str, CancelAnswer]:
    """Cancel executions; the answer for each id, in the order of the ids.

    Executions that no worker with streams has started are also revoked through Celery. The revoke
    reaches workers of other pools, and tasks that a worker holds until their ETA. Durable runs are
    also cancelled in their store: no worker has one that waits for a person, or is about to.
    """
    check_grace(grace_s)
    wanted = list(dict.fromkeys(ids))
    for one in wanted:
        check_type("an execution id", one, str)
    answers: dict[str, CancelAnswer] = dict.fromkeys(wanted, "pending")
    if redis_url(app) is not None:
        command = CancelCommand(grace_s=grace_s, requested_by=requested_by())
        states = await _states_after(app, wanted, command)
        begun = [one for one, state in states.items() if state in ("waiting", "running")]
        await _cancel_runs(app, begun)
        answers = _answers(states)
    pending = [one for one, answer in answers.items() if answer == "pending"]
    for batch in in_batches(pending):
        await asyncio.to_thread(_revoke, app, batch)
    return answers


async def send_to_all(app: Any, ids: Sequence[str], command: Command) -> dict[str, CancelAnswer]:
    """Send a command to executions; the answer for each, from its state after that."""
    return _answers(await _states_after(app, ids, command))


async def _states_after(app: Any, ids: Sequence[str], command: Command) -> dict[str, State]:
    watcher = await watch_thread.watcher(app)
    states = await watcher.send_command_to_all(ids, command)
    unknown = [one for one, state in states.items() if state == "unknown"]
    over = {one for one, state in states.items() if state == "ended"}
    try:
        async with asyncio.timeout(MAX_OUTAGE_S):
            over |= (await ended_without_stream(app, watcher, unknown)).keys()
    except Exception as fault:  # noqa: BLE001  any backend, any error: the revoke must follow
        log.warning(
            "cannot read whether %s executions have ended; they are answered as pending: %s",
            len(unknown),
            reason_of(fault),
        )
    for one in over:
        name = type(command).__struct_config__.tag
        log.info("execution %s has ended: command %s ignored", one, name)
    return states | dict.fromkeys(over, "ended")


def _answers(states: dict[str, State]) -> dict[str, CancelAnswer]:
    answers: dict[State, CancelAnswer] = {"ended": "over", "running": "requested"}
    return {one: answers.get(state, "pending") for one, state in states.items()}


async def _cancel_runs(app: Any, ids: Sequence[str]) -> None:
    """Cancel those executions that are durable runs."""
    watcher = await watch_thread.watcher(app)
    for some in in_batches(ids):
        records = await asyncio.gather(*map(watcher.store.read_record, some))
        for one, record in zip(some, records, strict=True):
            if record.task == RUN_TASK:
                with suppress(RunNotFound, RunEnded):
                    await cancel_run(app, watcher.runs, one, requester())


async def ended_without_stream(
    app: Any, watcher: ExecutionWatcher, ids: Sequence[str]
) -> dict[str, Ended]:
    """The ends in the result backend, and of the others in the index of recent executions."""
    ends: dict[str, Ended] = {}
    for some in in_batches(ids):
        ends |= await asyncio.to_thread(stored_ends, app, some)
        rest = [one for one in some if one not in ends]
        for one, entry in (await watcher.store.find_recent(rest)).items():
            if (ended := end_from_index(entry)) is not None:
                ends[one] = ended
    return ends


def _revoke(app: Any, ids: Sequence[str]) -> None:
    """Revoke through Celery tasks that no worker has started, or that run on another pool."""
    store_revokes(app, *ids)
    app.control.revoke(list(ids), terminate=True, signal="SIGTERM")


def requested_by() -> str:
    """The sender of a command or of a call, as a worker's log names it."""
    return f"{requester()}, process {os.getpid()}"


def requester() -> str:
    """The user and host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, not {value!r}")


def check_grace(grace_s: float | None) -> None:
    if not isinstance(grace_s, int | float | None):
        raise TypeError(f"grace_s = {grace_s!r}: must be a number of seconds, from 0 to 86400")
    if grace_s is not None and not 0 <= grace_s <= 86400:
        raise ValueError(f"grace_s = {grace_s!r}: must be from 0 to 86400 seconds")
