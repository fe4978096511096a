"""The scripts of executions and of what lists and counts them, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import ExecutionKeys, GroupKeys, RecentKeys
from capsule_tasks.storage.scripts import Argument, script


@script
def execution_claim(
    keys: ExecutionKeys,
    *,
    claim: str,
    owner: str,
    held_by: str,
    about: bytes,
    state: str,
    outcome: str,
    has_stream_content: str,
    channel: str,
    lost: bytes,
    events: Sequence[bytes],
) -> None: ...


@script
def execution_append(
    keys: ExecutionKeys,
    *,
    attempt: int,
    first_seq: int,
    state: str,
    outcome: str,
    has_stream_content: int,
    limits: bytes,
    channel: str,
    events: Sequence[bytes],
) -> None: ...


@script
def execution_reap(
    keys: ExecutionKeys,
    *,
    owner: str,
    attempt: int,
    outcome: str,
    limits: bytes,
    channel: str,
    event: bytes,
) -> None: ...


@script
def execution_control(
    keys: ExecutionKeys, *, command: str, keep_ms: int, bells: str, execution: str, data: bytes
) -> None: ...


@script
def execution_told(keys: ExecutionKeys, *, after: str) -> None: ...


@script
def execution_read(keys: ExecutionKeys, *, after: str, count: int) -> None: ...


@script
def execution_look(keys: ExecutionKeys) -> None: ...


@script
def recent_note(
    keys: RecentKeys, *, most: int, keep_ms: int, channel: str, notes: Sequence[Argument]
) -> None: ...


@script
def recent_list(keys: RecentKeys, *, before: str, count: int) -> None: ...


@script
def recent_find(keys: RecentKeys, *, ids: Sequence[str]) -> None: ...


@script
def group_note(
    keys: GroupKeys, *, keep_ms: int, most: int, channel: str, members: Sequence[Argument]
) -> None: ...


@script
def group_read(keys: GroupKeys, *, after: str, count: int, which: int) -> None: ...
