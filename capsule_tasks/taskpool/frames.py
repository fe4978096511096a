"""Stacks of tasks without the frames of Celery that called them."""

from __future__ import annotations

import os
from pathlib import Path

import billiard
import celery

_CELERY = tuple(
    f'  File "{Path(package.__file__).parent}{os.sep}' for package in (celery, billiard)
)
"""A child runs what its worker runs, from the same files."""


def without_celery(text: str) -> str:
    """The stacks with the lines of Celery's own code left out.

    A stack that has no others, such as that of a built-in task, stays whole.
    """
    kept: list[str] = []
    for stack in _stacks(text):
        others = [line for line in stack if not line.startswith(_CELERY)]
        has_frames = any(line.startswith("  File ") for line in others)
        kept += others if has_frames else stack
    return "\n".join(kept)


def _stacks(text: str) -> list[list[str]]:
    """Each begins with a line that is not indented."""
    stacks: list[list[str]] = []
    for line in text.splitlines():
        if not stacks or not line.startswith(" "):
            stacks.append([])
        stacks[-1].append(line)
    return stacks
