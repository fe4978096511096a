"""Makes tool calls: their approvals, guardrails, contexts, outputs and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capsule_tasks.errors import GuardrailTripped, ToolFailed, ToolTimeout, WrongArguments
from capsule_tasks.errors.base import reason_of
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.outputs import output_text
from capsule_tasks.runs.agents.tools import AgentTool, Tool
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.engine.guardrails import Guardrails
from capsule_tasks.runs.engine.ports import UNCERTAIN, Output, TurnPorts, key_of
from capsule_tasks.runs.engine.setup import Abilities, RunSetup, called_back
from capsule_tasks.runs.engine.waiting import is_cancelled
from capsule_tasks.runs.records import CodeSession


@dataclass(frozen=True)
class ToolCaller:
    """Makes the calls of an agent's functions."""

    able: Abilities
    run: RunSetup
    code: CodeSession | None
    """How far the run has seen its code session."""
    ports: TurnPorts
    guardrails: Guardrails
    note_code: Callable[[CodeSession], None]
    started: set[str]
    """The ids of calls whose functions were called."""

    async def needs_approval(self, tool: Tool | AgentTool, call: PendingCall) -> bool:
        """Whether people are asked about this call; they are not, if its arguments are wrong."""
        needed = tool.needs_approval
        if not isinstance(needed, bool):
            agent, context = self.able.agent, self._context(call)
            needed = bool(await called_back("needs_approval", agent, needed, context))
        return needed

    async def rejected_early(self, tool: Tool | AgentTool, call: PendingCall) -> str | None:
        """The text in place of a call about which people need not be asked: it would not be made.

        Its arguments are wrong, or a guardrail rejects it.
        """
        check = tool.input_of if isinstance(tool, AgentTool) else tool.check
        try:
            if check is not None:
                check(call.arguments)
        except WrongArguments as error:
            return str(error)
        if isinstance(tool, AgentTool):
            return None
        early = [each for each in tool.input_guardrails if each.before_approval]
        return await self.guardrails.rejection(early, self._context(call), call.tool)

    async def output_of(self, tool: Tool, call: PendingCall) -> Output:
        """The output of a call as the model gets it, through the ledger of a durable run."""

        async def make(is_repeat: bool) -> Output:
            context = self._context(call, is_repeat=is_repeat)
            return await self._made(tool, call, context)

        key = key_of(self.run.path, call.call_id)
        return await self.ports.call(call, key, tool.on_uncertain, make)

    async def _made(self, tool: Tool, call: PendingCall, context: ToolContext) -> Output:
        rejection = await self.guardrails.rejection(tool.input_guardrails, context, call.tool)
        if rejection is not None:
            return rejection
        if self.ports.is_watched:
            data = {"call_id": call.call_id, "tool": call.tool.text, "arguments": call.arguments}
            self._publish("tool_started", data)
        self.started.add(call.call_id)
        try:
            output = await _invoked(tool, context)
        finally:
            if context.code is not None:
                self.note_code(context.code)
        rejection = await self.guardrails.rejection(
            tool.output_guardrails, context, call.tool, output
        )
        return output if rejection is None else rejection

    def _context(self, call: PendingCall, *, is_repeat: bool = False) -> ToolContext:
        run = self.run.context
        return ToolContext(
            run_id=run.run_id,
            session_id=run.session_id,
            context=run.context,
            turn=run.turn,
            usage=run.usage,
            agent=self.able.agent,
            tool=call.tool.text,
            call_id=call.call_id,
            key=key_of(self.run.path, call.call_id),
            arguments=call.arguments,
            is_repeat=is_repeat,
            code=self.code,
            publish=self._publish if self.ports.is_watched else None,
        )

    def _publish(self, kind: str, data: Any) -> None:
        self.ports.publish(kind, self.able.agent.name, data)


async def _invoked(tool: Tool, context: ToolContext) -> Output:
    """The output of a function, or the text about its error.

    A tool that exits has failed, and does not end the process of all other runs; so has one that
    raises a cancel of its own.
    """
    try:
        output = output_text(tool.name, await tool.call(context, context.arguments))
        return sendable(output) if isinstance(output, str) else output
    except ToolTimeout:
        raise
    except WrongArguments as error:
        return str(error)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return _about(tool, context, RuntimeError("the tool was cancelled"), error)
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001  a tool may raise anything
        return _about(tool, context, error, error)
    except BaseException as error:  # noqa: BLE001  as an exit, or a panic of a library in Rust
        return _about(tool, context, RuntimeError(f"the tool raised {error!r}"), error)


def _about(tool: Tool, context: ToolContext, error: Exception, cause: BaseException) -> str:
    """The text for the model about an error of a tool, or the end of the run."""
    if tool.on_error == "tell":
        return f"The tool failed: {type(error).__name__}: {reason_of(error)}"
    if callable(tool.on_error):
        try:
            return sendable(str(tool.on_error(context, error)))
        except Exception as other:
            raise ToolFailed(tool.name, f"its on_error raised {other!r}") from other
    raise ToolFailed(tool.name, f"{type(error).__name__}: {reason_of(error)}") from cause


def withheld(error: BaseException) -> str | None:
    """The text for the history about a call whose guardrail or error has ended the run."""
    if isinstance(error, GuardrailTripped):
        what = "made, but its output is withheld" if error.kind == "tool_output" else "not made"
        return f"This call was {what}: the guardrail {error.guardrail!r} tripped."
    if isinstance(error, ToolFailed):
        return f"The tool failed: {error.reason}"
    return UNCERTAIN if isinstance(error, ToolTimeout) else None
