"""The index of calls that wait for an approval: by age, agent and tool.

The index is derived. A call is added before it waits and dropped after it was decided, so the index
may hold too much for a while, and a reader checks each entry against its run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import ApprovalKeys, CallKeys
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.types import ApprovalRequest, PendingApproval
from capsule_tasks.storage.scripts import Argument

IDLE_MS = 120_000
"""An entry whose run does not know its call is dropped after so long. Scripts refuse to let a call
wait whose entry is older than 30 s, so no entry is dropped whose call is about to wait."""


class Entry(msgspec.Struct, frozen=True):
    """A call in the index. The run is authoritative."""

    run: str
    call: str
    agent: str
    tool: str
    session: str


_decode = msgspec.json.Decoder(Entry).decode
_encode = msgspec.json.Encoder().encode


class Index:
    """Operations on the index of one Redis."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._keys = ApprovalKeys(settings.prefix)
        self.channel = self._keys.channel

    def add(
        self,
        run_id: str,
        session_id: str,
        calls: Sequence[ApprovalRequest] | Sequence[PendingApproval],
    ) -> Operation[int]:
        """Add calls before they wait, or again; the time by the index's clock in ms, or 0."""
        groups = defaultdict[tuple[str, str], list[Argument]](list)
        for each in calls:
            entry = Entry(run_id, each.call_id, each.agent, each.tool, session_id)
            due_in_ms = _ms(_left_s(each)) or 0
            groups[each.agent, each.tool] += [_member(entry), _encode(entry), due_in_ms]
        ttl_ms = int(self._settings.ttl_s * 1000)
        added_ms: list[int] = []
        for (agent, tool), parts in groups.items():
            call = scripts.approvals_add.call(
                CallKeys(agent, tool, self._settings.prefix), ttl_ms=ttl_ms, parts=parts
            )
            reply = yield from call_script(call, self._settings.retry)
            added_ms.append(int(reply[1]))
        return min(added_ms, default=0)

    def drop(self, entry: Entry, *, idle_ms: int) -> Operation[bool]:
        """Drop a call, unless it was added less than `idle_ms` ago; whether it was dropped."""
        keys = CallKeys(entry.agent, entry.tool, self._settings.prefix)
        call = scripts.approvals_drop.call(keys, member=_member(entry), idle_ms=idle_ms)
        reply = yield from call_script(call, self._settings.retry)
        return int(reply[1]) == 1

    def page(
        self, agent: str | None, tool: str | None, after: str, count: int
    ) -> Operation[list[tuple[Entry, str]]]:
        """Entries after a score, oldest first, each with its score."""
        order = self._keys.order(agent, tool)
        call = scripts.approvals_list.call(self._keys, order, after=after, count=count)
        reply = yield from call_script(call, self._settings.retry)
        rows = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
        return [
            (_entry(member, details, agent, tool), score.decode())
            for member, score, details in rows
        ]

    def due(self, count: int) -> Operation[tuple[list[Entry], float | None]]:
        """Entries whose time has passed, and the seconds until the next is due."""
        reply = yield from call_script(
            scripts.approvals_due.call(self._keys, count=count), self._settings.retry
        )
        next_in_s = int(reply[1]) / 1000 if int(reply[1]) >= 0 else None
        rows = zip(reply[2::2], reply[3::2], strict=True)
        return [_entry(member, details) for member, details in rows], next_in_s

    def postpone(self, entry: Entry, at_ms: int, min_ms: int) -> Operation[float]:
        """Make an entry due later, and return the seconds until then.

        An entry that stays due comes first at every sweep: many of them would hide all others.
        """
        call = scripts.approvals_postpone.call(
            self._keys, member=_member(entry), at_ms=at_ms, min_ms=min_ms
        )
        reply = yield from call_script(call, self._settings.retry)
        return int(reply[1]) / 1000


def packed(request: ApprovalRequest) -> dict[str, Any]:
    """A call as scripts take it."""
    return {
        "call": request.call_id,
        "tool": request.tool,
        "agent": request.agent,
        "fingerprint": request.fingerprint,
        "args": sendable(request.arguments),
        "on_expiry": request.on_expiry,
        "may": request.may_decide,
        "expires_in": _ms(request.expires_in_s),
        "kind": request.kind,
    }


def _left_s(call: ApprovalRequest | PendingApproval) -> float | None:
    if isinstance(call, ApprovalRequest):
        return call.expires_in_s
    return None if call.expires_at is None else call.expires_at.timestamp() - time.time()


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))


def _member(entry: Entry) -> bytes:
    return _encode([entry.run, entry.call])


def _entry(
    member: bytes, details: bytes, agent: str | None = None, tool: str | None = None
) -> Entry:
    """An entry; one whose details are lost is made of its member: its run may still wait."""
    if details:
        return _decode(details)
    run, call = msgspec.json.decode(member, type=tuple[str, str])
    return Entry(run, call, agent or "", tool or "", "")
