"""A call of a named session that came as a Celery task: `capsule.execute(source, session=…)`.

The task is a client of its session like any other: it submits the call under its own id, and waits.
So a message that is delivered again finds the call, and runs nothing twice.

Who stores what: the worker that has the session stores the result under the call's id, before the
call leaves the log. That is the only result. A worker that dies while its task waits loses nothing,
and whoever is given the message again reads it there. Celery's tracer then ends the task with this
result without storing it once more, so that chords count, links are called and signals are sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from capsule_tasks.client.sessions.execution import SessionExecution
from capsule_tasks.client.sessions.named_session import (
    DEFAULT_PROFILE,
    NamedSession,
    check_id,
    check_source,
)
from capsule_tasks.protocol.calls import SessionCall

SESSION_TASK = "capsule.execute_in_session"


class SessionArguments(NamedTuple):
    """The arguments of one `capsule.execute` with a session."""

    source: str
    session: str
    profile: str
    tenant: str | None
    timeout_s: float | None


def session_arguments(
    source: str,
    *,
    session: str,
    profile: str = DEFAULT_PROFILE,
    tenant: str | None = None,
    timeout_s: float | None = None,
) -> SessionArguments:
    """The arguments of the task; an error names a value with which no code can run."""
    check_source(source, timeout_s, "wait")
    check_id("session", session)
    check_id("profile", profile)
    if tenant is not None:
        check_id("tenant", tenant)
    return SessionArguments(source, session, profile, tenant, timeout_s)


async def submit_as_task(
    app: Any, task_id: str, arguments: SessionArguments, *, group: str = "", index: int = -1
) -> SessionExecution:
    """Submit the call of a task, unless an earlier delivery of its message has done so."""
    call = SessionCall(
        source=arguments.source,
        timeout_s=arguments.timeout_s,
        task=SESSION_TASK,
        group=group,
        index=index,
    )
    return await _session(app, arguments).submit(task_id, call, busy="wait")


def _session(app: Any, arguments: SessionArguments) -> NamedSession:
    return NamedSession(app, arguments.session, profile=arguments.profile, tenant=arguments.tenant)
