"""Values that are the same after a round trip through JSON text."""

from __future__ import annotations

import math
from typing import Any

MAX_DEPTH = 100
MAX_INT_BITS = 14_000
"""Python refuses to write and read the digits of a number that is much larger."""


def problem_in(value: Any, at: str = "$", depth: int = 0) -> str | None:
    """The place and reason why a value is not JSON, without the value itself; None if it is JSON.

    A tuple is refused, because it would come back as a list.
    """
    kind = type(value)
    if value is None or kind in (str, bool):
        return None
    if kind is int:
        return f"{at} is a number of too many digits" if value.bit_length() > MAX_INT_BITS else None
    if kind is float:
        return None if math.isfinite(value) else f"{at} is not a finite number"
    if depth >= MAX_DEPTH:
        return f"{at} is nested more than {MAX_DEPTH} deep"
    if kind is list:
        found = (problem_in(each, f"{at}[{index}]", depth + 1) for index, each in enumerate(value))
        return next(filter(None, found), None)
    if kind is not dict:
        return f"{at} is of type {kind.__qualname__}"
    for key, each in value.items():
        if type(key) is not str:
            return f"{at} has a key of type {type(key).__qualname__}"
        if problem := problem_in(each, f"{at}.{key}", depth + 1):
            return problem
    return None
