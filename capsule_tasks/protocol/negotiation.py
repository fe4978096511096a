"""Choosing a version and capabilities when a session starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VERSIONS: tuple[int, ...] = (1,)
"""The versions of this code, best first."""

CAPABILITIES: tuple[str, ...] = (
    "ack",
    "async",
    "cancel",
    "checkpoint",
    "credit",
    "input",
    "interrupt",
    "namespace",
    "progress",
    "stack",
)


def choose_version(offered: Sequence[int], spoken: Sequence[int] = VERSIONS) -> int | None:
    """The first offered version that this side speaks; None if there is none."""
    return next((version for version in offered if version in spoken), None)


def common_capabilities(offered: Iterable[str]) -> tuple[str, ...]:
    """The capabilities that both sides have."""
    return tuple(sorted(set(offered) & set(CAPABILITIES)))
