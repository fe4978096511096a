"""`capsule.run`, the Celery task of a durable run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from contextlib import suppress
from typing import Any

import celery
import msgspec
from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry

from capsule_tasks.client.configuration import retention_settings, run_settings
from capsule_tasks.client.runs.host import RunHost, run_host
from capsule_tasks.client.runs.messages import RUN_TASK, message_of_request
from capsule_tasks.client.runs.registry import RegisteredAgent, runs_of
from capsule_tasks.client.task import Task
from capsule_tasks.durable import RunFailure, RunStop
from capsule_tasks.durable.driver import NOT_READABLE
from capsule_tasks.errors import (
    AgentNotRegistered,
    CodeNotRun,
    LeaseLost,
    RunCancelled,
    RunClaimed,
    RunClaimLost,
    RunEnded,
    RunExists,
    RunFailed,
    RunNotFound,
    RunParked,
    StorageError,
)
from capsule_tasks.protocol.events import RUN_CANCELLED, RUN_ELSEWHERE, RUN_PARKED

log = logging.getLogger("capsule_tasks.child")

_PAUSE_S = (1.0, 3.0)
"""Before a message goes to another worker: this one, too, may get it again."""

_NEEDS = "runs are driven by a worker whose pool is capsule_tasks.taskpool:TaskPool"

_random = random.Random()  # noqa: S311  leaves the program's own generator alone


class RunTask(Task, celery.Task):
    """Drives one run. Its id is the id of the run, and each delivery is an attempt at it.

    The claim of the run decides who drives it. A delivery that does not get it changes nothing: its
    message is acknowledged, as whoever has the run answers for it.
    """

    name = RUN_TASK
    acks_late = True
    reject_on_worker_lost = True
    max_retries = None
    throws = (RunFailed, RunCancelled, RunNotFound)
    """Expected, so that the log of a worker has no traceback of its own for each."""
    capsule_claims_with_output = True

    @property
    def capsule_retention(self) -> dict[str, float]:
        """The events of a run are kept for as long as the run."""
        runs, events = run_settings(self.app), retention_settings(self.app)
        return {
            "unfinished_ttl_s": max(runs.ttl_s, events.unfinished_ttl_s),
            "control_ttl_s": max(runs.ttl_s, events.control_ttl_s),
            "retention_s": max(runs.ended_ttl_s, events.retention_s),
            "silent_retention_s": max(runs.ended_ttl_s, events.silent_retention_s),
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Drive the run in a pool of ours; in another pool, have another worker do it."""
        made: Any = self.run(*args, **kwargs)
        if not inspect.iscoroutine(made):
            return made
        made.close()  # Celery's own pools run no coroutines
        if self.request.is_eager:
            raise CodeNotRun(f"{_NEEDS}, and not eagerly")
        log.warning("run %s goes to another worker: %s, and not this one", self.request.id, _NEEDS)
        time.sleep(_random.uniform(*_PAUSE_S))
        raise Reject(_NEEDS, requeue=True)

    async def run(
        self, given: Any = None, *, agent: str, session: str | None = None, context: Any = None
    ) -> Any:
        """Drive the run of this id to its end, or until it waits for a person."""
        if self.request.is_eager:
            raise CodeNotRun(f"{_NEEDS}, and not eagerly")
        run_id, message = str(self.request.id), message_of_request(self)
        host = run_host(self.app)
        try:
            try:
                registered = await _registered(self.app, host, run_id, agent)
                if given is not None:
                    await _create(host, run_id, session, registered, given, context)
                stop = await _driven(host, run_id, registered, message)
            except RunEnded as ended:
                state = await host.execution_state(run_id)
                if state != "running":
                    return _end_of(ended, state)
                # The worker that has it reports the end now. Or it has died, and is not known to be
                # dead: then this is the only message that is left.
                why = "it has ended, and its end is being reported"
            else:
                return _outcome(run_id, stop.status, stop.result, stop.failure)
        except (RunClaimed, RunParked, RunClaimLost) as error:
            log.info("run %s is left to others: %s", run_id, error)
            raise Ignore(RUN_ELSEWHERE) from None
        except NOT_READABLE as error:
            why = f"it cannot be driven here: {error}"
        except (StorageError, LeaseLost) as error:
            why = f"it could not be driven: {error}"
        log.warning("run %s goes to another worker: %s", run_id, why)
        await asyncio.sleep(_random.uniform(*_PAUSE_S))
        raise Reject(why, requeue=True)


async def _registered(app: Any, host: RunHost, run_id: str, agent: str) -> RegisteredAgent:
    """The agent of a run. A worker without it can still report the end of a run that has ended."""
    try:
        return runs_of(app).agent(agent)
    except AgentNotRegistered:
        with suppress(RunNotFound):  # a run of a canvas, which its first worker stores
            await host.refuse_ended(run_id)
        raise


async def _create(
    host: RunHost,
    run_id: str,
    session: str | None,
    agent: RegisteredAgent,
    given: Any,
    context: Any,
) -> None:
    """Store a run of a canvas, unless a delivery before did."""
    if not isinstance(given, (str, list)):  # the value of a task before, in a chain
        given = msgspec.json.encode(given).decode()
    try:
        await host.create(run_id, session, agent, given, context)
    except RunExists:
        return


async def _driven(host: RunHost, run_id: str, agent: RegisteredAgent, message: bytes) -> RunStop:
    try:
        return await host.drive(run_id, agent, message)
    except SoftTimeLimitExceeded as limit:
        failure = RunFailure("timeout", type(limit).__name__, "its soft time limit has passed")
        return await host.fail(run_id, agent, failure)


def _end_of(ended: RunEnded, state: str) -> Any:
    """The end of a run that had ended before, for a task whose end nobody has reported.

    The worker that drove the run died before that, or nobody drove it when it was cancelled.
    """
    if state == "ended" and ended.status != "cancelled":
        raise Ignore(RUN_ELSEWHERE)
    failure = msgspec.json.decode(ended.error, type=RunFailure) if ended.error else None
    return _outcome(ended.run_id, ended.status, ended.result, failure)


def _outcome(run_id: str, status: str, result: bytes, failure: RunFailure | None) -> Any:
    """The value of the task, or what it raises."""
    match status:
        case "completed":
            return msgspec.json.decode(result)
        case "interrupted":
            raise Retry(RUN_PARKED)  # Celery stores RETRY and acknowledges the message
        case "cancelled":
            raise Ignore(RUN_CANCELLED)  # the worker reports the task as revoked
    failure = failure or RunFailure("error", "RunFailed", "it is not known why")
    raise RunFailed(run_id, failure.kind, failure.type, failure.message)
