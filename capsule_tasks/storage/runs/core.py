"""Every operation on stored runs, as generators without I/O; the facades run them.

A run's record and ledger are authoritative. The index of approvals is derived: it is written first,
so it may hold too much, never too little, and a reader checks each entry against its run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import msgspec

from capsule_tasks.errors import (
    CallChanged,
    CallNotApproved,
    InvalidSetting,
    LeaseLost,
    LeaseMissing,
    RunClaimed,
    RunClaimLost,
    RunConflict,
    RunEnded,
    RunExists,
    RunNotFound,
    RunParked,
    RunTooLarge,
    StorageError,
    UnknownCall,
    UnreadableSchema,
)
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import HistorySettings, RunSettings, Text, check_value
from capsule_tasks.storage.codec import Item, JsonCodec
from capsule_tasks.storage.connections.targets import Location
from capsule_tasks.storage.history.core import HistoryCore
from capsule_tasks.storage.history.history import History, SyncHistory
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import Operation, Reply, call_script, named, refused
from capsule_tasks.storage.runs import approval_index, scripts
from capsule_tasks.storage.runs.approval_index import Entry, Index
from capsule_tasks.storage.runs.locations import RunLocations
from capsule_tasks.storage.runs.types import (
    ENDED,
    ApprovalRequest,
    CallStart,
    CallStarts,
    Cancelled,
    Claim,
    Committed,
    Decisions,
    OptionalText,
    PlannedCall,
    RunRecord,
    Status,
    Turn,
    check_calls,
    check_claim,
    check_names,
    check_outputs,
    pending_approval,
    time_of,
)
from capsule_tasks.storage.scripts import Call, Code

INDEX_ATTEMPTS = 5

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode
_decisions = msgspec.msgpack.Decoder(Decisions).decode


class RunCore:
    """Runs in one Redis; the docstrings hold for both facades.

    Each change takes an `operation_id`, as those of a history do: repeated under it, the change is
    done once.
    """

    def __init__(self, settings: RunSettings, location: Location) -> None:
        """`location` is the Redis to which the operations go."""
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

        Raises RunExists for an id that is taken, and leaves the run with that id as it is.
        """
        self._check_turn(snapshot, schema, agent, approval_requests)
        keys = yield from self.locations.take(run_id, session_id)
        call = partial(
            scripts.run_create.call,
            keys,
            operation_id=named("run_create", operation_id),
            ttl_ms=self._ttl_ms,
            run_id=run_id,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            channel=self.index.channel,
        )
        reply = yield from self._park(run_id, session_id, approval_requests, call)
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
        """Claim a run that is queued, or whose owner's lease has lapsed; exactly one owner gets it.

        `readable` are the schema versions that the caller reads; none stands for all. Raises
        UnreadableSchema for a run of another version, which stays as it is, RunClaimed, RunParked
        or RunEnded; and LeaseMissing or LeaseLost if the claimer has no lease on this Redis: any
        other worker could take the run over at once.
        """
        escaped("incarnation", incarnation)
        check_names("readable", readable)
        prefix, retry = self.settings.prefix, self.settings.retry
        session_id, keys = yield from self.locations.find(run_id)
        left_s = yield from lease_left_s(incarnation, prefix, retry)
        if not left_s:
            raise LeaseMissing(incarnation) if left_s is None else LeaseLost(incarnation)
        # One id for all attempts: a repeat of the call means the attempt that was granted.
        name, steal = named("run_claim", operation_id), 0
        while True:
            call = scripts.run_claim.call(
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
            if not owner or (yield from lease_left_s(owner, prefix, retry)):
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
        """Commit a turn: append items to the session's history and store the snapshot, or neither.

        A turn that is committed twice is stored once. `approval_requests` are all calls that wait
        now. `history` is the session's own: its codec, limits and time to live hold for the items,
        else the defaults do. Raises RunClaimLost for an owner whose claim is over.
        """
        check_claim(claim)
        schema, agent = schema or claim.schema, agent or claim.agent
        self._check_turn(snapshot, schema, agent, approval_requests)
        check_value("turn", turn, Turn)
        check_value("status", status, Status)
        if status == "interrupted" and not approval_requests:
            must = "what an interrupted run waits for"
            raise InvalidSetting("approval_requests", approval_requests, must)
        if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            raise InvalidSetting("items", type(items).__name__, "several items, as in a list")
        core = self._history_of(claim, history)
        records, limits = core.encoded(items), core.settings
        keys = self.locations.keys(claim.session_id, claim.run_id)
        call = partial(
            scripts.run_commit.call,
            keys,
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
            channel=self.index.channel,
            history_ttl_ms=max(1, int(limits.ttl_s * 1000)),
            max_items=limits.max_items,
            max_bytes=limits.max_bytes,
            records=records,
        )
        reply = yield from self._park(claim.run_id, claim.session_id, approval_requests, call)
        if reply[0] == Code.FULL:
            raise core.refusal(reply, "commit")
        if reply[0] != Code.DONE:
            raise refusal(claim.run_id, reply)
        after = replace(
            claim,
            revision=int(reply[1]),
            turn=turn,
            schema=schema,
            agent=agent,
            snapshot=snapshot,
            cancelled_by=text_of(reply[3]),
            updated_us=int(reply[4]),
        )
        return Committed(after, status_of(reply[2]))

    def release(self, claim: Claim, *, operation_id: str | None = None) -> Operation[Status]:
        """Queue a run as it was last committed; RunClaimLost if its owner has lost the claim."""
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        call = scripts.run_release.call(
            keys,
            operation_id=named("run_release", operation_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
        )
        reply = yield from self._done(claim.run_id, call)
        return status_of(reply[1])

    def cancel(
        self, run_id: str, *, by: str = "somebody", operation_id: str | None = None
    ) -> Operation[Cancelled]:
        """Cancel a run: now if it has no owner, else by its owner's next commit.

        Raises RunEnded for a run that has ended; a second cancel changes nothing.
        """
        check_value("by", by, OptionalText)
        session_id, keys = yield from self.locations.find(run_id)
        cancel = scripts.run_cancel.call(
            keys,
            operation_id=named("run_cancel", operation_id),
            ttl_ms=self._ttl_ms,
            by=sendable(by or "") or "somebody",
        )
        reply = yield from self._done(run_id, cancel)
        # The run has ended: entries that stay in the index are dropped by the next reader.
        with contextlib.suppress(StorageError):
            for call, agent, tool in unpack(reply[4]):
                entry = Entry(run_id, call, agent, tool, session_id)
                yield from self.index.drop(entry, idle_ms=0)
        return Cancelled(run_id, status_of(reply[1]), text_of(reply[2]), int(reply[3]))

    def read(self, run_id: str, *, with_snapshot: bool = True) -> Operation[RunRecord]:
        """The run as it is stored now."""
        session_id, keys = yield from self.locations.find(run_id)
        call = scripts.run_read.call(keys, with_snapshot=int(with_snapshot))
        reply = yield from self._done(run_id, call)
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
        """Record that tool calls start, and return which of them may.

        A call that was made before has its output; a call that was started and did not finish is
        `uncertain`, unless it has `retry`. If one call is refused (CallChanged, CallNotApproved),
        none is started.
        """
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        check_calls("calls", calls, PlannedCall)
        packed = pack([[call.call_id, call.fingerprint, call.retry] for call in calls])
        start = scripts.run_start_calls.call(
            keys,
            operation_id=named("run_start_calls", operation_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
            calls=packed,
        )
        reply = yield from self._done(claim.run_id, start)
        pairs = zip(calls, reply[2:], strict=True)
        return CallStarts([call_start_of(call, each) for call, each in pairs], text_of(reply[1]))

    def finish_calls(
        self, claim: Claim, outputs: Mapping[str, bytes], *, operation_id: str | None = None
    ) -> Operation[None]:
        """Record outputs of tool calls.

        The owner that started a call may do so, also after losing the run. So may the run's present
        owner, which has found out what became of a call that an owner before it started.
        """
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        check_outputs(outputs, self.settings.max_output_bytes)
        finish = scripts.run_finish_calls.call(
            keys,
            operation_id=named("run_finish_calls", operation_id),
            token=claim.token,
            parts=list(chain.from_iterable(outputs.items())),
        )
        yield from self._done(claim.run_id, finish)

    def _done(self, run_id: str, call: Call) -> Operation[Reply]:
        """The reply of a script that was done; raises for one that was refused."""
        reply = yield from call_script(call, self.settings.retry)
        if reply[0] != Code.DONE:
            raise refusal(run_id, reply)
        return reply

    def _park(
        self,
        run_id: str,
        session_id: str,
        requests: Sequence[ApprovalRequest],
        call: Callable[..., Call],
    ) -> Operation[Reply]:
        """The reply of a script that lets calls wait, after putting them into the index.

        The script refuses calls that were indexed too long ago: a reader may have dropped the
        entries of calls that its run did not know yet.
        """
        packed = pack([approval_index.packed(request) for request in requests])
        for _ in range(INDEX_ATTEMPTS):
            indexed_ms = yield from self.index.add(run_id, session_id, requests)
            parked = call(requests=packed, indexed_ms=indexed_ms)
            reply = yield from call_script(parked, self.settings.retry)
            if reply[0] != Code.LATE:
                break
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
        if not isinstance(snapshot, bytes):
            raise InvalidSetting("snapshot", type(snapshot).__name__, "bytes")
        if len(snapshot) > self.settings.max_snapshot_bytes:
            raise RunTooLarge("the snapshot", len(snapshot), self.settings.max_snapshot_bytes)
        check_value("schema", schema, Text)
        check_value("agent", agent, Text)
        check_calls("approval_requests", requests, ApprovalRequest)


def refusal(run_id: str, reply: Reply, readable: tuple[str, ...] = ()) -> Exception:
    detail = reply[1] if len(reply) > 1 else ""
    if isinstance(detail, bytes):
        detail = detail.decode()
    if reply[0] == Code.UNREADABLE:
        return UnreadableSchema(detail, readable)
    if reply[0] == Code.WAITING and isinstance(detail, int):
        return RunParked(run_id, detail)
    error = _REFUSALS.get(reply[0])
    return error(run_id, detail) if error else refused(reply, f"run {run_id!r:.100}")


_REFUSALS: dict[int, Callable[[str, Any], Exception]] = {
    Code.MISSING: lambda run, _: RunNotFound(run),
    Code.CONFLICT: RunConflict,
    Code.ENDED: RunEnded,
    Code.HELD: RunClaimed,
    Code.STALE: RunClaimLost,
    Code.WAITING: lambda _, call: CallNotApproved(call),
    Code.CHANGED: lambda _, call: CallChanged(call, "it had another tool or other arguments"),
    Code.FINISHED: lambda _, call: CallChanged(call, "it gave another output"),
    Code.UNKNOWN: lambda _, call: UnknownCall(call, "it was never started", "cannot be finished"),
}
"""The error that each code means, for a run or for one of its calls."""


def claim_of(run_id: str, session_id: str, reply: Reply) -> Claim:
    _, token, revision, turn, cancel, schema, agent, snapshot, decisions, updated = reply
    return Claim(
        run_id=run_id,
        session_id=session_id,
        token=int(token),
        revision=int(revision),
        turn=int(turn),
        schema=schema.decode(),
        agent=agent.decode(),
        snapshot=snapshot,
        decisions=_decisions(decisions),
        cancelled_by=text_of(cancel),
        updated_us=int(updated),
    )


def call_start_of(call: PlannedCall, reply: Reply) -> CallStart:
    match reply[0]:
        case Code.FINISHED:
            return CallStart(call.call_id, "finished", output=reply[1])
        case Code.UNCERTAIN:
            return CallStart(call.call_id, "uncertain", started_at=time_of(int(reply[1])))
    return CallStart(call.call_id, "go")


def status_of(value: bytes) -> Status:
    return cast("Status", value.decode())  # the scripts write no other


def text_of(value: bytes) -> str | None:
    return value.decode() or None
