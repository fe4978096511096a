"""Agents as a model is told of them, and the change from one agent to another.

What an agent's functions say, of its instructions and of what is enabled, is asked once for each
transition; the answers are both what the model is told and what calls of tools go by.
"""

from __future__ import annotations

import asyncio

from capsule_tasks.errors import AgentReplaced, InvalidSetting, RealtimeRefused
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.events import RealtimeHandoff
from capsule_tasks.realtime.host import AgentSnapshot, SessionHost
from capsule_tasks.realtime.model import AgentSettings, UpdateSettings
from capsule_tasks.realtime.settings import RealtimeSettings
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.engine.asking import instructions_of
from capsule_tasks.runs.engine.setup import Abilities, AgentBook, RunSetup
from capsule_tasks.runs.models.model import ModelSettings


async def snapshot_of(agent: Agent, run: RunSetup, over: RealtimeSettings) -> AgentSnapshot:
    """Resolve an agent of the run's book. `over` are settings that precede those of agents.

    Raises InvalidSetting for what a realtime model cannot honour, and CallbackFailed.
    """
    able = await run.book.abilities(run.book.identity(agent), run.context)
    _check_honoured(able)
    instructions = await instructions_of(agent, run.context)
    settings = over.over(_settings_of(agent.model_settings))
    return AgentSnapshot(run, able, AgentSettings(instructions or "", able.specs, settings))


def _settings_of(settings: ModelSettings) -> RealtimeSettings:
    """The part of an agent's settings that realtime models have."""
    return RealtimeSettings(
        tool_choice=settings.tool_choice,
        parallel_tool_calls=settings.parallel_tool_calls,
        max_output_tokens=settings.max_output_tokens,
        reasoning=settings.reasoning,
    )


def _check_honoured(able: Abilities) -> None:
    agent = able.agent
    for spec in able.specs:
        if spec.hosted is not None:
            must = "a function or an agent: a realtime model runs no hosted tools"
            raise InvalidSetting(f"a tool of agent {agent.name!r}", spec.name, must)
        if spec.namespace is not None:
            must = "None: the calls of a realtime model name no namespace"
            what = f"the namespace of tool {spec.name!r} of agent {agent.name!r}"
            raise InvalidSetting(what, spec.namespace, must)
    if not able.output_type.is_text:
        must = "str: the answers of a realtime model are speech and text"
        raise InvalidSetting(f"output_type of agent {agent.name!r}", agent.output_type, must)
    for name, handoff in able.handoffs.items():
        if handoff.input_filter is not None:
            must = "None: a realtime model keeps its own view of the conversation"
            raise InvalidSetting(
                f"input_filter of handoff {name!r} of agent {agent.name!r}",
                handoff.input_filter,
                must,
            )


class Transitions:
    """The current agent, which changes only once the model has accepted another one."""

    def __init__(self, host: SessionHost, first: AgentSnapshot, over: RealtimeSettings) -> None:
        self.current = first
        self._host = host
        self._over = over
        self._one_at_a_time = asyncio.Lock()

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
