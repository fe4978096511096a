"""Policies for uncertain tool calls, by the tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from capsule_tasks.durable.engine import OnUncertain
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.parking import check_tools

DEFAULT: OnUncertain = "park"


def policies(given: Any) -> Callable[[str], OnUncertain]:
    """The policy of each tool, by its `ToolKey.text`; `given` is one for all, or some by tool."""
    allowed = get_args(OnUncertain)
    of_tools: Mapping[str, OnUncertain] = given if isinstance(given, Mapping) else {}
    default: OnUncertain = DEFAULT if isinstance(given, Mapping) else given
    for value in (default, *of_tools.values()):
        if value not in allowed:
            raise InvalidSetting("on_uncertain", value, f"one of {', '.join(allowed)}")
    check_tools("on_uncertain", of_tools)
    return lambda tool: of_tools.get(tool, default)
