"""Stacks of tasks without the frames that called them, and without threads that are not theirs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import billiard
import celery
import click
import kombu

import capsule_tasks
from capsule_tasks.sessions.process import template

_FRAME = '  File "'


def _in(package: Path) -> str:
    return f"{_FRAME}{package}{os.sep}"


_INTERNAL = tuple(
    _in(Path(str(package.__file__)).parent)
    for package in (celery, kombu, billiard, click, capsule_tasks)
)
"""A child runs the same files as its worker."""

_STANDARD = (_in(Path(threading.__file__).parent), f"{_FRAME}<frozen ")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FORK = f"{_FRAME}{template.__file__}"
"""Frames outside this one started the worker: a script or program of any name."""


def only_task_frames(text: str) -> str:
    """The stacks from the first frame of the task's own code on; those without one are left out.

    The stack of the execution stays whole if it has none, such as that of a built-in task, and so
    does the text if nothing else is left.
    """
    kept: list[str] = []
    for header, *frames in _stacks(text):
        # faulthandler's stacks are the other way round
        turn = -1 if header.endswith("(most recent call first):") else 1
        if own := _from_own(frames[::turn])[::turn]:
            kept += [header, *own]
        elif " of execution " in header:
            kept += [header, *frames]
    return "\n".join(kept) if kept else text


def _from_own(frames: list[str]) -> list[str]:
    """The frames from the first one that is neither internal nor of the standard library."""
    places = enumerate(frames, start=1)
    forked = next((place for place, line in places if line.startswith(_FORK)), 0)
    inner = range(forked, len(frames))
    return frames[next((place for place in inner if _is_own(frames[place])), len(frames)) :]


def _is_own(line: str) -> bool:
    if not line.startswith(_FRAME) or line.startswith(_INTERNAL):
        return False
    return not line.startswith(_STANDARD) or any(where in line for where in _INSTALLED)


def _stacks(text: str) -> list[list[str]]:
    """The stacks; each begins with a line that is not indented."""
    stacks: list[list[str]] = []
    for line in text.splitlines():
        if not stacks or not line.startswith(" "):
            stacks.append([])
        stacks[-1].append(line)
    return stacks
