"""Checks of arguments; each error names the argument and its value."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from capsule_tasks.errors import WrongEventLoop


def check_type(name: str, value: object, *kinds: type[Any] | None) -> None:
    """TypeError unless `value` is an instance of one of the kinds; None among them allows None."""
    if value is None and None in kinds:
        return
    types = tuple(kind for kind in kinds if kind is not None)
    if not isinstance(value, types):
        wanted = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}: {value!r:.100}")


def check_text(name: str, value: str | None) -> None:
    """TypeError or ValueError unless `value` is None or text that can be sent."""
    check_type(name, value, str, None)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text that UTF-8 can encode: {error}") from None


def check_seconds(name: str, value: object) -> None:
    """TypeError or ValueError unless `value` is None or a number of seconds, 0 or more."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        got = f"{type(value).__name__}: {value!r:.100}"
        raise TypeError(f"{name} must be a number of seconds or None, not {got}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, not {value!r}")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless `value` is an allowed one."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r:.100}"
        )


def check_callable(name: str, value: object) -> None:
    """TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {type(value).__name__}: {value!r:.100}")


def check_loop(call: str, owner: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """WrongEventLoop unless called on `loop`; None is not bound to a loop yet."""
    if loop is not None and loop is not asyncio.get_running_loop():
        hint = "that one is closed: make a new one" if loop.is_closed() else "call it there"
        raise WrongEventLoop(call, owner, hint)
