"""The scripts of named sessions, as they are called."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.storage.keys import HostKeys, NamedSessionKeys, WantedKeys
from capsule_tasks.storage.scripts import script


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
    profile: str,
    ttl_ms: int,
) -> None: ...


@script("sessions/begin")
def session_begin(keys: NamedSessionKeys, *, token: int) -> None: ...


@script("sessions/done")
def session_done(
    keys: NamedSessionKeys, *, token: int, seq: int, cpu_ms: int, known_ttl_ms: int, ttl_ms: int
) -> None: ...


@script("sessions/release")
def session_release(keys: NamedSessionKeys, *, token: int, even_unfinished: int) -> None: ...


@script("sessions/info")
def session_info(keys: NamedSessionKeys) -> None: ...


@script("sessions/want")
def session_want(keys: WantedKeys, *, session_id: str, ttl_ms: int) -> None: ...


@script("sessions/unwant")
def session_unwant(keys: WantedKeys, *, session_id: str, mark: int) -> None: ...


@script("sessions/take_wanted")
def session_take_wanted(keys: WantedKeys, *, count: int, postpone_ms: int, ttl_ms: int) -> None: ...


@script("sessions/wanted_count")
def session_wanted_count(keys: WantedKeys) -> None: ...


@script("sessions/hold")
def session_hold(
    keys: HostKeys, *, token: str, ttl_ms: int, count: int, ids: Sequence[str]
) -> None: ...


@script("sessions/held")
def session_held(keys: HostKeys, *, count: int, ids: Sequence[str]) -> None: ...
