"""Resource limits of the child, and the one that is counted per execution: CPU time."""

from __future__ import annotations

import errno
import resource

import msgspec

from capsule_tasks.settings import LimitSettings

_LIMITS = (
    ("memory_bytes", resource.RLIMIT_AS, errno.ENOMEM, "memory limit of {} bytes"),
    ("open_files", resource.RLIMIT_NOFILE, errno.EMFILE, "limit of {} open files"),
    ("file_bytes", resource.RLIMIT_FSIZE, errno.EFBIG, "file size limit of {} bytes"),
)
"""One row for each limit: setting, resource, error of those who reach it, name."""


def apply(limits: LimitSettings) -> LimitSettings:
    """Set the limits; the settings that hold now (a hard limit of the system may be lower)."""
    applied = {name: lower(kind, getattr(limits, name)) for name, kind, *_ in _LIMITS}
    return msgspec.structs.replace(limits, **applied)


def limit_reached(limits: LimitSettings, error: BaseException) -> str | None:
    """The limit that caused an exception of the interpreter, with its amount; None if no limit."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    for name, _, reached_by, text in _LIMITS:
        amount = getattr(limits, name)
        if number == reached_by and amount is not None:
            return text.format(amount)
    return None


def lower(kind: int, wanted: int | None) -> int | None:
    """Set a limit for good, soft and hard; the limit that holds now."""
    if wanted is None:
        return None
    hard = resource.getrlimit(kind)[1]
    effective = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (effective, effective))
    return effective
