"""Resource limits of the child, and the one that is counted per execution: CPU time."""

from __future__ import annotations

import resource

import msgspec

from capsule_tasks.settings import LimitSettings


def apply(limits: LimitSettings) -> LimitSettings:
    """Set what was asked for; the settings as they really are (a hard limit may be lower)."""
    return msgspec.structs.replace(
        limits,
        memory_bytes=_lower(resource.RLIMIT_AS, limits.memory_bytes),
        open_files=_lower(resource.RLIMIT_NOFILE, limits.open_files),
        file_bytes=_lower(resource.RLIMIT_FSIZE, limits.file_bytes),
    )


def _lower(kind: int, wanted: int | None) -> int | None:
    if wanted is None:
        return None
    hard = resource.getrlimit(kind)[1]
    effective = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (effective, effective))
    return effective
