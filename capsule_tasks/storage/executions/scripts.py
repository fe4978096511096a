"""The scripts of executions and of what lists and counts them, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import ExecutionKeys, GroupKeys, RecentKeys
from capsule_tasks.storage.scripts import Argument, script


@script("executions/claim")
def execution_claim(
    keys: ExecutionKeys,
    *,
    claim: str,
    owner: str,
    held_by: str,
    details: bytes,
    state: str,
    outcome: str,
    has_stream_content: str,
    channel: str,
    lost: bytes,
    events: Sequence[bytes],
) -> None: ...


@script("executions/append")
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


@script("executions/reap")
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


@script("executions/send_command")
def execution_send_command(
    keys: ExecutionKeys,
    *,
    command: str,
    ttl_ms: int,
    doorbell_prefix: str,
    execution: str,
    data: bytes,
) -> None: ...


@script("executions/commands")
def execution_commands(keys: ExecutionKeys, *, after: str) -> None: ...


@script("executions/read")
def execution_read(keys: ExecutionKeys, *, after: str, count: int) -> None: ...


@script("executions/record")
def execution_record(keys: ExecutionKeys) -> None: ...


@script("executions/recent_record")
def recent_record(
    keys: RecentKeys, *, max_entries: int, ttl_ms: int, channel: str, updates: Sequence[Argument]
) -> None: ...


@script("executions/recent_list")
def recent_list(keys: RecentKeys, *, before: str, count: int) -> None: ...


@script("executions/recent_find")
def recent_find(keys: RecentKeys, *, ids: Sequence[str]) -> None: ...


@script("executions/group_record")
def group_record(
    keys: GroupKeys, *, ttl_ms: int, max_failures: int, channel: str, members: Sequence[Argument]
) -> None: ...


@script("executions/group_read")
def group_read(keys: GroupKeys, *, after: str, count: int, which: int) -> None: ...
