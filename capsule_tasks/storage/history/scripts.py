"""The scripts of histories, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import SessionKeys
from capsule_tasks.storage.scripts import script


@script("history/append")
def history_append(
    keys: SessionKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    max_items: int,
    max_bytes: int,
    records: Sequence[bytes],
) -> None: ...


@script("history/read")
def history_read(
    keys: SessionKeys, *, generation: str, before: int, count: int, max_bytes: int, renew_ms: int
) -> None: ...


@script("history/pop")
def history_pop(
    keys: SessionKeys,
    taken: str,
    corrupt: str,
    *,
    operation_id: str,
    ttl_ms: int,
    corrupt_operation: str,
    max_quarantined: int,
    guards: Sequence[bytes],
) -> None: ...


@script("history/pop_suffix")
def history_pop_suffix(
    keys: SessionKeys, *, operation_id: str, ttl_ms: int, records: Sequence[bytes]
) -> None: ...


@script("history/stage")
def history_stage(staging: str, *, offset: int, ttl_ms: int, records: Sequence[bytes]) -> None: ...


@script("history/replace")
def history_replace(
    keys: SessionKeys,
    staging: str,
    *,
    operation_id: str,
    ttl_ms: int,
    generation: str,
    start: int,
    stop: int,
    pruned: int,
    staged: int,
    staged_bytes: int,
    max_items: int,
    max_bytes: int,
    max_quarantined: int,
    corrupt: str,
    records: Sequence[bytes],
) -> None: ...


@script("history/clear")
def history_clear(keys: SessionKeys, *, operation_id: str) -> None: ...


@script("history/forget")
def history_forget(keys: SessionKeys, taken: Sequence[str]) -> None: ...


@script("history/info")
def history_info(keys: SessionKeys) -> None: ...
