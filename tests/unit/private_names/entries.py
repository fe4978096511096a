"""One entry of the list of undocumented names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    owner: str
    """`module` or `module:Class`; or `module:function`, if that sets the names as attributes."""
    use: str
    shapes: dict[str, str]


def names(owner: str, use: str, **shapes: str) -> Names:
    return Names(owner, use, shapes)
