"""Checks of what authors declare: an error names the value, and what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import Rule, check_value, rule_of

if TYPE_CHECKING:
    from capsule_tasks.runs.models.model import ToolSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_fields(kind: type, made: Any, about: str = "") -> None:
    """Refuse values that the annotations of a class do not allow; `about` is in the errors."""
    for name, allowed, rule in _rules_of(kind):
        if not rule.allows(value := getattr(made, name)):
            of = f"({about})" if about and name != "name" else ""
            check_value(f"{kind.__name__}{of}.{name}", value, allowed)


@cache
def _rules_of(kind: type) -> list[tuple[str, Any, Rule]]:
    from capsule_tasks.runs.agents.agent import Agent  # noqa: PLC0415  it is made of these classes

    hints = get_type_hints(kind, localns={"Agent": Agent}, include_extras=True)
    struct_fields = getattr(kind, "__struct_fields__", None)
    names = struct_fields or [each.name for each in fields(kind)]
    return [(name, hints[name], rule_of(hints[name])) for name in names]


def check(name: str, value: object, is_valid: object, must: str) -> None:
    """Refuse a value; `must` says in words what is valid."""
    if not is_valid:
        raise InvalidSetting(name, value, must)


def check_tool_name(name: str, value: object) -> None:
    """Refuse names of tools that servers refuse."""
    is_valid = isinstance(value, str) and _NAME.fullmatch(value)
    check(name, value, is_valid, "1 to 64 letters of ASCII, digits, _ and -")


def check_distinct(agent: str, specs: Iterable[ToolSpec]) -> None:
    """Refuse two tools or handoffs of one agent that a model calls by the same name."""
    names = [(each.namespace, each.name) for each in specs if each.hosted is None]
    for name in names:
        must = "the name of only one of its tools and handoffs"
        check(f"a tool of agent {agent}", name[1], names.count(name) == 1, must)


def snake_case(name: str) -> str:
    """A name of an agent in letters that a tool's name may have."""
    return "_".join(re.findall(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9])[0-9]*", name)).lower()
