"""Values that the store of named sessions takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest


class Submitted(NamedTuple):
    """A call in the log of its session."""

    seq: int
    """Its place in the order of the log; 0 for one that was known before."""
    owner: str
    """The incarnation that has the session, and was rung; empty for none."""
    waiting: int
    """Calls that wait, with this one."""

    @property
    def is_known(self) -> bool:
        """Whether a call with this id was submitted before; nothing was appended then."""
        return self.seq == 0


class Wanted(NamedTuple):
    """A session that is wanted, and the mark of its listing."""

    session_id: str
    mark: int


class WantedPage(NamedTuple):
    """Sessions that were given to a worker, and the seconds until the next is due, if any is."""

    sessions: tuple[Wanted, ...]
    next_s: float | None


class WantedState(NamedTuple):
    """The sizes of a profile's list: its sessions, and the workers that listen to it."""

    sessions: int
    hosts: int | None
    """Workers that listen to the list; None in a cluster, where no node knows all listeners."""


class CallPlace(StrEnum):
    """Where a call of a session is."""

    UNFINISHED = "unfinished"
    """In the log."""
    DONE = "done"
    """Ended, and its id is remembered."""
    GONE = "gone"
    """Unknown: lost with writes of a Redis, erased by `forget`, or done long ago."""
    FORGOTTEN = "forgotten"
    """In a session that is being erased: whoever erases it ends the call."""


class CallLook(NamedTuple):
    """The place of a call and its prospects, for a caller who waits for it."""

    place: CallPlace
    profile: str
    hosts: int | None = None
    """Workers that host the profile, where no worker has the session; None if that is unknown."""


class BegunCall(NamedTuple):
    """A call that the owner of its session has begun, and has to end with `done`."""

    seq: int
    call_id: str
    payload: bytes
    tenant: str = ""
    """The session's tenant, where `begin` returned the call."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A session, as its new owner takes it over."""

    session_id: str
    token: int
    profile: str
    tenant: str
    waiting: int
    """Calls that nobody has begun."""
    executions: int
    """Calls that are done."""
    before_restart: int
    """Those of them that were done at the last restart: nobody misses what they changed."""
    is_closing: bool
    checkpoint: bytes | None
    """The manifest, as its writer packed it."""
    begun: BegunCall | None
    """The call that the owner before had begun: it may have run."""
    begun_ago_s: float = 0.0
    """How long ago that was; meaningless without a begun call."""


@dataclass(frozen=True, slots=True)
class NamedSessionInfo:
    """The record of a session in Redis. Times are in seconds of Redis's clock."""

    session_id: str
    profile: str
    tenant: str
    owner: str
    """An incarnation; empty without an owner."""
    token: int
    created_at: float | None
    """When the first call was submitted."""
    used_at: float | None
    """When the last call was submitted or done."""
    executions: int
    """Calls that are done."""
    cpu_ms: int
    waiting: int
    """Calls that nobody has begun."""
    begun_call: str
    """The call that the owner has begun; empty for none."""
    is_closing: bool
    is_forgotten: bool
    """Whether it is being erased: nobody may own or use it until that is done."""
    checkpoint: CheckpointManifest | None
    """When the last checkpoint was made, its size and its names; None without one."""
    hosts: int | None = field(default=None, compare=False)
    """Workers that host sessions of the profile; None in lists, and in a cluster."""

    @property
    def unfinished(self) -> int:
        return self.waiting + bool(self.begun_call)


class RequestEntry(NamedTuple):
    """A request to the owner of a session; `entry` is where to read on after it."""

    entry: str
    request_id: str
    payload: bytes


class RequestPage(NamedTuple):
    """Requests that are not answered, and whether the owner is to close the session."""

    requests: tuple[RequestEntry, ...]
    is_closing: bool


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One session in the index. The session's record is authoritative."""

    session_id: str
    profile: str
    tenant: str = ""
    recorded_at: float = 0.0
    """In seconds of Redis's clock; the store sets it."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The usage of a tenant's sessions."""

    live: int
    """Sessions that have a place on a worker now."""
    window_started_at: float
    cpu_ms: int
    """In the present window of time."""
    calls: int
    total_cpu_ms: int
    total_calls: int
