"""Identities of agents and tools that survive a restart and a reordered graph.

An agent is identified by its name. If several agents of a graph share a name, each of them also has
a tag: a digest of the agent's description and of its place in the graph, never of its position in a
list. Two agents with the same tag need a `key`; guessing could resume the wrong one.
"""

# The annotations of `Checked` structs are needed as objects.
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self, runtime_checkable
from urllib.parse import quote

from capsule_tasks.errors import AmbiguousAgent, InvalidSetting, UnknownAgent
from capsule_tasks.settings import Checked, Text

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
"""The first three are function tools. Each kind has its own names, so that a function tool named
`shell` is never mistaken for the shell."""

_KINDS_WITH_NAMESPACE = ("namespaced", "hosted_mcp")


class AgentId(Checked, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An agent as a snapshot names it; `tag` is set if several agents share the name."""

    name: Text
    tag: Text | None = None

    @property
    def text(self) -> str:
        """The identity as text for an index; no two identities have the same text."""
        return quote(self.name, safe=" ") + (f"#{quote(self.tag, safe=' ')}" if self.tag else "")


class ToolKey(Checked, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of a tool: its kind, its namespace or server, and its name.

    `lookup` in the namespace `crm` is not the bare `lookup`, and neither is the `lookup` that was
    loaded on demand at the top level, nor the `lookup` of an MCP server.
    """

    name: Text
    kind: ToolKind = "bare"
    namespace: Text | None = None
    """The namespace of a namespaced tool, or the server's label of a hosted MCP tool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kind in _KINDS_WITH_NAMESPACE) != (self.namespace is not None):
            must = "given for a namespaced or hosted MCP tool, and for no other"
            raise InvalidSetting("ToolKey.namespace", self.namespace, must)

    @classmethod
    def namespaced(cls, namespace: str, name: str) -> Self:
        return cls(name, "namespaced", namespace)

    @classmethod
    def deferred(cls, name: str) -> Self:
        return cls(name, "deferred_top_level")

    @classmethod
    def hosted_mcp(cls, server_label: str, name: str) -> Self:
        return cls(name, "hosted_mcp", server_label)

    @property
    def text(self) -> str:
        """The key as text for an index; no two keys have the same text."""
        place = "" if self.namespace is None else f"{quote(self.namespace, safe=' ')}/"
        return f"{self.kind}:{place}{quote(self.name, safe=' ')}"


@runtime_checkable
class AgentNode(Protocol):
    """The attributes that every agent has; `described` reads more attributes if they exist."""

    name: str
    handoffs: Sequence[Any]


def described(agent: Any) -> dict[str, Any]:
    """The description of an agent, which is the same in another process.

    Callables and models count by their qualified names: their code may change between two releases
    without making it another agent.
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

    The order of handoffs, and the order in which agents are found, change no identity. `describe`
    returns the description of an agent, for agents with other attributes than those of `described`.
    """

    def __init__(
        self, start: AgentNode, describe: Callable[[Any], dict[str, Any]] = described
    ) -> None:
        self.start = start
        self.agents = _reachable(start)
        self._tags = _tags(self.agents, start, describe)

    def identity(self, agent: AgentNode) -> AgentId:
        """The name of this agent in snapshots, with its tag if other agents share the name.

        Raises UnknownAgent for an agent outside the graph, and AmbiguousAgent for an agent that
        cannot be told apart from another one.
        """
        if id(agent) not in self._tags:
            raise self._unknown(agent.name, None)
        has_namesakes = sum(other.name == agent.name for other in self.agents) > 1
        identity = AgentId(agent.name, self._tags[id(agent)] if has_namesakes else None)
        self.resolve(identity)
        return identity

    def resolve(self, identity: AgentId) -> AgentNode:
        """The agent that a snapshot names; never another agent of the same name."""
        found = [
            agent
            for agent in self.agents
            if agent.name == identity.name and identity.tag in (None, self._tags[id(agent)])
        ]
        if not found:
            raise self._unknown(identity.name, identity.tag)
        if len(found) > 1:
            raise AmbiguousAgent(identity.name, len(found))
        return found[0]

    def _unknown(self, name: str, tag: str | None) -> UnknownAgent:
        return UnknownAgent(name, tag, tuple(sorted({agent.name for agent in self.agents})))


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
    """The targets of an agent's handoffs: agents, or objects with an attribute `agent`."""
    targets = [getattr(handoff, "agent", handoff) for handoff in agent.handoffs]
    return [target for target in targets if isinstance(target, AgentNode)]


def _tags(
    agents: list[AgentNode], start: AgentNode, describe: Callable[[Any], dict[str, Any]]
) -> dict[int, str]:
    """Each agent's digest, by the id of the object.

    Digests are refined by those of their neighbours until all namesakes are told apart, and no
    further, so that a tag does not change with distant agents. An agent with a `key` is identified
    by that key, whatever changes around it.
    """
    tags: dict[int, str] = {}
    keyed: set[int] = set()
    leads_to = {id(agent): [id(target) for target in _handed_to(agent)] for agent in agents}
    led_from: defaultdict[int, list[int]] = defaultdict(list)
    for agent in agents:
        about = describe(agent)
        if about.get("key") is not None:
            keyed.add(id(agent))
            tags[id(agent)] = _digest(["key", agent.name, about["key"]])
        else:
            tags[id(agent)] = _digest(["agent", agent.name, about, agent is start])
        for target in leads_to[id(agent)]:
            led_from[target].append(id(agent))
    for _ in agents:
        if len({(agent.name, tags[id(agent)]) for agent in agents}) == len(agents):
            break
        before = tags
        tags = dict(before)
        for each in before.keys() - keyed:
            targets = sorted(before[other] for other in leads_to[each])
            sources = sorted(before[other] for other in led_from[each])
            tags[each] = _digest([before[each], targets, sources])
        if len(set(tags.values())) == len(set(before.values())):
            break
    return tags


def _digest(value: Any) -> str:
    spelled = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(spelled.encode()).hexdigest()[:16]
