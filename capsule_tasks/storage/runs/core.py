"""Every operation on stored runs, once for all faces, as generators without I/O.

A run's record and ledger are the truth; the index of what waits is derived. It is written first and
may hold too much, never too little: whoever lists checks each entry against its run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from capsule_tasks.errors import (
    HistoryFull,
    InvalidSetting,
    LeaseLost,
    LeaseMissing,
    RunClaimed,
    RunExists,
    RunTooLarge,
    StorageError,
)
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage.codec import Item, JsonCodec
from capsule_tasks.storage.connections.targets import Location
from capsule_tasks.storage.history.core import HistoryCore
from capsule_tasks.storage.history.history import History, SyncHistory
from capsule_tasks.storage.keys import RunKeys, escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import Operation, call_script, named, refused
from capsule_tasks.storage.runs import approval_index
from capsule_tasks.storage.runs.approval_index import Entry, Index
from capsule_tasks.storage.runs.checks import (
    LARGEST,
    check_calls,
    check_claim,
    check_count,
    check_items,
    check_names,
    check_outputs,
    check_requests,
    check_string,
    check_text,
)
from capsule_tasks.storage.runs.locations import RunLocations
from capsule_tasks.storage.runs.replies import (
    call_start_of,
    claim_of,
    refusal,
    status_of,
    text_of,
)
from capsule_tasks.storage.runs.types import (
    ApprovalRequest,
    CallStarts,
    Cancelled,
    Claim,
    Committed,
    PlannedCall,
    RunRecord,
    Status,
    pending_approval,
    time_of,
)
from capsule_tasks.storage.scripts import Argument, Code, script

INDEX_ATTEMPTS = 5

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode


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
    requests: bytes,
    indexed_ms: int,
    channel: str,
) -> None: ...


@script("runs/claim")
def run_claim(
    keys: RunKeys, *, operation_id: str, ttl_ms: int, incarnation: str, steal: int, readable: bytes
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
    requests: bytes,
    indexed_ms: int,
    channel: str,
    history_ttl_ms: int,
    max_items: int,
    max_bytes: int,
    records: Sequence[bytes],
) -> None: ...


@script("runs/cancel")
def run_cancel(keys: RunKeys, *, operation_id: str, ttl_ms: int, by: str) -> None: ...


@script("runs/release")
def run_release(keys: RunKeys, *, operation_id: str, ttl_ms: int, token: int) -> None: ...


@script("runs/read")
def run_read(keys: RunKeys, *, with_snapshot: int) -> None: ...


@script("runs/start_calls")
def run_start_calls(
    keys: RunKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    token: int,
    calls: bytes,
) -> None: ...


@script("runs/finish_calls")
def run_finish_calls(
    keys: RunKeys,
    *,
    operation_id: str,
    token: int,
    parts: Sequence[Argument],
) -> None: ...


class RunCore:
    """Runs of one Redis. What they promise is said here for every face.

    Each change takes an `operation`, as a history's do: repeated under one id it is done once.
    """

    def __init__(self, settings: RunSettings, location: Location) -> None:
        """`location` is that of the Redis to which the operations go."""
        self.settings = settings
        self._location = location
        self.index = Index(settings)
        self.locations = RunLocations(settings)
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._ended_ms = int(settings.ended_ttl_s * 1000)

    def create(
        self,
        run_id: str,
        session_id: str,
        snapshot: bytes,
        *,
        schema: str,
        agent: str,
        approval_requests: Sequence[ApprovalRequest] = (),
        operation_id: str | None = None,
    ) -> Operation[Status]:
        """Store a new run: queued, or parked if it comes with calls that wait.

        Raises RunExists for an id that is taken, without touching what is there.
        """
        self._check_snapshot(snapshot)
        check_text("schema", schema)
        check_text("agent", agent)
        check_requests(approval_requests)
        keys = yield from self.locations.take(run_id, session_id)
        name = named("run_create", operation_id)
        for _ in range(INDEX_ATTEMPTS):
            indexed_ms = yield from self.index.add(run_id, session_id, approval_requests)
            call = run_create.call(
                keys,
                operation_id=name,
                ttl_ms=self._ttl_ms,
                run_id=run_id,
                schema=schema,
                agent=agent,
                snapshot=snapshot,
                requests=_packed_requests(approval_requests),
                indexed_ms=indexed_ms,
                channel=self.index.channel,
            )
            reply = yield from call_script(call, self.settings.retry)
            if reply[0] != Code.LATE:
                break
        if reply[0] == Code.CONFLICT:
            raise RunExists(run_id, reply[1].decode())
        if reply[0] != Code.DONE:
            raise refused(reply, "create")
        return status_of(reply[2])

    def claim(
        self,
        run_id: str,
        incarnation: str,
        *,
        readable: Sequence[str] = (),
        operation_id: str | None = None,
    ) -> Operation[Claim]:
        """Take a run that is queued, or whose owner's lease has lapsed; exactly one owner gets it.

        `readable` are the schema versions that the caller reads (none: all). A run of another one
        is left as it is, and UnreadableSchema says what is readable. Raises RunClaimed, RunParked,
        RunEnded; and LeaseMissing or LeaseLost for a claimer without a lease on this Redis, as any
        other worker could take the run from it at once.
        """
        escaped("incarnation", incarnation)
        check_names("readable", readable)
        session_id, keys = yield from self.locations.find(run_id)
        left_s = yield from self._lease_left_s(incarnation)
        if not left_s:
            raise LeaseMissing(incarnation) if left_s is None else LeaseLost(incarnation)
        # One name for all attempts: whoever repeats the call means the one that was granted.
        name, steal = named("run_claim", operation_id), 0
        while True:
            call = run_claim.call(
                keys,
                operation_id=name,
                ttl_ms=self._ttl_ms,
                incarnation=incarnation,
                steal=steal,
                readable=pack(list(readable)),
            )
            reply = yield from call_script(call, self.settings.retry)
            if reply[0] == Code.DONE:
                return claim_of(run_id, session_id, reply)
            if reply[0] != Code.HELD or steal == int(reply[2]):
                raise refusal(run_id, reply, tuple(readable))
            owner, token = reply[1].decode(), int(reply[2])
            if not owner or (yield from self._lease_left_s(owner)):
                raise RunClaimed(run_id, owner)
            steal = token

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
        operation_id: str | None = None,
    ) -> Operation[Committed]:
        """Store a turn: these items at the end of the session's history and this snapshot.

        Both or neither, and the same turn twice is once. `approval_requests` are all calls that
        wait now. `history` is the session's own: its codec, limits and time to live hold for the
        items, else the defaults do. Raises RunClaimLost for an owner whose claim is over.
        """
        check_claim(claim)
        self._check_commit(snapshot, turn, status, approval_requests)
        check_items(items)
        core = self._history_of(claim, history)
        records, limits = core.encoded(items), core.settings
        schema, agent = schema or claim.schema, agent or claim.agent
        check_text("schema", schema)
        check_text("agent", agent)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        name = named("run_commit", operation_id)
        is_end = status in ("completed", "failed", "cancelled")
        ttl_ms = self._ended_ms if is_end else self._ttl_ms
        for _ in range(INDEX_ATTEMPTS):
            indexed_ms = yield from self.index.add(
                claim.run_id, claim.session_id, approval_requests
            )
            call = run_commit.call(
                keys,
                operation_id=name,
                ttl_ms=ttl_ms,
                run_id=claim.run_id,
                token=claim.token,
                revision=claim.revision,
                turn=turn,
                status=status,
                schema=schema,
                agent=agent,
                snapshot=snapshot,
                requests=_packed_requests(approval_requests),
                indexed_ms=indexed_ms,
                channel=self.index.channel,
                history_ttl_ms=max(1, int(limits.ttl_s * 1000)),
                max_items=limits.max_items,
                max_bytes=limits.max_bytes,
                records=records,
            )
            reply = yield from call_script(call, self.settings.retry)
            if reply[0] != Code.LATE:
                break
        if reply[0] == Code.FULL:
            raise HistoryFull(
                claim.session_id,
                int(reply[1]),
                int(reply[2]),
                max_items=limits.max_items,
                max_bytes=limits.max_bytes,
            )
        if reply[0] != Code.DONE:
            raise refusal(claim.run_id, reply)
        after = Claim(
            run_id=claim.run_id,
            session_id=claim.session_id,
            token=claim.token,
            revision=int(reply[1]),
            turn=turn,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            decisions=claim.decisions,
            cancelled_by=text_of(reply[3]),
            updated_us=int(reply[4]),
        )
        return Committed(after, status_of(reply[2]))

    def release(self, claim: Claim, *, operation_id: str | None = None) -> Operation[Status]:
        """Queue a run as it was last committed; RunClaimLost if its owner has lost the claim."""
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        call = run_release.call(
            keys,
            operation_id=named("run_release", operation_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
        )
        reply = yield from call_script(call, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(claim.run_id, reply)
        return status_of(reply[1])

    def cancel(
        self, run_id: str, *, by: str = "somebody", operation_id: str | None = None
    ) -> Operation[Cancelled]:
        """End a run: at once if nobody holds it, else by its owner's next commit.

        Cancelling twice is cancelling once; raises RunEnded for a run that is over.
        """
        check_string("by", by)
        session_id, keys = yield from self.locations.find(run_id)
        cancel = run_cancel.call(
            keys,
            operation_id=named("run_cancel", operation_id),
            ttl_ms=self._ttl_ms,
            by=sendable(by or "") or "somebody",
        )
        reply = yield from call_script(cancel, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        # The run is over; what stays in the index is found out by the next who lists.
        with contextlib.suppress(StorageError):
            for call, agent, tool in unpack(reply[4]):
                entry = Entry(run_id, call, agent, tool, session_id)
                yield from self.index.drop(entry, idle_ms=0)
        return Cancelled(run_id, status_of(reply[1]), text_of(reply[2]), int(reply[3]))

    def read(self, run_id: str, *, with_snapshot: bool = True) -> Operation[RunRecord]:
        """The run as it is stored now."""
        session_id, keys = yield from self.locations.find(run_id)
        call = run_read.call(keys, with_snapshot=int(with_snapshot))
        reply = yield from call_script(call, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        return RunRecord(
            run_id=run_id,
            session_id=session_id,
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
            pending=tuple(pending_approval(run_id, session_id, each) for each in unpack(reply[12])),
        )

    def start_calls(
        self, claim: Claim, calls: Sequence[PlannedCall], *, operation_id: str | None = None
    ) -> Operation[CallStarts]:
        """Say that tool calls are about to be made, and hear which of them may be.

        A call that was made has its output; one that was started and not finished is `uncertain`
        unless it says `retry`. If one is refused (CallChanged, CallNotApproved), none is started.
        """
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        check_calls(calls)
        packed = pack([[call.call_id, call.fingerprint, call.retry] for call in calls])
        start = run_start_calls.call(
            keys,
            operation_id=named("run_start_calls", operation_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
            calls=packed,
        )
        reply = yield from call_script(start, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(claim.run_id, reply)
        pairs = zip(calls, reply[2:], strict=True)
        return CallStarts([call_start_of(call, each) for call, each in pairs], text_of(reply[1]))

    def finish_calls(
        self, claim: Claim, outputs: Mapping[str, bytes], *, operation_id: str | None = None
    ) -> Operation[None]:
        """Say what tool calls gave.

        Whoever started a call may, also after losing the run; and the run's present owner, who has
        found out what became of a call that it inherited.
        """
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        check_outputs(outputs)
        parts: list[Argument] = []
        for call_id, output in outputs.items():
            if len(output) > self.settings.max_output_bytes:
                what = f"the output of call {call_id!r:.100}"
                raise RunTooLarge(what, len(output), self.settings.max_output_bytes)
            parts += [call_id, output]
        finish = run_finish_calls.call(
            keys,
            operation_id=named("run_finish_calls", operation_id),
            token=claim.token,
            parts=parts,
        )
        reply = yield from call_script(finish, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(claim.run_id, reply)

    def _lease_left_s(self, incarnation: str) -> Operation[float | None]:
        return lease_left_s(incarnation, self.settings.prefix, self.settings.retry)

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

    def _check_snapshot(self, snapshot: bytes) -> None:
        if not isinstance(snapshot, bytes):
            raise InvalidSetting("snapshot", type(snapshot).__name__, "bytes")
        if len(snapshot) > self.settings.max_snapshot_bytes:
            raise RunTooLarge("the snapshot", len(snapshot), self.settings.max_snapshot_bytes)

    def _check_commit(
        self,
        snapshot: bytes,
        turn: int,
        status: Status,
        approval_requests: Sequence[ApprovalRequest],
    ) -> None:
        self._check_snapshot(snapshot)
        if status not in get_args(Status):
            raise InvalidSetting("status", status, f"one of {', '.join(get_args(Status))}")
        check_count("turn", turn, 0, LARGEST)
        check_requests(approval_requests)
        if status == "interrupted" and not approval_requests:
            raise InvalidSetting(
                "approval_requests", approval_requests, "what an interrupted run waits for"
            )


def _packed_requests(requests: Sequence[ApprovalRequest]) -> bytes:
    return pack([approval_index.packed(request) for request in requests])
