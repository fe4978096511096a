"""The scripts of histories, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import SessionKeys
from capsule_tasks.storage.scripts import script


@script
def history_append(
    keys: SessionKeys,
    *,
    operation: str,
    ttl_ms: int,
    max_items: int,
    max_bytes: int,
    records: Sequence[bytes],
) -> None: ...


@script
def history_read(
    keys: SessionKeys, *, generation: str, before: int, count: int, max_bytes: int, renew_ms: int
) -> None: ...


@script
def history_pop(
    keys: SessionKeys,
    taken: str,
    corrupt: str,
    *,
    operation: str,
    ttl_ms: int,
    corrupt_by: str,
    keep_bad: int,
    guards: Sequence[bytes],
) -> None: ...


@script
def history_pop_suffix(
    keys: SessionKeys, *, operation: str, ttl_ms: int, records: Sequence[bytes]
) -> None: ...


@script
def history_stage(stage: str, *, offset: int, ttl_ms: int, records: Sequence[bytes]) -> None: ...


@script
def history_replace(
    keys: SessionKeys,
    stage: str,
    *,
    operation: str,
    ttl_ms: int,
    generation: str,
    start: int,
    stop: int,
    pruned: int,
    staged: int,
    staged_bytes: int,
    max_items: int,
    max_bytes: int,
    keep_bad: int,
    corrupt: str,
    records: Sequence[bytes],
) -> None: ...


@script
def history_clear(keys: SessionKeys, *, operation: str) -> None: ...


@script
def history_forget(keys: SessionKeys, taken: Sequence[str]) -> None: ...


@script
def history_info(keys: SessionKeys) -> None: ...
