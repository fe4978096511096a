"""Every operation on stored runs, as generators without I/O; the facades run them.

A run's record and ledger are authoritative. The index of approvals is derived: it is written first,
so it may hold too much, never too little, and a reader checks each entry against its run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from capsule_tasks.errors import (
    InvalidSetting,
    RunClaimed,
    RunClaimLost,
    RunExists,
    RunNotFound,
    StorageError,
)
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import HistorySettings, RunSettings, Text, check_value
from capsule_tasks.storage.codec import Item, JsonCodec
from capsule_tasks.storage.connections.targets import Location
from capsule_tasks.storage.history.core import HistoryCore
from capsule_tasks.storage.history.history import History, SyncHistory
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import (
    Operation,
    Reply,
    call_script,
    named,
    operation_abandon,
    refused,
)
from capsule_tasks.storage.runs import approval_index, scripts
from capsule_tasks.storage.runs.approval_index import Entry, Index
from capsule_tasks.storage.runs.ledger import LedgerCore
from capsule_tasks.storage.runs.locations import Place
from capsule_tasks.storage.runs.owners import Owners
from capsule_tasks.storage.runs.replies import (
    DELETED,
    GONE,
    claim_of,
    pack,
    refusal,
    refusal_of_owner,
    status_of,
    text_of,
    unpack,
    usage_of,
)
from capsule_tasks.storage.runs.run_index import RunIndex
from capsule_tasks.storage.runs.types import (
    ENDED,
    ApprovalRequest,
    Cancelled,
    Claim,
    Committed,
    Created,
    OptionalText,
    RunRecord,
    RunUsage,
    Status,
    Turn,
    check_bytes,
    check_calls,
    check_claim,
    check_names,
    check_usage,
    pending_approval,
    time_of,
)
from capsule_tasks.storage.scripts import Call, Code

INDEX_ATTEMPTS = 5


class RunCore(LedgerCore):
    """Runs in one Redis; the docstrings hold for both facades.

    Each change takes an `operation_id`, as those of a history do: repeated under it, the change is
    done once.
    """

    def __init__(self, settings: RunSettings, location: Location) -> None:
        """`location` is the Redis to which the operations go."""
        super().__init__(settings)
        self._location = location
        self.index = Index(settings)
        self.run_index = RunIndex(settings)
        self.owners = Owners(settings)
        self._ended_ms = int(settings.ended_ttl_s * 1000)

    def create(
        self,
        run_id: str,
        session_id: str,
        snapshot: bytes,
        *,
        schema: str,
        agent: str,
        message: bytes = b"",
        approval_requests: Sequence[ApprovalRequest] = (),
        operation_id: str | None = None,
    ) -> Operation[Created]:
        """Store a new run: queued, or parked if it comes with calls that wait.

        `message` is what brings the run to a worker, kept for whoever has to send it again.
        Raises RunExists for an id that is taken, and leaves the run with that id as it is; so for
        one that was deleted less than `RunSettings.ended_ttl_s` ago.
        """
        self._check_turn(snapshot, schema, agent, approval_requests)
        check_bytes("the message", message, self.settings.max_snapshot_bytes)
        place = yield from self.locations.take(run_id, session_id, agent)
        call = partial(
            scripts.run_create.call,
            place.keys,
            operation_id=named("run_create", operation_id),
            ttl_ms=self._ttl_ms,
            run_id=run_id,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            message=message,
            channel=self.index.channel,
        )
        status: Status = "interrupted" if approval_requests else "queued"
        reply = yield from self.written(place, call, status, requests=approval_requests)
        if reply[0] == Code.CONFLICT:
            known = reply[1].decode()
            if known == DELETED:
                yield from self.locations.erase(run_id)
            raise RunExists(run_id, known)
        if reply[0] != Code.DONE:
            raise refused(reply, "create")
        return Created(status_of(reply[2]), int(reply[1]))

    def claim(
        self,
        run_id: str,
        incarnation: str,
        *,
        readable: Sequence[str] = (),
        message: bytes | None = None,
        operation_id: str | None = None,
    ) -> Operation[Claim]:
        """Claim a run that is queued, or whose owner's lease has lapsed; exactly one owner gets it.

        `readable` are the schema versions that the caller reads; none stands for all. A `message`
        replaces the stored one. Raises UnreadableSchema for a run of another version, which stays
        as it is, RunClaimed, RunParked, or RunEnded with the run's result and error; and
        LeaseMissing or LeaseLost if the claimer has no lease on this Redis: any other worker could
        take the run over at once.
        """
        escaped("incarnation", incarnation)
        check_names("readable", readable)
        message = b"" if message is None else message
        check_bytes("the message", message, self.settings.max_snapshot_bytes)
        prefix, retry = self.settings.prefix, self.settings.retry
        place = yield from self.locations.find(run_id)
        # One id for all attempts: a repeat of the call means the attempt that was granted.
        name, steal = named("run_claim", operation_id), 0
        hold, held_ms = yield from self.owners.hold(incarnation, run_id, name)
        while True:
            call = partial(
                scripts.run_claim.call,
                place.keys,
                operation_id=name,
                ttl_ms=self._ttl_ms,
                incarnation=incarnation,
                steal=steal,
                readable=pack(list(readable)),
                message=message,
                held_ms=held_ms,
            )
            was = _was(operation_id, "queued")
            reply = yield from self.written(place, call, "running", was=was)
            if reply[0] == Code.LOST:
                hold, held_ms = yield from self.owners.hold(incarnation, run_id, name)
                continue
            if reply[0] == Code.DONE:
                return claim_of(run_id, place.session_id, incarnation, hold, reply)
            refused: Exception | None = None
            if reply[0] != Code.HELD or steal == int(reply[2]):
                refused = refusal(run_id, reply, tuple(readable))
            else:
                owner, steal = reply[1].decode(), int(reply[2])
                if not owner or (yield from lease_left_s(owner, prefix, retry)):
                    refused = RunClaimed(run_id, owner)
            if refused is not None:
                with contextlib.suppress(StorageError):
                    # An earlier attempt, whose reply was lost, may still be on its way to Redis.
                    abandon = operation_abandon.call(place.keys.operations, operation_id=name)
                    yield from call_script(abandon, retry)
                    yield from self.owners.drop(incarnation, hold)
                raise refused

    def commit(
        self,
        claim: Claim,
        snapshot: bytes,
        *,
        turn: int,
        status: Status = "running",
        schema: str | None = None,
        agent: str | None = None,
        approval_requests: Sequence[ApprovalRequest] = (),
        items: Sequence[Item] = (),
        history: History | SyncHistory | None = None,
        result: bytes = b"",
        error: bytes = b"",
        usage: RunUsage | None = None,
        operation_id: str | None = None,
    ) -> Operation[Committed]:
        """Commit a turn: append items to the session's history and store the snapshot, or neither.

        A turn that is committed twice is stored once. `approval_requests` are all calls that wait
        now. `history` is the session's own: its codec, limits and time to live hold for the items,
        else the defaults do. `result` and `error` are kept with a run that ends; `usage` is that of
        all turns so far. The journal is erased, unless the run is parked inside its turn, under the
        number of the turn before.
        Raises RunClaimLost for an owner whose claim is over.
        """
        check_claim(claim)
        schema, agent = schema or claim.schema, agent or claim.agent
        usage = claim.usage if usage is None else usage
        check_usage(usage)
        self._check_turn(snapshot, schema, agent, approval_requests)
        check_value("turn", turn, Turn)
        check_value("status", status, Status)
        for name, value in (("result", result), ("error", error)):
            check_bytes(f"the {name}", value, self.settings.max_output_bytes)
            if value and status not in ENDED:
                raise InvalidSetting(
                    name, f"{len(value)} bytes", f"empty for a run that is {status}"
                )
        if status == "interrupted" and not approval_requests:
            must = "what an interrupted run waits for"
            raise InvalidSetting("approval_requests", approval_requests, must)
        if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            raise InvalidSetting("items", type(items).__name__, "several items, as in a list")
        core = self._history_of(claim, history)
        records, limits = core.encoded(items), core.settings
        place = yield from self._place_of(claim)
        call = partial(
            scripts.run_commit.call,
            place.keys,
            operation_id=named("run_commit", operation_id),
            ttl_ms=self._ended_ms if status in ENDED else self._ttl_ms,
            run_id=claim.run_id,
            token=claim.token,
            revision=claim.revision,
            turn=turn,
            status=status,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            result=result,
            error=error,
            usage=pack(usage),
            channel=self.index.channel,
            history_ttl_ms=max(1, int(limits.ttl_s * 1000)),
            max_items=limits.max_items,
            max_bytes=limits.max_bytes,
            records=records,
        )
        reply = yield from self.written(
            place,
            call,
            *([] if status == "running" else [status]),
            was=_was(operation_id, "running"),
            requests=approval_requests,
        )
        if reply[0] == Code.FULL:
            raise core.refusal(reply, "commit")
        if reply[0] != Code.DONE:
            raise refusal_of_owner(claim.run_id, reply)
        status = status_of(reply[2])
        if status != "running":
            yield from self.owners.drop(claim.owner, claim.hold)
        after = replace(
            claim,
            revision=int(reply[1]),
            turn=turn,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            cancelled_by=text_of(reply[3]),
            updated_us=int(reply[4]),
            journal={},
            usage=usage,
        )
        return Committed(after, status)

    def release(self, claim: Claim, *, operation_id: str | None = None) -> Operation[Status]:
        """Queue a run as it was last committed; RunClaimLost if its owner has lost the claim."""
        check_claim(claim)
        name = named("run_release", operation_id)
        place = yield from self._place_of(claim)
        try:
            status, _ = yield from self._released(
                place, claim.token, name, is_lost=False, was=_was(operation_id, "running")
            )
        except RunNotFound:
            raise RunClaimLost(claim.run_id, GONE) from None
        yield from self.owners.drop(claim.owner, claim.hold)
        return status

    def cancel(
        self, run_id: str, *, by: str = "somebody", operation_id: str | None = None
    ) -> Operation[Cancelled]:
        """Cancel a run: now if it has no owner, else by its owner's next commit.

        Raises RunEnded for a run that has ended; a second cancel changes nothing.
        """
        check_value("by", by, OptionalText)
        place = yield from self.locations.find(run_id)
        call = partial(
            scripts.run_cancel.call,
            place.keys,
            operation_id=named("run_cancel", operation_id),
            ttl_ms=self._ttl_ms,
            by=sendable(by or "") or "somebody",
        )
        was = _was(operation_id, "queued", "interrupted")
        reply = yield from self.written(place, call, was=was)
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        yield from self.drop_approvals(place, reply[4])
        return Cancelled(run_id, status_of(reply[1]), text_of(reply[2]), int(reply[3]))

    def read(self, run_id: str, *, with_snapshot: bool = True) -> Operation[RunRecord]:
        """The run as it is stored now."""
        place = yield from self.locations.find(run_id)
        call = scripts.run_read.call(place.keys, with_snapshot=int(with_snapshot))
        reply = yield from call_script(call, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        return RunRecord(
            run_id=run_id,
            session_id=place.session_id,
            status=status_of(reply[1]),
            revision=int(reply[2]),
            turn=int(reply[3]),
            owner=text_of(reply[4]),
            token=int(reply[5]),
            cancelled_by=text_of(reply[6]),
            schema=reply[7].decode(),
            agent=reply[8].decode(),
            created_at=time_of(int(reply[9]) // 1000),
            updated_us=int(reply[10]),
            snapshot=reply[11],
            pending=tuple(
                pending_approval(run_id, place.session_id, each) for each in unpack(reply[12])
            ),
            message=reply[13],
            result=reply[14],
            error=reply[15],
            unsent_us=int(reply[16] or 0),
            start_agent=place.agent,
            usage=usage_of(reply[17]),
            decided=tuple(call_id.decode() for call_id in reply[18]),
        )

    def drop_approvals(self, place: Place, calls: bytes) -> Operation[None]:
        """Drop calls that wait no more from the index; the next reader drops those that stay.

        `calls` is what scripts say of them.
        """
        with contextlib.suppress(StorageError):
            for call_id, agent, tool in unpack(calls):
                entry = Entry(place.run_id, call_id, agent, tool, place.session_id)
                yield from self.index.drop(entry, idle_ms=0)

    def _place_of(self, claim: Claim) -> Operation[Place]:
        """The place of a run that was claimed; raises RunClaimLost if the run is gone."""
        try:
            return (yield from self.locations.find(claim.run_id))
        except RunNotFound:
            raise RunClaimLost(claim.run_id, GONE) from None

    def _released(
        self,
        place: Place,
        token: int,
        operation: str,
        *,
        is_lost: bool,
        was: Sequence[Status] = ("running",),
    ) -> Operation[tuple[Status, int]]:
        """The status of a run without the owner that had this token, and when it changed."""
        call = partial(
            scripts.run_release.call,
            place.keys,
            operation_id=operation,
            ttl_ms=self._ttl_ms,
            token=token,
            is_lost=int(is_lost),
        )
        reply = yield from self.written(place, call, "queued", was=was)
        if reply[0] != Code.DONE:
            raise refusal(place.run_id, reply)
        return status_of(reply[1]), int(reply[2])

    def written(
        self,
        place: Place,
        call: Callable[..., Call],
        *expected: Status,
        was: Sequence[Status] = (),
        requests: Sequence[ApprovalRequest] | None = None,
        is_done: Callable[[Reply], bool] = lambda _: True,
    ) -> Operation[Reply]:
        """The reply of a script that may change a run's status, or let calls wait.

        The run is added to the index with the status that it is expected to have, and the calls to
        theirs. The script refuses another status, and what was added too long ago, as a reader may
        have dropped it, or before a change that another process has made since, as that process may
        have. Afterwards the index loses the status that the run had.
        """
        statuses = {*expected}
        packed = pack([approval_index.packed(request) for request in requests or ()])
        for _ in range(INDEX_ATTEMPTS):
            listed: dict[Status, int] = {}
            for status in statuses:
                listed[status] = yield from self.run_index.add(place, status)
            indexed: dict[str, Any] = {}
            if requests is not None:
                added_ms = yield from self.index.add(place.run_id, place.session_id, requests)
                indexed = {"requests": packed, "indexed_ms": added_ms}
            reply = yield from call_script(
                call(listed=pack(listed), **indexed), self.settings.retry
            )
            if reply[0] != Code.LATE:
                break
            statuses |= {status_of(each) for each in reply[1:]}
        if listed and reply[0] in (Code.DONE, Code.EXPIRED) and is_done(reply):
            for status in was:
                if status not in listed:
                    yield from self.run_index.leave(place, status, min(listed.values()))
        return reply

    def _history_of(self, claim: Claim, history: History | SyncHistory | None) -> HistoryCore:
        if history is None:
            settings = HistorySettings(prefix=self.settings.prefix)
            return HistoryCore(claim.session_id, settings, None, JsonCodec())
        if not isinstance(history, (History, SyncHistory)):
            raise InvalidSetting("history", type(history).__name__, "a History or SyncHistory")
        if history.session_id != claim.session_id:
            raise InvalidSetting("history", history.session_id, f"that of {claim.session_id!r}")
        prefix = history.core.settings.prefix
        if prefix != self.settings.prefix:
            raise InvalidSetting("history", prefix, f"under the prefix {self.settings.prefix!r}")
        where = history.store.location
        if not where.may_be(self._location):
            must = (
                f"on the Redis of the run, {self._location}; addresses are compared as they are "
                "spelled, so give both stores the same connections or the same URL"
            )
            raise InvalidSetting("history", str(where), must)
        return history.core

    def _check_turn(
        self, snapshot: bytes, schema: str, agent: str, requests: Sequence[ApprovalRequest]
    ) -> None:
        check_bytes("the snapshot", snapshot, self.settings.max_snapshot_bytes)
        check_value("schema", schema, Text)
        check_value("agent", agent, Text)
        check_calls("approval_requests", requests, ApprovalRequest)


def _was(operation_id: str | None, *statuses: Status) -> Sequence[Status]:
    """The statuses whose entries a change drops from the index: those that the run may have had.

    A change with an id of the caller's may have been made long ago, and the run may have such a
    status again. Then readers drop what is wrong.
    """
    return statuses if operation_id is None else ()
