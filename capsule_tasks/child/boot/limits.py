"""Resource limits of the child, and the one that is counted per execution: CPU time."""

from __future__ import annotations

import errno
import resource

import msgspec

from capsule_tasks.settings import LimitSettings


def apply(limits: LimitSettings) -> LimitSettings:
    """Set the limits; the settings that hold now (a hard limit of the system may be lower)."""
    return msgspec.structs.replace(
        limits,
        memory_bytes=lower(resource.RLIMIT_AS, limits.memory_bytes),
        open_files=lower(resource.RLIMIT_NOFILE, limits.open_files),
        file_bytes=lower(resource.RLIMIT_FSIZE, limits.file_bytes),
    )


def reached(limits: LimitSettings, error: BaseException) -> str | None:
    """The limit that caused an exception of the interpreter, with its amount; None if no limit."""
    number = error.errno if isinstance(error, OSError) else None
    if limits.memory_bytes is not None and (
        isinstance(error, MemoryError) or number == errno.ENOMEM
    ):
        return f"memory limit of {limits.memory_bytes} bytes"
    if limits.open_files is not None and number == errno.EMFILE:
        return f"limit of {limits.open_files} open files"
    if limits.file_bytes is not None and number == errno.EFBIG:
        return f"file size limit of {limits.file_bytes} bytes"
    return None


def lower(kind: int, wanted: int | None) -> int | None:
    """Set a limit for good, soft and hard; the limit that holds now."""
    if wanted is None:
        return None
    hard = resource.getrlimit(kind)[1]
    effective = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (effective, effective))
    return effective
