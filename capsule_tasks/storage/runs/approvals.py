"""Decisions on calls that wait for an approval, as generators without I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from capsule_tasks.errors import (
    AlreadyDecided,
    DecisionExpired,
    InvalidSetting,
    MayNotDecide,
    RunNotFound,
    StorageError,
    UnknownCall,
)
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import RunSettings, check_value
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.operations import Operation, Reply, named
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.approval_index import IDLE_MS, Entry
from capsule_tasks.storage.runs.core import RunCore
from capsule_tasks.storage.runs.replies import pack, refusal, status_of, unpack
from capsule_tasks.storage.runs.types import (
    Expired,
    OptionalName,
    OptionalText,
    PageSize,
    PendingApproval,
    PendingApprovalPage,
    Resolved,
    Status,
    StoredDecision,
    Sweep,
    check_bytes,
    check_names,
)
from capsule_tasks.storage.scripts import Code

PAGE = 100
CHECK_AGAIN_S = 1.0
"""Until an index entry is checked again whose time has passed but whose call does not wait yet."""
CHECK_AGAIN_UNLIMITED_S = 3600.0
"""As above, for a call without a limit: a refused call of the same id had one."""

_WAITING: tuple[Status, ...] = ("interrupted", "queued")
"""Statuses that end when a call is decided."""

_decision = msgspec.msgpack.Decoder(StoredDecision).decode


class ApprovalCore:
    """Decisions in one Redis; the docstrings hold for both facades."""

    def __init__(self, settings: RunSettings, runs: RunCore) -> None:
        self._settings = settings
        self._runs = runs
        self._index = runs.index
        self._ttl_ms = int(settings.ttl_s * 1000)

    def approve(
        self,
        run_id: str,
        call_id: str,
        *,
        always: bool = False,
        by: str | None = None,
        roles: Sequence[str] = (),
        operation_id: str | None = None,
    ) -> Operation[Resolved]:
        """Approve a call that waits; with `always` also every later call of its tool by its agent.

        The first decision counts; later ones raise AlreadyDecided, which has the first. If the call
        names who may decide, `by` or one of `roles` has to be among them, else MayNotDecide is
        raised. Raises DecisionExpired after the time limit, UnknownCall if the call does not wait.
        """
        decision = {"approved": True, "message": None}
        return self._decide(run_id, call_id, decision, always, by, roles, operation_id)

    def reject(
        self,
        run_id: str,
        call_id: str,
        *,
        message: str | None = None,
        always: bool = False,
        by: str | None = None,
        roles: Sequence[str] = (),
        operation_id: str | None = None,
    ) -> Operation[Resolved]:
        """Reject a call that waits, with a message for the model; see `approve`."""
        check_value("message", message, OptionalText)
        decision = {"approved": False, "message": message and sendable(message)}
        return self._decide(run_id, call_id, decision, always, by, roles, operation_id)

    def settle(
        self,
        run_id: str,
        call_id: str,
        *,
        output: str,
        by: str | None = None,
        roles: Sequence[str] = (),
        operation_id: str | None = None,
    ) -> Operation[Resolved]:
        """Say that a call was made for which a request of the kind `settle` waits; see `approve`.

        `output` is what the call gave, as JSON. To approve such a request says that the call was
        not made, and may be; to reject it, that it must not be. Raises UnknownCall for a call that
        waits for an approval.
        """
        check_value("output", output, str)
        max_bytes = self._runs.settings.max_output_bytes
        check_bytes("the output", sendable(output).encode(), max_bytes)
        decision = {"approved": False, "output": sendable(output)}
        return self._decide(run_id, call_id, decision, False, by, roles, operation_id)

    def pending(
        self,
        *,
        agent: str | None = None,
        tool: str | None = None,
        limit: int = PAGE,
        cursor: str | None = None,
    ) -> Operation[PendingApprovalPage]:
        """Calls that wait in all runs, oldest first; only of an agent or of a tool, if given."""
        check_value("limit", limit, PageSize)
        check_value("agent", agent, OptionalName)
        check_value("tool", tool, OptionalName)
        check_value("cursor", cursor, OptionalText)
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise InvalidSetting("cursor", cursor, "the cursor of the page before")
        after, calls = cursor or "0", list[PendingApproval]()
        known: dict[str, tuple[PendingApproval, ...]] = {}
        while len(calls) < limit:
            count = min(PAGE, limit - len(calls))
            page = yield from self._index.page(agent, tool, after, count)
            for entry, score in page:
                after = score
                call = yield from self._call_of(entry, known)
                if call is not None:
                    calls.append(call)
                else:
                    yield from self._index.drop(entry, idle_ms=IDLE_MS)
            if len(page) < count:
                return PendingApprovalPage(calls, None)
        return PendingApprovalPage(calls, after)

    def expire_due(self, *, limit: int = PAGE) -> Operation[Sweep]:
        """Decide calls whose time limit has passed; the result says when to call this again.

        Any number of processes may call it at the same time: each call is decided once, and one
        process gets `resume` for its run.
        """
        check_value("limit", limit, PageSize)
        entries, next_in_s = yield from self._index.due(limit)
        expired: list[Expired] = []
        for run_id in dict.fromkeys(entry.run for entry in entries):
            with contextlib.suppress(RunNotFound):
                one = yield from self.expire(run_id)
                if one.calls:
                    expired.append(one)
        known: dict[str, tuple[PendingApproval, ...]] = {}
        decided = {(one.run_id, call_id) for one in expired for call_id in one.calls}
        for entry in entries:
            if (entry.run, entry.call) in decided:
                yield from self._index.drop(entry, idle_ms=0)
                continue
            call = yield from self._call_of(entry, known)
            if call is None and (yield from self._index.drop(entry, idle_ms=IDLE_MS)):
                continue
            expires_at = call and call.expires_at
            at_ms = int(expires_at.timestamp() * 1000) if expires_at else 0
            min_s = CHECK_AGAIN_UNLIMITED_S if call and not expires_at else CHECK_AGAIN_S
            later_s = yield from self._index.postpone(entry, at_ms, int(min_s * 1000))
            next_in_s = min(next_in_s or later_s, later_s)
        if len(entries) == limit:
            next_in_s = 0.0
        return Sweep(expired, next_in_s)

    def expire(self, run_id: str, *, operation_id: str | None = None) -> Operation[Expired]:
        """Decide calls of one run whose time limit has passed."""
        place = yield from self._runs.locations.find(run_id)
        call = partial(
            scripts.run_expire.call,
            place.keys,
            operation_id=named("run_expire", operation_id),
            ttl_ms=self._ttl_ms,
            run_id=run_id,
            channel=self._index.channel,
        )
        reply = yield from self._runs.written(
            place, call, was=_was(operation_id), is_done=lambda reply: len(reply) > 4
        )
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        calls = tuple(call_id.decode() for call_id in reply[4:])
        return Expired(run_id, calls, status_of(reply[2]), reply[1] == 1, int(reply[3]))

    def reindex(self, run_id: str) -> Operation[int]:
        """Put the calls that a run waits for into the index again; the number of calls."""
        record = yield from self._runs.read(run_id, with_snapshot=False)
        yield from self._index.add(run_id, record.session_id, record.pending)
        return len(record.pending)

    def _decide(
        self,
        run_id: str,
        call_id: str,
        decision: dict[str, Any],
        always: bool,
        by: str | None,
        roles: Sequence[str],
        operation_id: str | None,
    ) -> Operation[Resolved]:
        escaped("call id", call_id)
        check_value("by", by, OptionalText)
        check_names("roles", roles)
        check_value("always", always, bool)
        place = yield from self._runs.locations.find(run_id)
        who = tuple(sendable(each) for each in (by, *roles) if each)
        call = partial(
            scripts.run_decide.call,
            place.keys,
            operation_id=named("run_decide", operation_id),
            ttl_ms=self._ttl_ms,
            run_id=run_id,
            call=call_id,
            decision=pack({**decision, "by": by and sendable(by)}),
            always=int(always),
            roles=pack(list(who)),
            channel=self._index.channel,
        )
        reply = yield from self._runs.written(place, call, was=_was(operation_id))
        if reply[0] != Code.DONE:
            raise _refusal(run_id, call_id, who, reply)
        entry = Entry(run_id, call_id, reply[4].decode(), reply[3].decode(), place.session_id)
        # The decision is stored: an entry that stays in the index is dropped by the next reader.
        with contextlib.suppress(StorageError):
            yield from self._index.drop(entry, idle_ms=0)
        return Resolved(run_id, call_id, status_of(reply[2]), reply[1] == 1, int(reply[5]))

    def _call_of(
        self, entry: Entry, known: dict[str, tuple[PendingApproval, ...]]
    ) -> Operation[PendingApproval | None]:
        """The call of an index entry, if its run waits for it; `known` has the calls of runs."""
        if entry.run not in known:
            known[entry.run] = ()
            with contextlib.suppress(RunNotFound):
                record = yield from self._runs.read(entry.run, with_snapshot=False)
                known[entry.run] = record.pending
        return next((call for call in known[entry.run] if call.call_id == entry.call), None)


def _was(operation_id: str | None) -> Sequence[Status]:
    """Statuses that a change may end; with an id of the caller's it may be an old one."""
    return _WAITING if operation_id is None else ()


def _refusal(run_id: str, call_id: str, who: tuple[str, ...], reply: Reply) -> Exception:
    match reply[0]:
        case Code.UNKNOWN if len(reply) > 1:
            return UnknownCall(call_id, "it waits for an approval", "is not to be settled")
        case Code.UNKNOWN:
            return UnknownCall(call_id, f"run {run_id!r:.100} has not asked for it")
        case Code.STARTED:
            return UnknownCall(call_id, "a standing approval covered it, and it was made")
        case Code.DECIDED:
            return AlreadyDecided(call_id, _decision(reply[1]))
        case Code.EXPIRED:
            return DecisionExpired(call_id, _decision(reply[1]), reply[2] == 1, int(reply[3]))
        case Code.DENIED:
            return MayNotDecide(call_id, who, tuple(unpack(reply[1])))
    return refusal(run_id, reply)
