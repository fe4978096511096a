"""Returning freed memory to the operating system."""

from __future__ import annotations

from collections.abc import Callable

from capsule_tasks.system.prctl import libc

_trim: Callable[[int], int] | None = getattr(libc, "malloc_trim", None)  # glibc alone has it


def give_back_freed_memory() -> None:
    """Have the allocator return freed memory to the system; takes some milliseconds.

    glibc maps large blocks one by one, but raises its threshold for that to the largest block that
    was freed, 32 MiB at most. From then on large blocks are in its heap, and holes stay resident.
    """
    if _trim is not None:
        _trim(0)
