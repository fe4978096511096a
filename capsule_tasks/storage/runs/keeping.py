"""Operations of any process on runs that it does not own, as generators without I/O.

A run goes on although everybody forgets it: those of lapsed owners are queued again, and those that
nobody is known to have sent a message for are found.
"""

from __future__ import annotations

import contextlib

from capsule_tasks.errors import InvalidSetting, RunClaimed, RunClaimLost, RunNotFound
from capsule_tasks.settings import check_value
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.leases import lapsed_for_s, lease_left_s
from capsule_tasks.storage.operations import Operation, call_script, named
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.approval_index import IDLE_MS
from capsule_tasks.storage.runs.core import RunCore
from capsule_tasks.storage.runs.locations import Place
from capsule_tasks.storage.runs.owners import run_of
from capsule_tasks.storage.runs.run_index import RunEntry
from capsule_tasks.storage.runs.types import (
    ENDED,
    OptionalName,
    OptionalStatus,
    OptionalText,
    PageSize,
    Requeued,
    RequeueSweep,
    RunPage,
    RunRecord,
    Status,
    Turn,
    Unsent,
)

PAGE = 100
SEND_AGAIN_S = 5.0
"""Until a run is listed as unsent again, in case the process that was told of it has died."""
CHECK_AGAIN_S = 30.0
"""Until an index entry is checked again whose run does not have the status yet."""
CHECK_SENT_AGAIN_S = 300.0
"""Until a queued run is checked again whose message was sent: in the meantime it may have been
claimed, parked and queued again, by a process that then died."""
CHECK_ENDED_AGAIN_S = 86_400.0


class KeeperCore(RunCore):
    """Runs in one Redis, with what keeps them going; the docstrings hold for both facades."""

    def requeue(self, run_id: str, owner: str) -> Operation[Requeued | None]:
        """Queue a run whose owner's lease has lapsed, as it was last committed.

        None if the run has another owner by now, or none. Raises RunClaimed while the lease lasts.
        """
        escaped("owner", owner)
        if (yield from lease_left_s(owner, self.settings.prefix, self.settings.retry)):
            raise RunClaimed(run_id, owner)
        record = yield from self.read(run_id, with_snapshot=False)
        if record.owner != owner:
            return None
        place = yield from self.locations.find(run_id)
        try:
            name = named("run_requeue", None)
            released = yield from self._released(place, record.token, name, is_lost=True)
        except RunClaimLost:
            return None
        return Requeued(run_id, *released)

    def requeue_lapsed(self, *, limit: int = PAGE) -> Operation[RequeueSweep]:
        """Queue runs of owners whose leases have lapsed; the result says when to call this again.

        Any number of processes may call it at the same time: one of them is told of each run, and
        sends its message.
        """
        check_value("limit", limit, PageSize)
        owners, next_in_s = yield from self.owners.due(limit)
        requeued: list[Requeued] = []
        for owner in owners:
            left_s = yield from lease_left_s(owner, self.settings.prefix, self.settings.retry)
            if left_s:
                _, next_in_s = yield from self.owners.due(0, owner, in_s=left_s)
                continue
            some, look_again_s = yield from self._requeue_all(owner, limit - len(requeued))
            requeued += some
            if len(requeued) >= limit:
                return RequeueSweep(requeued, 0.0)
            if look_again_s:
                _, next_in_s = yield from self.owners.due(0, owner, in_s=look_again_s)
            else:
                _, next_in_s = yield from self.owners.due(0, forget=[owner])
        return RequeueSweep(requeued, 0.0 if len(owners) == limit else next_in_s)

    def _requeue_all(self, owner: str, limit: int) -> Operation[tuple[list[Requeued], float]]:
        """Queue runs of an owner whose lease has lapsed; fewer than `limit` are all of them.

        A hold of a run that the owner does not have may be that of a claim which is on its way: it
        is kept as long as that may be, and looked at again after so many seconds.
        """
        settings = self.settings
        lapsed_s = yield from lapsed_for_s(owner, settings.prefix, settings.retry)
        keep_s = max(0.0, IDLE_MS / 1000 - lapsed_s)
        requeued: list[Requeued] = []
        kept, done = set[bytes](), list[bytes]()
        while True:
            holds = yield from self.owners.held_by(owner, done, PAGE + len(kept))
            fresh, done = set(holds or ()) - kept, []
            if not fresh:
                return requeued, keep_s if kept else 0.0
            for hold in fresh:
                one: Requeued | None = None
                with contextlib.suppress(RunNotFound):
                    one = yield from self.requeue(run_of(hold), owner)
                if one is None and keep_s:
                    kept.add(hold)
                    continue
                done.append(hold)
                if one is not None:
                    requeued.append(one)
                if len(requeued) >= limit:
                    yield from self.owners.held_by(owner, done, 1)
                    return requeued, 0.0

    def queued_unsent(self, *, limit: int = PAGE) -> Operation[Unsent]:
        """Runs that need a message and for which nobody has noted one as sent.

        A run needs one when it is created, decided on, handed back, requeued, or cancelled without
        an owner. The process that made the change sends it; this finds runs whose process died
        before that, five seconds later. Send `message` of each, then call `note_sent`. A message
        that is sent twice does no harm: one claim is granted.
        """
        check_value("limit", limit, PageSize)
        entries, next_in_s = yield from self.run_index.unsent(limit)
        runs: dict[str, RunRecord] = {}
        for entry in entries:
            record = yield from self._record_of(entry)
            if record is None:
                if not (yield from self.run_index.drop(entry, idle_ms=IDLE_MS)):
                    yield from self.run_index.postpone(entry, CHECK_AGAIN_S)
            elif not record.unsent_us:
                in_s = CHECK_ENDED_AGAIN_S if record.status in ENDED else CHECK_SENT_AGAIN_S
                yield from self.run_index.postpone(entry, in_s)
            else:
                yield from self.run_index.postpone(entry, SEND_AGAIN_S)
                runs[record.run_id] = record
                next_in_s = min(next_in_s or SEND_AGAIN_S, SEND_AGAIN_S)
        return Unsent([*runs.values()], 0.0 if len(entries) == limit else next_in_s)

    def note_sent(self, run_id: str, updated_us: int) -> Operation[None]:
        """Note that a message was sent for a run.

        `updated_us` is that of the change which needed the message, or `unsent_us` of the record. A
        change after it may need another.
        """
        check_value("updated_us", updated_us, Turn)
        place = yield from self.locations.find(run_id)
        call = scripts.run_note_sent.call(place.keys, updated=updated_us)
        yield from call_script(call, self.settings.retry)

    def list_runs(
        self,
        *,
        status: Status | None = None,
        agent: str | None = None,
        session_id: str | None = None,
        limit: int = PAGE,
        cursor: str | None = None,
        newest_first: bool = True,
    ) -> Operation[RunPage]:
        """Runs by the time since when they have their status.

        With a status, an agent or a session only those that have it. The agent is the one with
        which a run was created. With the oldest first, a run that changes its status between two
        pages is not missed.
        """
        check_value("status", status, OptionalStatus)
        check_value("agent", agent, OptionalName)
        if session_id is not None:
            escaped("session id", session_id)
        check_value("limit", limit, PageSize)
        check_value("cursor", cursor, OptionalText)
        check_value("newest_first", newest_first, bool)
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise InvalidSetting("cursor", cursor, "the cursor of the page before")
        after, runs = cursor or "0", list[RunRecord]()
        while len(runs) < limit:
            count = min(PAGE, limit - len(runs))
            page = yield from self.run_index.page(
                agent, status, after, count, session_id=session_id, newest_first=newest_first
            )
            for entry, score in page:
                after = score
                if status not in (None, entry.status) or agent not in (None, entry.agent):
                    continue  # the runs of a session are in one order
                record = yield from self._record_of(entry)
                if record is not None:
                    runs.append(record)
                else:
                    yield from self.run_index.drop(entry, idle_ms=IDLE_MS)
            if len(page) < count:
                return RunPage(runs, None)
        return RunPage(runs, after)

    def delete(self, run_id: str) -> Operation[None]:
        """Erase a run, whatever its status, with all that is stored of it; not its history.

        Its owner, if it has one, learns of it from its next write, which raises RunClaimLost. Until
        `RunSettings.ended_ttl_s` has passed no run is created under this id: a message that is
        delivered late does not bring it back. Raises RunNotFound if there is no such run.
        """
        place = yield from self.locations.find(run_id)
        yield from self._delete(place)

    def delete_all(self, session_id: str) -> Operation[int]:
        """Erase all runs of a session, as `delete` does; the number of them."""
        escaped("session id", session_id)
        deleted = set[str]()
        while page := (
            yield from self.run_index.page(None, None, "0", PAGE, session_id=session_id)
        ):
            for entry, _ in page:
                keys = self.locations.keys(session_id, entry.run)
                yield from self._delete(Place(entry.run, session_id, entry.agent, keys))
                yield from self.run_index.drop(entry)
                deleted.add(entry.run)
        return len(deleted)

    def _delete(self, place: Place) -> Operation[None]:
        """Erase a run; its place comes last, since it says what there is to erase."""
        call = scripts.run_delete.call(place.keys, ttl_ms=self._ended_ms)
        reply = yield from call_script(call, self.settings.retry)
        yield from self.drop_approvals(place, reply[1])
        yield from self.run_index.leave_all(place)
        yield from self.locations.erase(place.run_id)

    def drop_expired(self, *, limit: int = PAGE) -> Operation[int]:
        """Drop ended runs that have expired from the index; the number of them.

        It looks at the oldest of each status, so calling it now and then keeps the index small.
        """
        check_value("limit", limit, PageSize)
        dropped = 0
        for status in sorted(ENDED):
            page = yield from self.run_index.page(None, status, "0", limit)
            for entry, _ in page:
                if (yield from self._record_of(entry)) is not None:
                    break
                dropped += yield from self.run_index.drop(entry, idle_ms=IDLE_MS)
        return dropped

    def reindex(self, run_id: str) -> Operation[Status]:
        """Put a run into the index of runs again; its status."""
        place = yield from self.locations.find(run_id)
        record = yield from self.read(run_id, with_snapshot=False)
        yield from self.run_index.add(place, record.status)
        return record.status

    def _record_of(self, entry: RunEntry) -> Operation[RunRecord | None]:
        """The run of an index entry, if it has the status."""
        with contextlib.suppress(RunNotFound):
            record = yield from self.read(entry.run, with_snapshot=False)
            if record.status == entry.status:
                return record
        return None
