"""Runs guardrails: of inputs beside the model or before it, of outputs, and of tool calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from inspect import isawaitable
from typing import Any, TypeVar

from capsule_tasks.errors import GuardrailFailed, GuardrailTripped
from capsule_tasks.errors.base import reason_of
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.guardrails import (
    InputGuardrail,
    OutputGuardrail,
    ToolGuardrail,
    ToolVerdict,
    Verdict,
)
from capsule_tasks.runs.engine.waiting import all_passed, is_cancelled
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.models.calling import PASSES
from capsule_tasks.runs.records import GuardrailKind, GuardrailResult, Item

_log = logging.getLogger(__name__)

T = TypeVar("T")

Report = Callable[[GuardrailResult], None]
"""Records the result of a guardrail, and shows it to those who watch the run."""


def shown(result: GuardrailResult) -> dict[str, Any]:
    """A result, as those who watch see it."""
    data = {"kind": result.kind, "name": result.name, "tripped": result.tripped}
    if result.call_id is not None:
        data |= {"call_id": result.call_id, "behavior": result.behavior}
    return data


class Guardrails:
    """The guardrails of one agent's turn."""

    def __init__(self, agent: Agent, identity: AgentId, context: RunContext, report: Report):
        self._agent = agent
        self._identity = identity
        self._context = context
        self._report = report

    async def check_in_order(
        self, guardrails: Sequence[InputGuardrail], given: str | list[Item]
    ) -> None:
        """Check an input before the model is asked."""
        for guardrail in guardrails:
            await self._checked("input", guardrail, given)

    async def beside(
        self,
        work: Coroutine[Any, Any, T],
        guardrails: Sequence[InputGuardrail],
        given: str | list[Item],
    ) -> T:
        """The result of some work, once all guardrails that run beside it have let it pass.

        The work is cancelled as soon as one of them has not.
        """
        task = asyncio.create_task(work)
        checks = [self._checked("input", each, given) for each in guardrails]
        await all_passed([*map(asyncio.create_task, checks), task])
        return task.result()

    async def check_output(self, guardrails: Sequence[OutputGuardrail], output: Any) -> None:
        """Check a final output, by all guardrails at once."""
        if len(guardrails) == 1:
            await self._checked("output", guardrails[0], output)
        elif guardrails:
            checks = [self._checked("output", each, output) for each in guardrails]
            await all_passed([asyncio.create_task(each) for each in checks])

    async def trips(
        self,
        kind: GuardrailKind,
        guardrails: Sequence[InputGuardrail | OutputGuardrail],
        value: Any,
    ) -> bool:
        """Whether one of several guardrails, which run at once, has tripped.

        The others are cancelled then. A guardrail that fails is logged and skipped: where people
        talk with a model, a broken guardrail must neither end the session nor block the others.
        """
        checks = [self._checked_or_skipped(kind, each, value) for each in guardrails]
        try:
            await all_passed([asyncio.create_task(each) for each in checks])
        except GuardrailTripped:
            return True
        return False

    async def _checked_or_skipped(
        self, kind: GuardrailKind, guardrail: InputGuardrail | OutputGuardrail, value: Any
    ) -> None:
        try:
            await self._checked(kind, guardrail, value)
        except GuardrailFailed as error:
            text = "%s guardrail %r of agent %r was skipped: %s"
            _log.warning(
                text, kind, guardrail.name, self._agent.name, error.reason, exc_info=error.__cause__
            )

    async def _checked(
        self, kind: GuardrailKind, guardrail: InputGuardrail | OutputGuardrail, value: Any
    ) -> None:
        found = await _verdict(
            guardrail.name, Verdict, guardrail.check, self._context, self._agent, value
        )
        about = {"kind": kind, "name": guardrail.name, "tripped": found.tripped}
        self._record(found.info, **about)

    async def rejection(
        self,
        guardrails: Sequence[ToolGuardrail],
        context: ToolContext,
        key: ToolKey,
        *output: str | list[Item],
    ) -> str | None:
        """The text in place of a call, or of its output, that a guardrail has rejected; else None.

        Raises GuardrailTripped if a guardrail wants the run to end.
        """
        for guardrail in guardrails:
            name = guardrail.name
            found = await _verdict(name, ToolVerdict, guardrail.check, context, *output)
            self._record(
                found.info,
                kind="tool_output" if output else "tool_input",
                name=name,
                tripped=found.behavior == "raise",
                call_id=context.call_id,
                tool=key,
                behavior=found.behavior,
                message=found.message,
            )
            if found.behavior == "reject":
                what = "output of this call" if output else "call of this tool"
                if found.message:
                    return sendable(found.message)
                return f"The {what} was rejected by the guardrail {name!r}."
        return None

    def _record(self, info: Any, **fields: Any) -> None:
        """Report a result; raise GuardrailTripped for one that ends the run."""
        result = GuardrailResult.recorded(info=info, agent=self._identity, **fields)
        self._report(result)
        if result.tripped:
            raise GuardrailTripped(result.name, result.kind, self._agent.name, result.info)


V = TypeVar("V", Verdict, ToolVerdict)


async def _verdict(name: str, kind: type[V], check: Callable[..., Any], *about: Any) -> V:
    try:
        found = check(*about)
        if isawaitable(found):
            found = await found
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise GuardrailFailed(name, "it was cancelled") from error
    except PASSES:
        raise
    except BaseException as error:
        raise GuardrailFailed(
            name, f"it raised {type(error).__name__}: {reason_of(error)}"
        ) from error
    if not isinstance(found, kind):
        raise GuardrailFailed(name, f"it returned {found!r:.100}, not a {kind.__name__}")
    return found
