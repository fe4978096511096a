"""The index of runs: by status, by agent, by session, by age, and those whose message was not sent.

The index is derived. A run is added with a status before it has it, and dropped with the one before
after that, so the index may hold too much for a while, and a reader checks each entry against its
run.
"""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec

from capsule_tasks.errors import StorageError
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import RunEntryKeys, RunIndexKeys
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.locations import Place
from capsule_tasks.storage.runs.types import Status

SEND_AFTER_MS = 5000
"""A run needs a message, and nobody has noted one as sent: then another process sends it."""
WITH_MESSAGE: frozenset[Status] = frozenset({"queued", "cancelled"})
"""Statuses in which a run may need a message; for a cancelled one, a worker ends its task."""


class RunEntry(msgspec.Struct, frozen=True):
    """A run with a status in the index. The run is authoritative."""

    run: str
    status: Status
    agent: str
    session: str = ""


_decode = msgspec.json.Decoder(RunEntry).decode
_encode = msgspec.json.Encoder().encode


class RunIndex:
    """Operations on the index of runs of one Redis."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._keys = RunIndexKeys(settings.prefix)
        self._ttl_ms = int(max(settings.ttl_s, settings.ended_ttl_s) * 1000)

    def add(self, place: Place, status: Status) -> Operation[int]:
        """Add a run before it has a status; the time by the index's clock in ms."""
        entry = RunEntry(place.run_id, status, place.agent, place.session_id)
        due_in_ms = SEND_AFTER_MS if status in WITH_MESSAGE else 0
        call = scripts.index_add.call(
            self._keys_of(entry),
            ttl_ms=self._ttl_ms,
            parts=[_member(entry), _encode(entry), due_in_ms],
        )
        reply = yield from call_script(call, self._settings.retry)
        return int(reply[1])

    def leave(self, place: Place, status: Status, before_ms: int) -> Operation[None]:
        """Drop a run with a status that it had, unless it was added again at this time or later.

        An entry that stays is dropped by the next reader.
        """
        with contextlib.suppress(StorageError):
            entry = RunEntry(place.run_id, status, place.agent, place.session_id)
            yield from self.drop(entry, before_ms=before_ms)

    def leave_all(self, place: Place) -> Operation[None]:
        """Drop a run with each status that it may have had."""
        for status in get_args(Status):
            yield from self.drop(RunEntry(place.run_id, status, place.agent, place.session_id))

    def drop(self, entry: RunEntry, *, idle_ms: int = 0, before_ms: int = 0) -> Operation[bool]:
        """Drop an entry, unless it was added too recently; whether it was dropped."""
        call = scripts.index_drop.call(
            self._keys_of(entry), member=_member(entry), idle_ms=idle_ms, before_ms=before_ms
        )
        reply = yield from call_script(call, self._settings.retry)
        return int(reply[1]) == 1

    def page(
        self,
        agent: str | None,
        status: Status | None,
        after: str,
        count: int,
        *,
        session_id: str | None = None,
        newest_first: bool = False,
    ) -> Operation[list[tuple[RunEntry, str]]]:
        """Entries after a score, each with its score; of a session, or of agent and status."""
        order = self._keys.order(agent, status)
        if session_id is not None:
            order = self._keys.order_of_session(session_id)
        call = scripts.index_list.call(
            self._keys,
            order,
            after=after,
            count=count,
            newest_first=int(newest_first),
        )
        reply = yield from call_script(call, self._settings.retry)
        rows = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
        return [
            (_entry(member, details, session_id or ""), score.decode())
            for member, score, details in rows
        ]

    def unsent(self, count: int) -> Operation[tuple[list[RunEntry], float | None]]:
        """Entries whose message should have been sent, and the seconds until the next's should."""
        call = scripts.index_unsent.call(self._keys, count=count)
        reply = yield from call_script(call, self._settings.retry)
        next_in_s = int(reply[1]) / 1000 if int(reply[1]) >= 0 else None
        rows = zip(reply[2::2], reply[3::2], strict=True)
        return [_entry(member, details) for member, details in rows], next_in_s

    def postpone(self, entry: RunEntry, in_s: float) -> Operation[None]:
        """Look at an entry later: one that stays due would hide those after it."""
        call = scripts.index_postpone.call(
            self._keys, member=_member(entry), at_ms=0, min_ms=int(in_s * 1000)
        )
        yield from call_script(call, self._settings.retry)

    def _keys_of(self, entry: RunEntry) -> RunEntryKeys:
        return RunEntryKeys(entry.agent, entry.status, entry.session, self._settings.prefix)


def _member(entry: RunEntry) -> bytes:
    return _encode([entry.run, entry.status])


def _entry(member: bytes, details: bytes, session_id: str = "") -> RunEntry:
    """An entry; one whose details are lost is made of its member."""
    if details:
        return _decode(details)
    run, status = msgspec.json.decode(member, type=tuple[str, Status])
    return RunEntry(run, status, "", session_id)
