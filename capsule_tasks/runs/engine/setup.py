"""The parts of a run that stay the same over its turns, and what its agents can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, cast

import msgspec

from capsule_tasks.errors import CallbackFailed, InvalidSetting
from capsule_tasks.errors.base import reason_of
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check_distinct
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.outputs import OutputType, output_type_of
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.agents.tools import AgentTool, HostedTool, Tool
from capsule_tasks.runs.identity import AgentGraph, AgentId, ToolKey
from capsule_tasks.runs.items import normalized
from capsule_tasks.runs.models.calling import PASSES
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.runs.records import Item

DEFAULT_MAX_TURNS = 10


@dataclass(frozen=True)
class Abilities:
    """The tools and handoffs of an agent that are enabled in a turn."""

    agent: Agent
    identity: AgentId
    tools: Mapping[ToolKey, Tool | AgentTool]
    handoffs: Mapping[str, Handoff]
    specs: tuple[ToolSpec, ...]
    output_type: OutputType
    digest: bytes
    """The JSON of what a model is told of it, for the digest of a question."""


class AgentBook:
    """The agents of a graph by their identities, with what each of them can do.

    Agents are looked at once: changes of an agent after that have no effect on its runs.
    """

    def __init__(self, start: Agent) -> None:
        self._graph = AgentGraph(cast("Any", start))
        self._abilities: dict[AgentId, Abilities] = {}

    def agent(self, identity: AgentId) -> Agent:
        """Raises UnknownAgent for an agent outside the graph."""
        return cast("Agent", self._graph.resolve(identity))

    @property
    def start(self) -> Agent:
        """The agent with which the graph begins."""
        return cast("Agent", self._graph.start)

    def has(self, agent: Agent) -> bool:
        return id(agent) in map(id, self._graph.agents)

    def identity(self, agent: Agent) -> AgentId:
        return self._graph.identity(cast("Any", agent))

    async def abilities(self, identity: AgentId, context: RunContext) -> Abilities:
        """The abilities of the agent now; functions in `is_enabled` are asked each time."""
        if (known := self._abilities.get(identity)) is not None:
            return known
        agent = self.agent(identity)
        is_fixed = True
        tools: dict[ToolKey, Tool | AgentTool] = {}
        handoffs: dict[str, Handoff] = {}
        specs: list[ToolSpec] = []
        whole = (each if isinstance(each, Handoff) else Handoff(each) for each in agent.handoffs)
        for part in (*agent.tools, *whole):
            if not isinstance(part, HostedTool):
                is_fixed = is_fixed and isinstance(part.is_enabled, bool)
                if not await _is_enabled(part, context, agent):
                    continue
                if isinstance(part, Handoff):
                    handoffs[part.tool_name] = part
                else:
                    tools[part.key] = part
            specs.append(part.as_spec())
        check_distinct(agent.name, specs)
        output = output_type_of(agent.output_type)
        digest = msgspec.json.encode([specs, output.schema])
        found = Abilities(agent, identity, tools, handoffs, tuple(specs), output, digest)
        if is_fixed:
            self._abilities[identity] = found
        return found


@dataclass(frozen=True)
class RunSetup:
    """One run: its agents, its configuration, and the context that callbacks are given."""

    book: AgentBook
    config: RunConfig
    context: RunContext
    max_turns: int | None = DEFAULT_MAX_TURNS
    """How often the models may be asked; None for as often as they like."""
    path: tuple[str, ...] = ()
    """The ids of the tool calls within which the agent works."""
    _inner: dict[int, AgentBook] = field(default_factory=dict)

    def book_of(self, agent: Agent) -> AgentBook:
        """The book of an agent that is used as a tool."""
        if id(agent) not in self._inner:
            self._inner[id(agent)] = AgentBook(agent)
        return self._inner[id(agent)]


async def called_back(what: str, agent: Agent, function: Callable[..., Any], *about: Any) -> Any:
    """The result of a function of the program, which may be a coroutine.

    Raises CallbackFailed for its errors.
    """
    try:
        found = function(*about)
        return await found if isawaitable(found) else found
    except PASSES:
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise CallbackFailed(what, agent.name, reason) from error


async def told_of_handoff(agent: Agent, handoff: Handoff, context: RunContext, given: Any) -> str:
    """Call `on_handoff` with the arguments that the model gave; the output of the call."""
    if handoff.on_handoff is not None:
        about = () if handoff.input_type is None else (given,)
        await called_back("on_handoff", agent, handoff.on_handoff, context, *about)
    return msgspec.json.encode({"assistant": handoff.agent.name}).decode()


def listed(what: str, agent: Agent, found: Any) -> list[Item]:
    """The items that a filter has returned. Raises CallbackFailed if they are none."""
    try:
        return normalized(found, name=what)
    except InvalidSetting as error:
        raise CallbackFailed(what, agent.name, str(error)) from error


async def _is_enabled(part: Tool | AgentTool | Handoff, context: RunContext, agent: Agent) -> bool:
    if isinstance(part.is_enabled, bool):
        return part.is_enabled
    return bool(await called_back("is_enabled", agent, part.is_enabled, context, agent))
