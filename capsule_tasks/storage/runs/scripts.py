"""The scripts of runs and of the index of approvals, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import (
    ApprovalKeys,
    CallKeys,
    OwnerKeys,
    RunEntryKeys,
    RunIndexKeys,
    RunKeys,
)
from capsule_tasks.storage.scripts import Argument, script


@script("runs/create")
def run_create(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    run_id: str,
    schema: str,
    agent: str,
    snapshot: bytes,
    message: bytes,
    requests: bytes,
    indexed_ms: int,
    listed: bytes,
    channel: str,
) -> None: ...


@script("runs/claim")
def run_claim(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    incarnation: str,
    steal: int,
    readable: bytes,
    listed: bytes,
    message: bytes,
    held_ms: int,
) -> None: ...


@script("runs/commit")
def run_commit(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    run_id: str,
    token: int,
    revision: int,
    turn: int,
    status: str,
    schema: str,
    agent: str,
    snapshot: bytes,
    result: bytes,
    error: bytes,
    usage: bytes,
    requests: bytes,
    indexed_ms: int,
    listed: bytes,
    channel: str,
    history_ttl_ms: int,
    max_items: int,
    max_bytes: int,
    records: Sequence[bytes],
) -> None: ...


@script("runs/cancel")
def run_cancel(
    keys: RunKeys, *, operation_id: str, ttl_ms: int, by: str, listed: bytes
) -> None: ...


@script("runs/release")
def run_release(
    keys: RunKeys, *, operation_id: str, ttl_ms: int, token: int, is_lost: int, listed: bytes
) -> None: ...


@script("runs/delete")
def run_delete(keys: RunKeys, *, ttl_ms: int) -> None: ...


@script("runs/read")
def run_read(keys: RunKeys, *, with_snapshot: int) -> None: ...


@script("runs/start_calls")
def run_start_calls(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    token: int,
    revision: int,
    max_bytes: int,
    calls: bytes,
    parts: Sequence[Argument],
) -> None: ...


@script("runs/finish_calls")
def run_finish_calls(
    keys: RunKeys,
    *,
    operation_id: str,
    token: int,
    parts: Sequence[Argument],
) -> None: ...


@script("runs/journal")
def run_journal(
    keys: RunKeys,
    *,
    ttl_ms: int,
    token: int,
    revision: int,
    max_bytes: int,
    key: str,
    reply: bytes,
) -> None: ...


@script("runs/decide")
def run_decide(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    run_id: str,
    call: str,
    decision: bytes,
    always: int,
    roles: bytes,
    listed: bytes,
    channel: str,
) -> None: ...


@script("runs/expire")
def run_expire(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    run_id: str,
    listed: bytes,
    channel: str,
) -> None: ...


@script("runs/approvals_add")
def approvals_add(keys: CallKeys, *, ttl_ms: int, parts: Sequence[Argument]) -> None: ...


@script("runs/approvals_drop")
def approvals_drop(keys: CallKeys, *, member: bytes, idle_ms: int) -> None: ...


@script("runs/approvals_list")
def approvals_list(keys: ApprovalKeys, order: str, *, after: str, count: int) -> None: ...


@script("runs/approvals_due")
def approvals_due(keys: ApprovalKeys, *, count: int) -> None: ...


@script("runs/approvals_postpone")
def approvals_postpone(keys: ApprovalKeys, *, member: bytes, at_ms: int, min_ms: int) -> None: ...


@script("runs/owners")
def run_owners(
    owners: str, *, owner: str, in_ms: int, ttl_ms: int, max_due: int, incarnations: Sequence[str]
) -> None: ...


@script("runs/note_sent")
def run_note_sent(keys: RunKeys, *, updated: int) -> None: ...


@script("runs/index_add")
def index_add(keys: RunEntryKeys, *, ttl_ms: int, parts: Sequence[Argument]) -> None: ...


@script("runs/index_drop")
def index_drop(keys: RunEntryKeys, *, member: bytes, idle_ms: int, before_ms: int) -> None: ...


@script("runs/index_list")
def index_list(
    keys: RunIndexKeys, order: str, *, after: str, count: int, newest_first: int
) -> None: ...


@script("runs/index_unsent")
def index_unsent(keys: RunIndexKeys, *, count: int) -> None: ...


@script("runs/index_postpone")
def index_postpone(keys: RunIndexKeys, *, member: bytes, at_ms: int, min_ms: int) -> None: ...


@script("runs/hold")
def run_hold(keys: OwnerKeys, *, ttl_ms: int, count: int, holds: Sequence[bytes]) -> None: ...


@script("runs/held")
def run_held(keys: OwnerKeys, *, count: int, holds: Sequence[bytes]) -> None: ...


@script("runs/locate")
def run_locate(location: str, *, session: str, agent: str, ttl_ms: int) -> None: ...


@script("runs/unlocate")
def run_unlocate(location: str) -> None: ...


@script("runs/find")
def run_find(location: str, *, ttl_ms: int) -> None: ...
