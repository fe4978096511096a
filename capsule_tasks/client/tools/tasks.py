"""`task_tool`: a Celery task as a tool of agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from capsule_tasks.client.configuration import prefix_of, run_settings
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.options import check_options
from capsule_tasks.client.redis_location import needed_redis_url
from capsule_tasks.client.steps import Steps
from capsule_tasks.client.tools.following import (
    Follower,
    as_text,
    bounded,
    execution_id,
    stop_with_run,
)
from capsule_tasks.errors import (
    EffectUncertain,
    InvalidSetting,
    NoResult,
)
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.runs.agents.checking import check_tool_name
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.parameters import Parameters, parameters_of
from capsule_tasks.runs.agents.schemas import as_json
from capsule_tasks.runs.agents.tools import Tool
from capsule_tasks.settings import ByteCount, PositiveSeconds, StepSettings, check_value
from capsule_tasks.storage.executions.types import Event

_OWN = ("task_id", "args", "kwargs", "add_to_parent")
"""Options of `apply_async` that the tool sets."""
_MAX_SENDS = 5
_STOPS_S = 10.0
"""How long a task that has run out of time, and was cancelled, may take to end."""
OptionalSeconds = PositiveSeconds | None
Arguments = tuple[list[Any], dict[str, Any]]


def task_tool(
    task: Any,
    *,
    name: str | None = None,
    description: str | None = None,
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False,
    timeout_s: float | None = None,
    max_output_chars: int = 32_000,
    **options: Any,
) -> Tool:
    """A tool whose calls are executions of a Celery task, on any worker.

    The arguments are those of the task's function, and the output is its result. `options` are
    those of `apply_async`: `queue`, `priority`, `expires`, … A call that is made again, since the
    process that made it was lost, waits for the execution that it has. With the run the execution
    is cancelled; so it is after `timeout_s`, which count from the call and not from its start.
    """
    app = getattr(task, "app", None)
    if app is None or not hasattr(task, "apply_async"):
        raise InvalidSetting("task", task, "a Celery task")
    for option in _OWN:
        if option in options:
            raise InvalidSetting(option, options[option], "left out: the tool sets it")
    check_options("task_tool", options, ("name", "description", "needs_approval", "timeout_s"))
    check_value("timeout_s", timeout_s, OptionalSeconds)
    check_value("max_output_chars", max_output_chars, ByteCount)
    name = task.name.rpartition(".")[2] if name is None else name
    check_tool_name("task_tool.name", name)
    parameters = parameters_of(task.run, name)
    if parameters.takes_context:
        raise InvalidSetting("task", task, "a task whose function takes no context of a run")
    calls = _TaskCalls(task, parameters, timeout_s, max_output_chars, options)
    return Tool(
        name=name,
        description=parameters.description if description is None else description,
        parameters=parameters.schema,
        strict=parameters.strict,
        check=parameters.check,
        invoke=calls.invoke,
        needs_approval=needs_approval,
        on_uncertain="retry",
    )


class _TaskCalls:
    """Makes the calls of one tool."""

    def __init__(
        self,
        task: Any,
        parameters: Parameters,
        timeout_s: float | None,
        limit: int,
        options: dict[str, Any],
    ) -> None:
        self._task = task
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._limit = limit
        self._options = options

    async def invoke(self, ctx: ToolContext, arguments: str) -> str:
        """Send the task, or find the execution of this call, and wait for its result."""
        positional, named = self._parameters.decode(arguments)
        call = as_json(positional), as_json(named)
        if self._task.app.conf.task_always_eager:
            result = await asyncio.to_thread(self._send, execution_id(ctx), call)
            return bounded(as_text(result.get()), self._limit)
        sending = asyncio.create_task(self._sent(ctx, arguments, call))
        try:
            return await self._result(ctx, await asyncio.shield(sending))
        except asyncio.CancelledError:
            await asyncio.wait({sending})  # what is being sent can be cancelled once it is
            if sending.exception() is None:
                await stop_with_run(ctx, sending.result())
            raise

    async def _sent(self, ctx: ToolContext, arguments: str, call: Arguments) -> Execution:
        """The execution of the call, which is sent unless it was.

        A process that was lost while it sent the message leaves no trace if the message did not
        reach the broker, or still waits there. That message is revoked, and another one is sent,
        under another id.
        """
        app = self._task.app
        settings = StepSettings(prefix=prefix_of(app), ttl_s=run_settings(app).ttl_s)
        steps = Steps(needed_redis_url(app), execution_id=execution_id(ctx), settings=settings)

        async def send(task_id: str, _arguments: str) -> int:
            await asyncio.to_thread(self._send, task_id, call)
            return round(time.time())

        for number in range(_MAX_SENDS):
            task_id = execution_id(ctx, number)
            execution = Execution(task_id, app=app)
            execution.ignored = self._ignores_result
            try:
                sent_at = await steps.step(f"send {number}", send, task_id, arguments)
            except EffectUncertain:
                if (await execution.asnapshot()).state != "unknown":
                    return execution
                if await execution.acancel() != "pending":
                    return execution
                continue
            if ctx.is_repeat:
                await self._check_known(ctx, execution, sent_at)
            return execution
        why = f"{_MAX_SENDS} processes were lost while they sent its task"
        raise EffectUncertain(ctx.tool, "", why)

    async def _check_known(self, ctx: ToolContext, execution: Execution, sent_at: int) -> None:
        """Refuse to wait for a result that has expired."""
        expires = self._task.app.conf.result_expires
        kept_s = expires.total_seconds() if isinstance(expires, timedelta) else expires
        if not kept_s or time.time() < sent_at + kept_s:
            return
        if (await execution.asnapshot()).state == "unknown":
            sent = datetime.fromtimestamp(sent_at, UTC).isoformat()
            why = "its task was sent then, and its result, if there was one, has expired"
            raise EffectUncertain(ctx.tool, sent, why)

    def _send(self, task_id: str, call: Arguments) -> Any:
        options = {"task_id": task_id, "add_to_parent": False, **self._options}
        result = self._task.apply_async(*call, **options)
        if result.backend is not None:
            # Celery has subscribed to the result on this thread, which may end at any time.
            with suppress(AttributeError):  # an eager result waits for nothing
                result.backend.remove_pending_result(result)
        return result

    @property
    def _ignores_result(self) -> bool:
        return bool(self._options.get("ignore_result", self._task.ignore_result))

    async def _result(self, ctx: ToolContext, execution: Execution) -> str:
        follower = Follower(ctx, execution, self._limit)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                end = await follower.end()
        except TimeoutError:
            if not limit.expired():
                raise
            end = await self._stopped(ctx, execution)
        return bounded(await _value(execution, end), self._limit)

    async def _stopped(self, ctx: ToolContext, execution: Execution) -> Event:
        """Cancel a task that has run out of time; its end, if it has ended otherwise meanwhile."""
        about = f"task {self._task.name} took longer than {self._timeout_s:g} s"
        if await execution.acancel() == "pending":
            raise TimeoutError(f"{about}: it had not started, and was cancelled")
        try:
            async with asyncio.timeout(_STOPS_S):
                end = await Follower(ctx, execution, self._limit).end()
        except TimeoutError:
            raise TimeoutError(f"{about}: it was asked to stop, and goes on") from None
        if isinstance(end.message, Ended) and end.message.outcome == Outcome.CANCELLED:
            raise TimeoutError(f"{about}: it was cancelled")
        return end


async def _value(execution: Execution, end: Event) -> str:
    """The result as text; raises the error of the task."""
    ended = end.message
    result_text = ended.result_text if isinstance(ended, Ended) else ""
    try:
        value = await execution.value_at(end)
    except NoResult:
        if not isinstance(ended, Ended) or ended.outcome != Outcome.SUCCEEDED:
            raise
    else:
        if value is not None or result_text in ("", "None"):
            return as_text(value)
    return f"The task has succeeded. Its result is not kept; it was {result_text or 'not noted'}."
