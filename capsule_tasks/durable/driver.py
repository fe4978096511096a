"""Drives one run from its claim to its end, or to the next decision of a person."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from capsule_tasks.durable.engine import Engine, RunFailure, TurnEnd, TurnWork
from capsule_tasks.durable.inputs import INPUT_SCHEMA
from capsule_tasks.durable.ledger import TurnLedger
from capsule_tasks.errors import (
    CallerError,
    CapsuleError,
    InvalidRunState,
    RunClaimLost,
    StorageError,
    UnknownAgent,
    UnreadableSchema,
)
from capsule_tasks.protocol.messages import RunEvent
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import ApprovalRequest, Claim, Committed, History, RunStore, RunUsage
from capsule_tasks.storage.codec import Item
from capsule_tasks.storage.runs.types import Status

_log = logging.getLogger(__name__)

T = TypeVar("T")

NOT_READABLE = (InvalidRunState, UnreadableSchema, UnknownAgent)
"""An engine that raises one of these has done nothing: another worker may read the snapshot."""

LOSS_LIMIT = 5
_PAUSE_S = 0.5
"""Between two calls of a store that does not answer, which has tried for longer by itself."""


@dataclass(frozen=True)
class RunStop:
    """Why a driver stopped: the run has ended, or waits for a person."""

    run_id: str
    status: Status
    result: bytes = b""
    """The output of a completed run, as JSON."""
    failure: RunFailure | None = None
    cancelled_by: str | None = None


class RunDriver:
    """Drives runs under the lease of one incarnation, which its caller keeps.

    Any number of runs may be driven at the same time, each by one `drive`.
    """

    def __init__(
        self,
        store: RunStore,
        incarnation: str,
        *,
        history_of: Callable[[str], History] | None = None,
        turn_timeout_s: float | None = None,
        hand_back_s: float = 15.0,
        loss_limit: int = LOSS_LIMIT,
    ) -> None:
        """`history_of` gives the history of a session, if it has its own codec or limits.

        `hand_back_s` is how long a store that does not answer is asked again to take a claimed run
        back, so that no run stays with a driver that gave up; after the time of the lease it does
        not matter any more. A run that has lost `loss_limit` owners without progress between them
        fails as `lost`: what it does probably ends its process.
        """
        self._store = store
        self._incarnation = incarnation
        self._history_of = history_of or self._plain_history
        self._turn_timeout_s = turn_timeout_s
        self._hand_back_s = hand_back_s
        self._loss_limit = loss_limit

    async def drive(
        self,
        run_id: str,
        engine: Engine,
        *,
        message: bytes = b"",
        publish: Callable[[RunEvent], None] | None = None,
    ) -> RunStop:
        """Claim a run and drive it until it ends or waits for a person.

        A run that this worker cannot read, or that is cut by an error of the store or a cancel of
        this coroutine, is queued again as it was last committed, and the error is raised.
        RunClaimLost says that another worker has the run. The errors of `RunStore.claim` pass
        through.
        """
        while True:
            claim = await self._claimed(run_id, engine, message)
            drive = _Drive(self._store, engine, claim, self._history_of(claim.session_id), publish)
            drive.tell_claimed()
            stop = await self._worked(drive, drive.to_stop(self._turn_timeout_s, self._loss_limit))
            # A decision that came before the run was parked has queued it: nobody else resumes it.
            if stop.status != "queued":
                return stop

    async def fail(self, run_id: str, engine: Engine, failure: RunFailure) -> RunStop:
        """Claim a run and end it as failed. Raises what `drive` raises."""
        claim = await self._claimed(run_id, engine, b"")
        drive = _Drive(self._store, engine, claim, self._history_of(claim.session_id), None)
        return await self._worked(drive, drive.to_failure(failure))

    async def _claimed(self, run_id: str, engine: Engine, message: bytes) -> Claim:
        """Claim a run. A claim whose answer is lost may have been granted: it is repeated."""
        claim = partial(
            self._store.claim,
            run_id,
            self._incarnation,
            readable=engine.readable,
            message=message,
            operation_id=secrets.token_hex(8),
        )
        claiming = asyncio.ensure_future(self._answered(claim))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # Granted to a lease that lives, the run would have an owner that does not drive it.
            with suppress(CapsuleError):
                await self._hand_back(await claiming)
            raise

    async def _answered(self, write: Callable[[], Awaitable[T]], *, is_due: bool = False) -> T:
        """The answer to a write, which is repeated for a limited time once it may have been made,
        or if it has to be made.
        """
        until = asyncio.get_running_loop().time() + self._hand_back_s
        while True:
            try:
                return await write()
            except StorageError as error:
                is_due = is_due or error.may_have_written
                if not is_due or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _worked(self, drive: _Drive, work: Coroutine[Any, Any, RunStop]) -> RunStop:
        """Drive a claimed run; it is handed back, whatever ends this before the run stops."""
        try:
            return await work
        except RunClaimLost:
            raise
        except BaseException:
            await self._hand_back(drive.claim, drive.ledger)
            raise

    async def _hand_back(self, claim: Claim, ledger: TurnLedger | None = None) -> None:
        """Queue a run again as it was last committed; a cancelled one ends here."""
        release = partial(self._store.release, claim, operation_id=secrets.token_hex(8))

        async def handed_back() -> None:
            if ledger is not None:
                await ledger.save_held()
            await self._answered(release, is_due=True)

        try:
            await asyncio.shield(handed_back())
        except RunClaimLost:
            return
        except StorageError as error:
            _log.warning(
                "run %s could not be handed back (%s); it waits until the lease of %s lapses",
                claim.run_id,
                error,
                self._incarnation,
            )

    def _plain_history(self, session_id: str) -> History:
        settings = HistorySettings(prefix=self._store.core.settings.prefix)
        return History(session_id, self._store.store, settings=settings)


class _Drive:
    """The turns of one claim."""

    def __init__(
        self,
        store: RunStore,
        engine: Engine,
        claim: Claim,
        history: History,
        publish: Callable[[RunEvent], None] | None,
    ) -> None:
        self._store = store
        self._engine = engine
        self.claim = claim
        self._history = history
        self._publish = publish
        self._journal = dict(claim.journal)
        self.ledger: TurnLedger | None = None
        """That of the turn that is being made."""
        self._usage = claim.usage
        """The usage of all turns, with that of the turn that was just made."""

    def tell_claimed(self) -> None:
        kind = "run_claimed" if self.claim.schema == INPUT_SCHEMA else "run_resumed"
        self._tell(kind, self.claim.agent, {"turn": self.claim.turn})

    async def to_stop(self, turn_timeout_s: float | None, loss_limit: int) -> RunStop:
        if self.claim.losses >= loss_limit and not self.claim.cancelled_by:
            return await self._lost(loss_limit)
        live: Any = None
        while True:
            if self.claim.cancelled_by:
                return await self._cancelled()
            self.ledger = ledger = TurnLedger(
                self._store, self.claim, self._journal, self._engine.encoded
            )
            started = asyncio.get_running_loop().time()
            end = await self._turn(ledger, live, turn_timeout_s)
            await (ledger.save_held() if ledger.to_settle else ledger.drained())
            took_s = asyncio.get_running_loop().time() - started
            self._usage = _usage_after(self._usage, end.usage, took_s)
            self._report_unused(ledger, end)
            if ledger.error is not None:
                raise ledger.error
            if ledger.cancelled_by:
                return await self._cancelled()
            if ledger.to_settle and not ledger.failure:
                return await self._park_for(tuple(ledger.to_settle.values()))
            if ledger.failure:
                # A turn that the engine made something else of has no items that can be kept.
                end = self._failed(ledger.failure, end.items if end.failure else [])
            try:
                done = await self._commit(end)
            except (CallerError, TypeError, ValueError) as error:
                # The turn cannot be stored, as it is too large, and never will be.
                end = self._failed(_failure_of(error))
                done = await self._commit(end)
            if done.status != "running":
                return self._stop(done.status, end)
            live = end.live

    async def _turn(self, ledger: TurnLedger, live: Any, timeout_s: float | None) -> TurnEnd:
        work = TurnWork(self.claim, ledger, self._history, self._publish, live)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._engine.turn(work)
        except TimeoutError as error:
            if not limit.expired():
                return self._failed(_failure_of(error))
            about = f"a turn took longer than {timeout_s:g} s"
            return self._failed(RunFailure("timeout", "TimeoutError", about), work.cut_items)
        except NOT_READABLE:
            raise
        except StorageError as error:  # the engine reads the history
            ledger.error = ledger.error or error
            return self._failed(_failure_of(error))
        except Exception as error:  # noqa: BLE001  a run that raises must not be tried for ever
            if not ledger.is_stopped:
                _log.warning("run %s fails: its engine raised", self.claim.run_id, exc_info=error)
            return self._failed(_failure_of(error))

    async def _commit(self, end: TurnEnd) -> Committed:
        claim = self.claim
        done = await self._store.commit(
            claim,
            end.snapshot,
            turn=claim.turn + 1,
            status=end.status,
            schema=end.schema,
            agent=end.agent,
            approval_requests=end.approval_requests,
            items=end.items,
            history=self._history,
            result=_encoded(end.output) if end.status == "completed" else b"",
            error=msgspec.json.encode(end.failure) if end.failure else b"",
            usage=self._usage,
        )
        self.claim = done.claim
        self._journal = {}
        about = {"turn": claim.turn + 1, "status": done.status, "usage": end.usage}
        self._tell("turn", end.agent, about)
        if done.status == "interrupted":
            self._tell_parked(end.approval_requests)
        return done

    async def _park_for(self, settle: tuple[ApprovalRequest, ...]) -> RunStop:
        """Park the run within its turn, whose journal stays, until people have settled calls."""
        claim, decided = self.claim, self.claim.decisions
        exact = {each.call for each in decided.exact}
        standing = {(each.tool, each.agent) for each in decided.standing}
        undecided = [
            each
            for each in self._engine.waiting(claim)
            if each.call_id not in exact and (each.tool, each.agent) not in standing
        ]
        done = await self._store.commit(
            claim,
            claim.snapshot,
            turn=claim.turn,
            status="interrupted",
            approval_requests=(*undecided, *settle),
            usage=self._usage,
        )
        self.claim = done.claim
        if done.status == "interrupted":
            self._tell_parked((*undecided, *settle))
        return RunStop(claim.run_id, done.status, cancelled_by=done.claim.cancelled_by)

    async def _cancelled(self) -> RunStop:
        """End the run as it was last committed: items of a turn that was cut are not stored."""
        claim = self.claim
        done = await self._store.commit(
            claim, claim.snapshot, turn=claim.turn, status="cancelled", usage=self._usage
        )
        self.claim = done.claim
        return RunStop(claim.run_id, done.status, cancelled_by=done.claim.cancelled_by)

    async def to_failure(self, failure: RunFailure) -> RunStop:
        """End the run as it was last committed."""
        end = self._failed(failure)
        done = await self._commit(end)
        return self._stop(done.status, end)

    async def _lost(self, loss_limit: int) -> RunStop:
        """Fail the run, as each process that makes this turn is lost."""
        claim = self.claim
        about = (
            f"{claim.losses} processes were lost, one after the other, in turn {claim.turn + 1}; "
            f"the limit is {loss_limit}"
        )
        _log.error("run %s fails: %s", claim.run_id, about)
        return await self.to_failure(RunFailure("lost", "TooManyLosses", about))

    def _failed(self, failure: RunFailure, items: Sequence[Item] = ()) -> TurnEnd:
        claim = self.claim
        about: dict[str, Any] = {"items": list(items), "failure": failure}
        return TurnEnd(claim.snapshot, claim.schema, claim.agent, "failed", **about)

    def _stop(self, status: Status, end: TurnEnd) -> RunStop:
        result = _encoded(end.output) if status == "completed" else b""
        by = self.claim.cancelled_by
        return RunStop(self.claim.run_id, status, result, end.failure, by)

    def _report_unused(self, ledger: TurnLedger, end: TurnEnd) -> None:
        if ledger.is_stopped or not ledger.unused_replies:
            return
        keys = ledger.unused_replies
        _log.warning(
            "run %s: discarding %d journaled model replies: the model is now asked something else",
            self.claim.run_id,
            len(keys),
        )
        self._tell("replies_discarded", end.agent, {"keys": keys})

    def _tell_parked(self, requests: tuple[ApprovalRequest, ...]) -> None:
        calls = [
            {
                "call_id": each.call_id,
                "tool": each.tool,
                "agent": each.agent,
                "arguments": each.arguments,
            }
            for each in requests
        ]
        self._tell("run_parked", self.claim.agent, {"calls": calls})

    def _tell(self, kind: str, agent: str, data: Any) -> None:
        if self._publish is not None:
            self._publish(RunEvent.of(kind, agent, data))


def _usage_after(before: RunUsage, told: Mapping[str, int], took_s: float) -> RunUsage:
    """The usage of a run after a turn. An engine tells that of all turns, or nothing."""
    return RunUsage(
        requests=told.get("requests", before.requests),
        input_tokens=told.get("input_tokens", before.input_tokens),
        output_tokens=told.get("output_tokens", before.output_tokens),
        time_ms=before.time_ms + round(took_s * 1000),
    )


def _encoded(output: Any) -> bytes:
    return msgspec.json.encode(output)


def _failure_of(error: BaseException) -> RunFailure:
    return RunFailure("error", type(error).__name__, str(error))
