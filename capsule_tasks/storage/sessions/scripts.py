"""The scripts of named sessions, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import (
    HostKeys,
    NamedSessionKeys,
    SessionIndexKeys,
    TenantKeys,
    WantedKeys,
)
from capsule_tasks.storage.scripts import Argument, script


@script("sessions/submit")
def session_submit(
    keys: NamedSessionKeys,
    *,
    session_id: str,
    call: str,
    payload: bytes,
    profile: str,
    tenant: str,
    may_wait: int,
    listed_under: str,
    max_waiting: int,
    ttl_ms: int,
    doorbell_prefix: str,
) -> None: ...


@script("sessions/take")
def session_take(
    keys: NamedSessionKeys,
    *,
    operation_id: str,
    incarnation: str,
    steal: int,
    expected: int,
    profile: str,
    ttl_ms: int,
) -> None: ...


@script("sessions/begin")
def session_begin(keys: NamedSessionKeys, *, token: int) -> None: ...


@script("sessions/done")
def session_done(
    keys: NamedSessionKeys,
    *,
    token: int,
    seq: int,
    has_run: int,
    cpu_ms: int,
    known_ttl_ms: int,
    ttl_ms: int,
) -> None: ...


@script("sessions/release")
def session_release(
    keys: NamedSessionKeys, *, token: int, even_unfinished: int, token_ttl_ms: int
) -> None: ...


@script("sessions/restart")
def session_restart(keys: NamedSessionKeys, *, token: int) -> None: ...


@script("sessions/info")
def session_info(keys: NamedSessionKeys) -> None: ...


@script("sessions/want")
def session_want(keys: WantedKeys, *, session_id: str, ttl_ms: int) -> None: ...


@script("sessions/unwant")
def session_unwant(keys: WantedKeys, *, session_id: str, mark: int) -> None: ...


@script("sessions/take_wanted")
def session_take_wanted(keys: WantedKeys, *, count: int, postpone_ms: int, ttl_ms: int) -> None: ...


@script("sessions/wanted_state")
def session_wanted_state(keys: WantedKeys) -> None: ...


@script("sessions/hold")
def session_hold(
    keys: HostKeys, *, token: str, ttl_ms: int, count: int, ids: Sequence[str]
) -> None: ...


@script("sessions/held")
def session_held(keys: HostKeys, *, count: int, ids: Sequence[str]) -> None: ...


@script("sessions/request")
def session_request(
    keys: NamedSessionKeys,
    *,
    session_id: str,
    request: str,
    payload: bytes,
    ttl_ms: int,
    doorbell_prefix: str,
) -> None: ...


@script("sessions/requests")
def session_requests(keys: NamedSessionKeys, *, token: int, after: str, count: int) -> None: ...


@script("sessions/reply")
def session_reply(
    keys: NamedSessionKeys, reply: str, *, token: int, entry: str, answer: bytes, ttl_ms: int
) -> None: ...


@script("sessions/reply_read")
def session_reply_read(reply: str) -> None: ...


@script("sessions/close")
def session_close(
    keys: NamedSessionKeys, *, session_id: str, token: int, doorbell_prefix: str
) -> None: ...


@script("sessions/forget")
def session_forget(
    keys: NamedSessionKeys, *, session_id: str, token_ttl_ms: int, doorbell_prefix: str
) -> None: ...


@script("sessions/forget_start")
def session_forget_start(
    keys: NamedSessionKeys, *, session_id: str, ttl_ms: int, doorbell_prefix: str
) -> None: ...


@script("sessions/forget_left")
def session_forget_left(keys: NamedSessionKeys, *, incarnation: str) -> None: ...


@script("sessions/unfinished")
def session_unfinished(keys: NamedSessionKeys, *, after: int, count: int) -> None: ...


@script("sessions/look")
def session_look(keys: NamedSessionKeys, *, call: str) -> None: ...


@script("sessions/known")
def session_known(keys: NamedSessionKeys, *, offset: int, count: int) -> None: ...


@script("sessions/index_record")
def index_record(
    keys: SessionIndexKeys, *, max_entries: int, ttl_ms: int, updates: Sequence[Argument]
) -> None: ...


@script("sessions/index_list")
def index_list(keys: SessionIndexKeys, *, before: str, count: int) -> None: ...


@script("sessions/tenant_note")
def tenant_note(keys: TenantKeys, *, session_id: str, ttl_ms: int) -> None: ...


@script("sessions/tenant_reserve")
def tenant_reserve(
    keys: TenantKeys, *, session_id: str, max_sessions: int, lease_ms: int, ttl_ms: int
) -> None: ...


@script("sessions/tenant_renew")
def tenant_renew(
    keys: TenantKeys, *, lease_ms: int, ttl_ms: int, session_ids: Sequence[str]
) -> None: ...


@script("sessions/tenant_unreserve")
def tenant_unreserve(keys: TenantKeys, *, session_ids: Sequence[str]) -> None: ...


@script("sessions/tenant_add_usage")
def tenant_add_usage(
    keys: TenantKeys, *, operation_id: str, cpu_ms: int, calls: int, window_ms: int, ttl_ms: int
) -> None: ...


@script("sessions/tenant_usage")
def tenant_usage(keys: TenantKeys, *, window_ms: int) -> None: ...


@script("sessions/tenant_sessions")
def tenant_sessions(keys: TenantKeys, *, offset: int, count: int) -> None: ...


@script("sessions/tenant_forget")
def tenant_forget(keys: TenantKeys) -> None: ...
