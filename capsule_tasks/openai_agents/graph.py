"""Prepares an agent, and all agents that it can reach, for durable runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agents import Agent, Handoff, Model
from agents.sandbox import SandboxAgent

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.openai_agents.hooks import QuietAgentHooks
from capsule_tasks.openai_agents.mcp_servers import connect, reconnect
from capsule_tasks.openai_agents.models import journaled
from capsule_tasks.openai_agents.snapshots import replace_slow_parts
from capsule_tasks.openai_agents.tools import prepare_tool, teach_the_sdk

_PREPARED = "capsule_is_prepared"


def prepare(agent: Agent[Any]) -> None:
    """Have the models and tools of an agent ask the journal and the ledger of their run.

    The agent is changed in place, and so are its handoffs and the agents that it has as tools.
    Outside of durable runs it does what it did. What is added to it later is found when a turn
    asks for its tools.
    """
    teach_the_sdk()
    replace_slow_parts()
    for each in agents_of(agent):
        _prepare_one(each)


def agents_of(agent: Agent[Any]) -> list[Agent[Any]]:
    """The agent, and those that it can reach: its handoffs, and the agents it has as tools."""
    found = dict[int, Agent[Any]]()
    waiting = [agent]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += _reachable(each)
    return [*found.values()]


def _prepare_one(agent: Agent[Any]) -> None:
    if isinstance(agent, SandboxAgent):
        must = (
            "an agent without a sandbox: the SDK cleans a sandbox up after each call of the "
            "runner, and a durable run calls it once a turn"
        )
        raise InvalidSetting("agent", f"the SandboxAgent {agent.name!r}", must)
    if isinstance(agent.model, Model):
        agent.model = journaled(agent.model)
    if agent.hooks is not None and not isinstance(agent.hooks, QuietAgentHooks):
        agent.hooks = QuietAgentHooks(agent.hooks)
    for tool in agent.tools:
        prepare_tool(tool)
    if _PREPARED not in vars(agent):
        setattr(agent, _PREPARED, True)
        agent.get_all_tools = _prepared_tools(agent, agent.get_all_tools)  # type: ignore[method-assign]


def _prepared_tools(agent: Agent[Any], get_all_tools: Callable[..., Any]) -> Callable[..., Any]:
    """The tools that the SDK asks an agent for: those of MCP servers are made anew each time."""

    async def prepared_tools(run_context: Any) -> Any:
        await connect(agent.mcp_servers)
        try:
            tools = await get_all_tools(run_context)
        except Exception:
            if not await reconnect(agent.mcp_servers):
                raise
            tools = await get_all_tools(run_context)
        for tool in tools:
            prepare_tool(tool)
        return tools

    return prepared_tools


def _reachable(agent: Agent[Any]) -> list[Agent[Any]]:
    found: list[Any] = []
    for handoff in agent.handoffs:
        target: Any = handoff
        if isinstance(handoff, Handoff):
            reference = handoff._agent_ref
            target = reference() if reference is not None else None
        found.append(target)
    found += [getattr(tool, "_agent_instance", None) for tool in agent.tools]
    return [each for each in found if isinstance(each, Agent)]
