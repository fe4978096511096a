"""Checks of what authors declare: an error names the value, and what it must be."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from capsule_tasks.errors import InvalidSetting

if TYPE_CHECKING:
    from capsule_tasks.runs.models.model import ToolSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check(name: str, value: object, is_valid: object, must: str) -> None:
    """Refuse a value; `must` says in words what is valid."""
    if not is_valid:
        raise InvalidSetting(name, value, must)


def check_tool_name(name: str, value: object) -> None:
    """Refuse names of tools that servers refuse."""
    is_valid = isinstance(value, str) and _NAME.fullmatch(value)
    check(name, value, is_valid, "1 to 64 letters of ASCII, digits, _ and -")


def check_text(name: str, value: object) -> None:
    is_valid = isinstance(value, str) and value.strip()
    check(name, value, is_valid, "a text that is not empty")


def check_flag(name: str, value: object) -> None:
    check(name, value, isinstance(value, bool), "True or False")


def check_function(name: str, value: object, *counts: int) -> None:
    """Refuse what cannot be called with any of these numbers of arguments."""
    must = f"a function of {' or '.join(map(str, counts))} arguments"
    check(name, value, any(is_function(value, count) for count in counts), must)


def check_condition(name: str, value: object, count: int) -> None:
    """Refuse what is neither a flag nor a function of so many arguments."""
    is_valid = isinstance(value, bool) or is_function(value, count)
    check(name, value, is_valid, f"True, False, or a function of {count} arguments")


def check_list(name: str, value: object, kinds: tuple[type, ...]) -> None:
    names = " or ".join(kind.__name__ for kind in kinds)
    check(name, value, isinstance(value, list), f"a list of {names}")
    assert isinstance(value, list)
    for index, each in enumerate(value):
        check(f"{name}[{index}]", each, isinstance(each, kinds), f"of type {names}")


def check_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = value is None or (is_number and math.isfinite(value) and value > 0)  # type: ignore[arg-type,operator]
    check(name, value, is_valid, "None or a number of seconds above 0")


def check_distinct(agent: str, specs: Iterable[ToolSpec]) -> None:
    """Refuse two tools or handoffs of one agent that a model calls by the same name."""
    names = [(each.namespace, each.name) for each in specs if each.hosted is None]
    for name in names:
        must = "the name of only one of its tools and handoffs"
        check(f"a tool of agent {agent}", name[1], names.count(name) == 1, must)


def is_agent(value: object) -> bool:
    """Whether this is an Agent, for modules that agents are made of."""
    return hasattr(value, "handoffs") and hasattr(value, "instructions")


def snake_case(name: str) -> str:
    """A name of an agent in letters that a tool's name may have."""
    return "_".join(re.findall(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9])[0-9]*", name)).lower()


def is_function(value: object, count: int) -> bool:
    """Whether this can be called with so many arguments, as far as it says."""
    if not callable(value):
        return False
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True  # written in C, and says nothing
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
