"""Handoffs: one agent gives the run to another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from capsule_tasks.errors import WrongArguments
from capsule_tasks.runs.agents.checking import check, check_fields, check_tool_name, snake_case
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.schemas import Codec, Unfit, codec_of, made_strict
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.runs.records import Item
from capsule_tasks.settings import takes

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of a handoff without an `input_type`."""


@dataclass(frozen=True)
class HandoffInput:
    """The model's view when a run is handed over: `earlier` items, and those of this turn."""

    earlier: list[Item]
    turn: list[Item]
    arguments: str


HandoffFilter = Callable[[HandoffInput], list[Item] | Awaitable[list[Item]]]


@dataclass(frozen=True, eq=False)
class Handoff:
    """A handoff with more than its defaults. An agent in `Agent.handoffs` stands for one."""

    agent: Agent
    _: KW_ONLY
    name: str | None = None
    """The name of the tool; by default `transfer_to_<agent>`."""
    description: str | None = None
    input_type: Any = None
    """The type of the arguments that the model gives."""
    on_handoff: Callable[..., Awaitable[None] | None] | None = None
    """Called with the `RunContext`, and with the arguments if there is an `input_type`."""
    input_filter: HandoffFilter | None = None
    """The next agent's view of what came before. The history and the events keep everything."""
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True

    def __post_init__(self) -> None:
        check_fields(Handoff, self, getattr(self.agent, "name", ""))
        check_tool_name(f"name of the handoff to {self.agent.name}", self.tool_name)
        of = f"Handoff({self.agent.name}).{{}}".format
        if self.on_handoff is not None:
            count = 1 + (self.input_type is not None)
            must = f"a function of {count} arguments"
            check(of("on_handoff"), self.on_handoff, takes(self.on_handoff, count), must)
        is_object = "properties" in self._codec.schema
        check(of("input_type"), self.input_type, is_object, "a type with named fields")

    @property
    def tool_name(self) -> str:
        if self.name is not None:
            return self.name
        agent = snake_case(self.agent.name)
        return f"transfer_to_{agent}" if agent else ""

    @cached_property
    def _codec(self) -> Codec:
        kind = _Nothing if self.input_type is None else self.input_type
        return codec_of(kind, f"Handoff({self.agent.name}).input_type")

    def as_spec(self) -> ToolSpec:
        description = self.description
        if description is None:
            about = self.agent.handoff_description or ""
            description = f"Hand the conversation over to {self.agent.name}. {about}".strip()
        parameters, strict = made_strict(self._codec.schema)
        return ToolSpec(
            name=self.tool_name, description=description, parameters=parameters, strict=strict
        )

    def decode(self, arguments: str) -> Any:
        """The arguments, of the `input_type`. Raises WrongArguments, which is for the model."""
        if self.input_type is None:
            return None
        try:
            return self._codec.decode(arguments)
        except Unfit as error:
            raise WrongArguments(self.tool_name, str(error)) from None


# --- filters -------------------------------------------------------------------------------------


def without_tools(given: HandoffInput) -> list[Item]:
    """A view without calls of tools, their outputs, and the reasoning that led to them."""
    kept: list[Item] = []
    follows_call = False
    for item in reversed([*given.earlier, *given.turn]):
        if _is_of_tool(item):
            follows_call = True
        elif item.get("type") != "reasoning":
            follows_call = False
            kept.append(item)
        elif not follows_call:
            kept.append(item)
    return kept[::-1]


def only_last(count: int) -> HandoffFilter:
    """A view of the last items only, and of those before them that belong to the first of these.

    A call is kept with its reasoning and its output, so there may be more items than `count`.
    """
    is_count = type(count) is int and count > 0
    check("only_last", count, is_count, "a whole number above 0")

    def kept(given: HandoffInput) -> list[Item]:
        items = [*given.earlier, *given.turn]
        start = max(0, len(items) - count)
        while 0 < start < len(items) and _belongs_to_item_before(items, start):
            start -= 1
        calls = {each.get("call_id") for each in items[start:] if not _is_output(each)}
        return [
            each for each in items[start:] if not _is_output(each) or each.get("call_id") in calls
        ]

    return kept


def _belongs_to_item_before(items: list[Item], at: int) -> bool:
    before, item = items[at - 1], items[at]
    return (
        _is_output(item)
        or before.get("type") == "reasoning"
        or (_is_of_tool(item) and _is_of_tool(before) and not _is_output(before))
    )


def _is_of_tool(item: Item) -> bool:
    kind = str(item.get("type", "message"))
    return kind.endswith(("_call", "_output")) or kind.startswith("mcp_")


def _is_output(item: Item) -> bool:
    return str(item.get("type", "")).endswith("_output")
