"""Giving freed memory back to the operating system."""

from __future__ import annotations

from collections.abc import Callable

from capsule_tasks.system.prctl import libc

_trim: Callable[[int], int] | None = getattr(libc, "malloc_trim", None)  # glibc alone has it


def give_back_freed_memory() -> None:
    """Have the allocator release what it keeps of freed memory; takes some milliseconds.

    glibc raises the size from which it asks the system for each block to the largest one that was
    freed, 32 MiB at most. From then on large blocks lie in its heap, and the holes stay resident.
    """
    if _trim is not None:
        _trim(0)
