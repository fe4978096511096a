"""`code_tool`: code of a model in a named session, as a tool of agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec.structs import replace

from capsule_tasks.client.redis_location import app_of_task
from capsule_tasks.client.sessions.execution import SessionExecution
from capsule_tasks.client.sessions.named_session import DEFAULT_PROFILE, NamedSession, check_id
from capsule_tasks.client.tools.following import (
    Follower,
    as_text,
    bounded,
    execution_id,
    stop_with_run,
)
from capsule_tasks.errors import CodeFailed, CodeNotRun, NoResult, SessionUnknown
from capsule_tasks.protocol.events import Ended, Outcome, SessionRestored
from capsule_tasks.runs.agents.checking import check_tool_name
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.tools import Tool
from capsule_tasks.runs.records import CodeSession
from capsule_tasks.settings import ByteCount, PositiveSeconds, check_value
from capsule_tasks.storage.executions.types import Event
from capsule_tasks.storage.sessions.types import NamedSessionInfo

DESCRIPTION = (
    "Run Python code and return what it prints, and the value of its last expression. Names stay "
    "defined from one call to the next."
)
NO_HOST_S = 30.0
"""How long a call waits for a worker that hosts sessions of its profile."""


def code_tool(
    app: Any = None,
    *,
    name: str = "run_python",
    description: str = DESCRIPTION,
    session: str | None = None,
    profile: str = DEFAULT_PROFILE,
    tenant: str | None = None,
    timeout_s: float | None = 120.0,
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False,
    max_output_chars: int = 32_000,
) -> Tool:
    """A tool that runs code in a named session, which keeps its names between the calls.

    The session is by default the one whose history the run has, and so has its id; a run without a
    history has one of its own. Each call runs at most once: a call that is made again, since the
    process that made it was lost, waits for the code that runs. `timeout_s` limits how long the
    code runs. The code is confined as its `profile` says. `app` is by default that of the task that
    runs, else Celery's current app.
    """
    check_tool_name("code_tool.name", name)
    for about, value in (("session", session), ("profile", profile), ("tenant", tenant)):
        if value is not None:
            check_id(about, value)
    check_value("timeout_s", timeout_s, PositiveSeconds | None)
    check_value("max_output_chars", max_output_chars, ByteCount)
    calls = _CodeCalls(app, session, profile, tenant, timeout_s, max_output_chars)
    tool = function_tool(
        name=name, description=description, needs_approval=needs_approval, on_uncertain="retry"
    )
    return tool(calls.invoke)


class _CodeCalls:
    """Makes the calls of one tool."""

    def __init__(
        self,
        app: Any,
        session: str | None,
        profile: str,
        tenant: str | None,
        timeout_s: float | None,
        limit: int,
    ) -> None:
        self._app = app
        self._session = session
        self._profile = profile
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._limit = limit

    async def invoke(self, ctx: ToolContext, code: Annotated[str, "Python source code."]) -> str:
        """Submit the code, unless it was, and wait for its end."""
        session = NamedSession(
            app_of_task() if self._app is None else self._app,
            self._session or ctx.session_id or ctx.run_id,
            profile=self._profile,
            tenant=self._tenant,
        )
        seen, call_id = _seen(ctx, session), execution_id(ctx)
        # A session that was closed goes on counting its calls, so their numbers do not tell.
        is_gone = bool(seen.last_call) and not ctx.is_repeat and await _info(session) is None
        submitting = asyncio.create_task(
            session.aexecute(code, timeout_s=self._timeout_s, call_id=call_id)
        )
        try:
            execution = await asyncio.shield(submitting)
            follower = Follower(ctx, execution, self._limit)
            end = await self._end(session, execution, follower)
        except asyncio.CancelledError:
            await asyncio.wait({submitting})  # a call can be cancelled once it is submitted
            if submitting.exception() is None:
                await stop_with_run(ctx, submitting.result())
            raise
        has_begun_anew = is_gone or 0 < execution.submission.seq <= seen.last_call
        ctx.note_code(await _after(session, seen, execution.submission.seq))
        notes = _losses(follower.restored, has_begun_anew=has_begun_anew)
        printed = follower.output
        if ctx.is_repeat and not end.at:
            notes += "[The code ran before; what it printed is not kept any more.]\n"
        return notes + _text(printed, await self._value(execution, end))

    async def _end(
        self, session: NamedSession, execution: SessionExecution, follower: Follower
    ) -> Event:
        """The last event of the call; CodeNotRun if no worker hosts such sessions."""
        following = asyncio.create_task(follower.end(answers_input=True))
        try:
            done, _ = await asyncio.wait({following}, timeout=NO_HOST_S)
            if not done and not follower.has_begun and await _has_no_host(session):
                await execution.acancel()
                raise CodeNotRun(
                    f"no worker hosts named sessions of profile {self._profile!r}; the code has "
                    "not run, and was cancelled"
                )
            return await following
        finally:
            following.cancel()

    async def _value(self, execution: SessionExecution, end: Event) -> str | None:
        """The value of the code as text, or its error with the traceback; None for no value."""
        try:
            value = await execution.value_at(end)
        except CodeFailed as failed:
            error = failed.traceback.rstrip()
            if failed.kind != "raised" or not error:
                error = f"{error}\n{failed}".strip()
            return bounded(error, self._limit)
        except NoResult:
            ended = end.message
            if not isinstance(ended, Ended) or ended.outcome != Outcome.SUCCEEDED:
                raise
            return ended.result_text or None
        return None if value is None else bounded(as_text(value), self._limit)


def _seen(ctx: ToolContext, session: NamedSession) -> CodeSession:
    """How far the run has seen the session before this call."""
    if ctx.code is not None and ctx.code.session_id == session.id:
        return ctx.code
    return CodeSession(session_id=session.id, profile=session.profile)


async def _after(session: NamedSession, seen: CodeSession, seq: int) -> CodeSession:
    """How far the run has seen the session after a call, which has no number if it is repeated."""
    info = await _info(session)
    checkpoint = info.checkpoint if info is not None else None
    generation = checkpoint.generation if checkpoint is not None else None
    return replace(seen, last_call=seq or seen.last_call, generation=generation)


async def _has_no_host(session: NamedSession) -> bool:
    info = await _info(session)
    return info is not None and not info.owner and info.hosts == 0


async def _info(session: NamedSession) -> NamedSessionInfo | None:
    try:
        return await session.ainfo()
    except SessionUnknown:
        return None


def _losses(restored: SessionRestored | None, *, has_begun_anew: bool) -> str:
    """The notes for the model about names that it made before and that are not there now."""
    if has_begun_anew:
        return "[The session has begun anew: nothing of the calls before this one is defined.]\n"
    if restored is None or not (restored.lost_calls or restored.lost):
        return ""
    if restored.saved_at is None:
        return "[The session was lost: nothing of the calls before this one is defined.]\n"
    at = datetime.fromtimestamp(restored.saved_at, UTC).isoformat(" ", "seconds")
    about = [f"The session was lost, and restored as it was at {at}"]
    if restored.lost_calls:
        about.append(f"of the calls before this one, the last {restored.lost_calls} are lost")
    if restored.lost:
        about.append(f"not restored are {', '.join(restored.lost)}")
    return f"[{'; '.join(about)}.]\n"


def _text(printed: str, value: str | None) -> str:
    """The output of the tool: what the code printed, and its value or error."""
    if value is None:
        return printed or "[The code has ended without output.]"
    return f"{printed}{'' if not printed or printed.endswith(chr(10)) else chr(10)}{value}"
