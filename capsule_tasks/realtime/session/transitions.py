"""Agents as a model is told of them, and the change from one agent to another.

What an agent's functions say, of its instructions and of what is enabled, is asked once for each
transition; the answers are both what the model is told and what calls of tools go by.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from capsule_tasks.errors import AgentReplaced, RealtimeRefused, SessionStateError
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.events import RealtimeHandoff
from capsule_tasks.realtime.host import AgentSnapshot, SessionHost
from capsule_tasks.realtime.model import AgentSettings, UpdateSettings
from capsule_tasks.realtime.settings import RealtimeSettings
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check
from capsule_tasks.runs.engine.asking import instructions_of
from capsule_tasks.runs.engine.setup import Abilities, AgentBook, RunSetup


async def snapshot_of(agent: Agent, run: RunSetup, over: RealtimeSettings) -> AgentSnapshot:
    """Resolve an agent of the run's book. `over` are settings that precede those of agents.

    Raises InvalidSetting for what a realtime model cannot honour, and CallbackFailed.
    """
    able = await run.book.abilities(run.book.identity(agent), run.context)
    _check_honoured(able)
    instructions = await instructions_of(agent, run.context)
    of_agent = RealtimeSettings(
        tool_choice=agent.model_settings.tool_choice,
        parallel_tool_calls=agent.model_settings.parallel_tool_calls,
        max_output_tokens=agent.model_settings.max_output_tokens,
        reasoning=agent.model_settings.reasoning,
    )
    settings = AgentSettings(instructions or "", able.specs, over.over(of_agent))
    return AgentSnapshot(run, able, settings)


def _check_honoured(able: Abilities) -> None:
    of_agent = f"of agent {able.agent.name!r}"
    for spec in able.specs:
        must = "a function or an agent: a realtime model runs no hosted tools"
        check(f"a tool {of_agent}", spec.name, spec.hosted is None, must)
        name = f"the namespace of tool {spec.name!r} {of_agent}"
        must = "None: the calls of a realtime model name no namespace"
        check(name, spec.namespace, spec.namespace is None, must)
    must = "str: the answers of a realtime model are speech and text"
    check(f"output_type {of_agent}", able.agent.output_type, able.output_type.is_text, must)
    for tool, handoff in able.handoffs.items():
        name = f"input_filter of handoff {tool!r} {of_agent}"
        must = "None: a realtime model keeps its own view of the conversation"
        check(name, handoff.input_filter, handoff.input_filter is None, must)


_within: ContextVar[Transitions | None] = ContextVar("_within", default=None)
"""Whose change of the agent the code runs in, also in tasks that it has started."""


class Transitions:
    """The current agent, which changes only once the model has accepted another one."""

    def __init__(self, host: SessionHost, first: AgentSnapshot, over: RealtimeSettings) -> None:
        self.current = first
        self._host = host
        self._over = over
        self._one_at_a_time = asyncio.Lock()

    def check_caller(self) -> None:
        """Raises SessionStateError for a function of an agent that a change waits for."""
        if _within.get() is self and self._one_at_a_time.locked():
            hint = "instructions and is_enabled cannot change the agent, as the change asks them"
            raise SessionStateError("update_agent()", "changing its agent", hint)

    async def update(self, to: Agent) -> None:
        """Make any agent the current one. Agents are looked at anew: they may have been changed.

        An agent outside of the graph begins a graph of its own.
        """
        async with self._one_at_a_time:
            before = self.current.run
            book = AgentBook(before.book.start)
            if not book.has(to):
                book = AgentBook(to)
            await self._change(to, RunSetup(book, before.config, before.context, before.max_turns))

    async def hand_over(self, to: Agent, of: AgentSnapshot) -> None:
        """Make an agent the current one, if `of` still is. Raises AgentReplaced if it is not."""
        async with self._one_at_a_time:
            if self.current is not of:
                raise AgentReplaced(self.current.agent.name)
            await self._change(to, of.run)

    async def _change(self, to: Agent, run: RunSetup) -> None:
        before = self.current
        _within.set(self)  # until the end of the task, which the session starts for one change
        after = await snapshot_of(to, run, self._over)
        try:
            await self._host.send(UpdateSettings(after.settings))
        except RealtimeRefused:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if self._host.is_open:
                await self._tell_again(before, error)
            raise
        self.current = after
        self._host.emit(RealtimeHandoff(before.agent, after.agent))

    async def _tell_again(self, before: AgentSnapshot, error: BaseException) -> None:
        """Have the model work as the earlier agent, whichever it works as now."""
        try:
            await self._host.send(UpdateSettings(before.settings))
        except Exception as other:  # noqa: BLE001  which agent the model works as is unknown
            why = reason_of(error)
            other.add_note(f"the model may work as another agent, whose settings failed: {why}")
            self._host.end(other)
