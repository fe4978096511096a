"""Who is meant: identities of agents and tools that survive a restart and a reordered graph.

An agent is its name. Where several agents of one graph share a name, each also has a tag: a digest
of what it says of itself and of its place in the graph, never of its position in a list. Two that
cannot be told apart by that need a `key`; guessing between them could resume the wrong one.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import quote

import msgspec

from capsule_tasks.errors import AmbiguousAgent, InvalidSetting, UnknownAgent

ToolKind = Literal[
    "bare",
    "namespaced",
    "deferred_top_level",
    "hosted_mcp",
    "custom",
    "shell",
    "local_shell",
    "apply_patch",
    "computer",
]
"""The first three are function tools. Each kind has names of its own, so that a function tool named
`shell` is never taken for the shell."""

_KINDS_WITH_NAMESPACE = ("namespaced", "hosted_mcp")


def _check_name(what: str, name: Any) -> None:
    """What is part of keys and of an index has to be text that UTF-8 can write."""
    try:
        is_name = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise InvalidSetting(what, name, "text, not empty, that UTF-8 can write")


class AgentId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An agent as a snapshot names it; `tag` is set where the name alone is shared."""

    name: str
    tag: str | None = None

    def __post_init__(self) -> None:
        _check_name("AgentId.name", self.name)
        if self.tag is not None:
            _check_name("AgentId.tag", self.tag)

    @property
    def text(self) -> str:
        """One spelling for each identity, fit for an index."""
        return quote(self.name, safe=" ") + (f"#{quote(self.tag, safe=' ')}" if self.tag else "")


class ToolKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of a tool: its kind, its namespace or server, and its name.

    `lookup` in the namespace `crm` is not the bare `lookup`, and neither is the `lookup` that was
    loaded on demand at the top level, nor the `lookup` of an MCP server.
    """

    name: str
    kind: ToolKind = "bare"
    namespace: str | None = None
    """The namespace of a namespaced tool, the server's label of a hosted MCP tool."""

    def __post_init__(self) -> None:
        _check_name("ToolKey.name", self.name)
        if (self.kind in _KINDS_WITH_NAMESPACE) != bool(self.namespace):
            must = "given for a namespaced or hosted MCP tool, and for no other"
            raise InvalidSetting("ToolKey.namespace", self.namespace, must)
        if self.namespace is not None:
            _check_name("ToolKey.namespace", self.namespace)

    @classmethod
    def namespaced(cls, namespace: str, name: str) -> ToolKey:
        return cls(name, "namespaced", namespace)

    @classmethod
    def deferred(cls, name: str) -> ToolKey:
        return cls(name, "deferred_top_level")

    @classmethod
    def hosted_mcp(cls, server_label: str, name: str) -> ToolKey:
        return cls(name, "hosted_mcp", server_label)

    @property
    def text(self) -> str:
        """One spelling for each key, fit for an index."""
        place = "" if self.namespace is None else f"{quote(self.namespace, safe=' ')}/"
        return f"{self.kind}:{place}{quote(self.name, safe=' ')}"


@runtime_checkable
class AgentNode(Protocol):
    """What the graph needs of an agent; it also looks at what `described` finds there."""

    name: str
    handoffs: Sequence[Any]


Description = dict[str, Any]


def described(agent: Any) -> Description:
    """What an agent says of itself that stays the same in another process.

    Callables count by their qualified name: their code may change between two releases without
    the agent becoming another one.
    """
    tools = [getattr(tool, "name", None) or tool for tool in getattr(agent, "tools", None) or ()]
    return {
        "key": getattr(agent, "key", None),
        "instructions": _stable(getattr(agent, "instructions", None)),
        "model": _stable(getattr(agent, "model", None)),
        "output_type": _stable(getattr(agent, "output_type", None)),
        "tools": sorted(map(_stable, tools)),
    }


def _stable(value: Any) -> str:
    if isinstance(value, str):
        return f"text {value}"
    qualified = getattr(value, "__qualname__", None) or type(value).__qualname__
    home = getattr(value, "__module__", None) or type(value).__module__
    return f"object {home}.{qualified}"


class AgentGraph:
    """All agents that can be reached from the first one by handoffs, and their identities.

    The order of handoffs, and the order in which agents are found, change no identity.
    """

    def __init__(
        self, start: AgentNode, describe: Callable[[Any], Description] = described
    ) -> None:
        self.start = start
        self._agents = _reachable(start)
        labels = _labels(self._agents, start, describe)
        by_name: defaultdict[str, list[AgentNode]] = defaultdict(list)
        for agent in self._agents:
            by_name[agent.name].append(agent)
        self._named = dict(by_name)
        self._tags = {id(agent): labels[id(agent)] for agent in self._agents}

    @property
    def agents(self) -> list[AgentNode]:
        return list(self._agents)

    def identity(self, agent: AgentNode) -> AgentId:
        """How a snapshot names this agent; raises where it could not be told from another."""
        if id(agent) not in self._tags:
            raise UnknownAgent(agent.name, None, tuple(sorted(self._named)))
        namesakes = self._named[agent.name]
        if len(namesakes) == 1:
            return AgentId(agent.name)
        tag = self._tags[id(agent)]
        if sum(self._tags[id(other)] == tag for other in namesakes) > 1:
            raise AmbiguousAgent(agent.name, len(namesakes))
        return AgentId(agent.name, tag)

    def resolve(self, identity: AgentId) -> AgentNode:
        """The agent that a snapshot means; never another one of the same name."""
        namesakes = self._named.get(identity.name, [])
        if not namesakes:
            raise UnknownAgent(identity.name, identity.tag, tuple(sorted(self._named)))
        if identity.tag is None:
            if len(namesakes) > 1:
                raise AmbiguousAgent(identity.name, len(namesakes))
            return namesakes[0]
        found = [agent for agent in namesakes if self._tags[id(agent)] == identity.tag]
        if not found:
            raise UnknownAgent(identity.name, identity.tag, tuple(sorted(self._named)))
        if len(found) > 1:
            raise AmbiguousAgent(identity.name, len(found))
        return found[0]


def _reachable(start: AgentNode) -> list[AgentNode]:
    found: dict[int, AgentNode] = {}
    waiting = [start]
    while waiting:
        agent = waiting.pop()
        if id(agent) not in found:
            found[id(agent)] = agent
            waiting.extend(_handed_to(agent))
    return list(found.values())


def _handed_to(agent: AgentNode) -> list[AgentNode]:
    """Handoffs are agents, or objects that lead to one."""
    targets = [getattr(handoff, "agent", handoff) for handoff in agent.handoffs]
    return [target for target in targets if isinstance(target, AgentNode)]


def _labels(
    agents: list[AgentNode], start: AgentNode, describe: Callable[[Any], Description]
) -> dict[int, str]:
    """Each agent's digest, refined by its neighbours' until namesakes are told apart, if ever.

    An agent with a `key` is that key, whatever changes around it.
    """
    described_as = {id(agent): describe(agent) for agent in agents}
    leads_to = {id(agent): [id(target) for target in _handed_to(agent)] for agent in agents}
    led_from: defaultdict[int, list[int]] = defaultdict(list)
    for source, targets in leads_to.items():
        for target in targets:
            led_from[target].append(source)

    def first(agent: AgentNode) -> str:
        about = described_as[id(agent)]
        if about.get("key") is not None:
            return _digest(["key", agent.name, about["key"]])
        return _digest(["agent", agent.name, about, agent is start])

    labels = {id(agent): first(agent) for agent in agents}
    keyed = {each for each, about in described_as.items() if about.get("key") is not None}
    for _ in agents:
        if _are_told_apart(agents, labels):
            break
        refined = {
            each: label
            if each in keyed
            else _digest(
                [
                    label,
                    sorted(labels[other] for other in leads_to[each]),
                    sorted(labels[other] for other in led_from[each]),
                ]
            )
            for each, label in labels.items()
        }
        is_unambiguous = len(set(refined.values())) == len(set(labels.values()))
        labels = refined
        if is_unambiguous:
            break
    return labels


def _are_told_apart(agents: list[AgentNode], labels: dict[int, str]) -> bool:
    """Looking no further than needed keeps a tag from changing with distant agents."""
    return len({(agent.name, labels[id(agent)]) for agent in agents}) == len(agents)


def _digest(value: Any) -> str:
    spelled = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(spelled.encode()).hexdigest()[:16]
