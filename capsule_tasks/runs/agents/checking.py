"""Checks of what authors declare: an error names the value, and what it must be."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from capsule_tasks.errors import InvalidSetting

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
    check(name, value, isinstance(value, bool) or callable(value), "True, False or a function")


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


def check_callable(name: str, value: object) -> None:
    check(name, value, value is None or callable(value), "None or a function")


def snake_case(name: str) -> str:
    """A name of an agent in letters that a tool's name may have."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return "_".join(words).lower()


def takes(function: Callable[..., Any], arguments: Iterable[object]) -> bool:
    """Whether a function can be called with so many arguments, as far as it says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # written in C, and says nothing
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


async def result_of(value: Any | Awaitable[Any]) -> Any:
    """What a function returned that may be a coroutine function."""
    return await value if inspect.isawaitable(value) else value
