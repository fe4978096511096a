"""Stacks of threads and tasks: files, lines and functions, never values."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from capsule_tasks.child.outbox import OwnThread
from capsule_tasks.child.registry import Execution
from capsule_tasks.protocol.messages import Frame, Stack

_MAX_FRAMES = 100
_MAX_STACKS = 200
_INTERNAL = "capsule_tasks.child."


def collect(
    executions: list[Execution], occupant: Execution | None, only: str | None
) -> list[Stack]:
    """The stacks of the execution `only`; without it, of every task and every thread but our own.

    `occupant` is the execution whose code the main thread is in.
    """
    tasks = [s for e in executions if only in (None, e.id) for s in _task_stacks(e)]
    main_of = occupant.id if occupant is not None else None
    if only is not None and only != main_of:
        return tasks[:_MAX_STACKS]
    threads = _thread_stacks(main_of)[-_MAX_STACKS:]  # the main thread, the oldest, is the last
    return (threads + tasks)[:_MAX_STACKS]


def _thread_stacks(main_of: str | None) -> list[Stack]:
    threads = {thread.ident: thread for thread in threading.enumerate()}
    names = {ident: thread.name for ident, thread in threads.items()}
    main = threading.main_thread().ident
    return [
        Stack(
            name=names.get(ident, f"thread {ident}"),
            kind="thread",
            frames=_frames(frame for frame, _ in traceback.walk_stack(frame))[::-1],
            execution_id=main_of if ident == main else None,
        )
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - made for this
        if not isinstance(threads.get(ident), OwnThread)
    ]


def _task_stacks(execution: Execution) -> list[Stack]:
    task = execution.task
    if task is None or task.done():
        return []
    frames = _frames(_awaited_frames(execution.coroutine or task.get_coro()))
    if not frames:
        return []  # the task is running: its frames are in the stack of its thread
    return [Stack(name=task.get_name(), kind="task", frames=frames, execution_id=execution.id)]


def _awaited_frames(awaited: Any) -> Iterator[FrameType | None]:
    while awaited is not None:
        yield getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


def _frames(found: Iterable[FrameType | None]) -> list[Frame]:
    """The first frames that do not belong to this package."""
    foreign = (frame for frame in found if frame is not None and not _is_internal(frame))
    return [
        Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname)
        for frame in itertools.islice(foreign, _MAX_FRAMES)
    ]


def _is_internal(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.startswith(_INTERNAL)
