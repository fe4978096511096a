"""The journal and the ledger of one turn, over the store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from capsule_tasks.durable.batches import Batches
from capsule_tasks.durable.engine import FailureKind, ModelCall, RunFailure, ToolCall, ToolOutcome
from capsule_tasks.durable.settling import request_to_settle, settlement
from capsule_tasks.errors import CallerError, CapsuleError, RunTooLarge, StorageError
from capsule_tasks.storage import ApprovalRequest, Claim, PlannedCall
from capsule_tasks.storage.runs.types import CallStart

if TYPE_CHECKING:
    from capsule_tasks.storage import RunStore


_NO_CALL = ""
"""In place of the id of a call, for replies that are journaled by themselves."""


class TurnStopped(Exception):
    """The turn must not go on; the ledger that raised it knows why."""


@dataclass
class JournaledCall:
    """One model call: its reply from the journal, or a place for its reply."""

    ledger: TurnLedger
    question: str
    reply: bytes | None

    async def record(self, reply: bytes) -> None:
        await self.ledger.record(self.question, reply)

    def hold(self, reply: bytes) -> None:
        self.ledger.hold(self.question, reply)


class TurnLedger:
    """The model calls and tool calls of one turn: made now, or before the turn was cut.

    The first reason to stop stays: everything that the turn asks for later is refused as well.
    What happens at the same time goes to the store together: starts of calls and replies of models,
    and outputs of calls.
    """

    def __init__(
        self,
        store: RunStore,
        claim: Claim,
        journal: dict[str, bytes],
        encode: Callable[[Any], bytes],
    ) -> None:
        """`encode` makes the bytes of an output that a person has given."""
        self._store = store
        self._claim = claim
        self._journal = journal
        self._encode = encode
        self._answered = Counter[str]()
        """The replies that each question has got in this turn, from the journal or from the model.
        An attempt that failed has no number: it left no reply, and is not made again."""
        self._unused = set(journal)
        self._held: dict[str, bytes] = {}
        """Replies that are not in the journal yet, in their order."""
        self._starts: Batches[PlannedCall | None, CallStart | None] = Batches(self._start)
        self._finishes: Batches[bytes, CapsuleError | None] = Batches(
            self._finish, len, outlives_callers=True
        )
        self._repeated: set[str] = set()
        """Calls that are made again."""
        self.cancelled_by: str | None = None
        self.error: Exception | None = None
        """An error of the store, or a lost claim: nothing can be said about the turn."""
        self.failure: RunFailure | None = None
        self.to_settle: dict[str, ApprovalRequest] = {}
        """Calls of which a person has to find out whether they were made."""

    @property
    def is_stopped(self) -> bool:
        return self._is_refused or bool(self.to_settle)

    @property
    def _is_refused(self) -> bool:
        """Stopped for another reason than calls that have to be settled."""
        return bool(self.cancelled_by or self.error or self.failure)

    @property
    def unused_replies(self) -> list[str]:
        """Keys of journaled replies that no model call of the turn asked for."""
        return sorted(self._unused)

    def model_call(self, path: str, digest: str) -> ModelCall:
        self._check()
        question = f"{path}:{digest}"
        key = self._key_of_next_reply(question)
        reply = self._journal.get(key)
        if reply is not None:
            self._answered[question] += 1
            self._unused.discard(key)
        return JournaledCall(self, question, reply)

    def hold(self, question: str, reply: bytes) -> None:
        key = self._key_of_next_reply(question)
        self._answered[question] += 1
        self._held[key] = reply
        self._check()

    async def record(self, question: str, reply: bytes) -> None:
        self.hold(question, reply)
        await self.journal_held()

    async def save_held(self) -> None:
        """Finish what is being written, and journal the replies that are held.

        For a turn that is left before its commit, and that is made again.
        """
        await self.drained()
        if not self._is_refused:
            with suppress(TurnStopped):
                await self.journal_held()

    async def drained(self) -> None:
        """Wait for what callers that were cancelled have left on its way to the store."""
        await self._starts.drained()
        await self._finishes.drained()

    async def journal_held(self) -> None:
        if self._held:
            await self._starts.ask(_NO_CALL, None)
            self._check()

    async def _start(
        self, asked: Mapping[str, PlannedCall | None]
    ) -> Mapping[str, CallStart | None]:
        """Journal the replies that are held, and start these calls."""
        if self._is_refused:
            raise TurnStopped("the turn was stopped before")
        calls, replies = [each for each in asked.values() if each is not None], dict(self._held)
        try:
            started = await self._write(calls, replies)
        except CapsuleError as error:
            is_about_replies = not calls or isinstance(error, RunTooLarge)
            raise self._stopped(error, "model" if is_about_replies else "tool") from error
        for key in replies:
            del self._held[key]
        return {**dict.fromkeys(asked), **{each.call_id: each for each in started}}

    async def _write(
        self, calls: Sequence[PlannedCall], replies: Mapping[str, bytes]
    ) -> Sequence[CallStart]:
        if calls or len(replies) > 1:
            starts = await self._store.start_calls(self._claim, calls, replies=replies)
            self.cancelled_by = self.cancelled_by or starts.cancelled_by
            return starts.calls
        for key, reply in replies.items():
            cancelled_by = await self._store.journal(self._claim, key, reply)
            self.cancelled_by = self.cancelled_by or cancelled_by
        return ()

    async def _finish(self, outputs: Mapping[str, bytes]) -> Mapping[str, CapsuleError | None]:
        """Record outputs of calls. If one of them is refused, each is recorded by itself."""
        try:
            await self._store.finish_calls(self._claim, outputs)
        except StorageError as error:
            return dict.fromkeys(outputs, error)
        except CapsuleError as error:
            if len(outputs) == 1:
                return dict.fromkeys(outputs, error)
            answers: dict[str, CapsuleError | None] = {}
            for key, output in outputs.items():
                answers.update(await self._finish({key: output}))
            return answers
        return dict.fromkeys(outputs)

    async def tool_call(self, call: ToolCall, make: Callable[[], Awaitable[bytes]]) -> ToolOutcome:
        self._check()
        planned = PlannedCall(call.key, call.fingerprint, retry=call.on_uncertain == "retry")
        start = await self._starts.ask(call.key, planned)
        assert start is not None
        if start.state == "finished":
            return ToolOutcome(start.output or b"")
        # Calls of one turn run side by side. One that has to be settled ends the turn, but not the
        # others: a call that is recorded as started and is not made would have to be settled, too,
        # and of those that are uncertain people are asked all at once.
        if self._is_refused:
            self._check()
        if start.state == "go":
            if start.started_at is not None:
                self._repeated.add(call.key)
            return await self._made(call, make)
        if call.on_uncertain == "park" and start.started_at is not None:
            return await self._settled(call, start.started_at, make)
        return self._uncertain(call)

    def is_repeat(self, key: str) -> bool:
        return key in self._repeated

    async def _settled(
        self, call: ToolCall, started_at: datetime, make: Callable[[], Awaitable[bytes]]
    ) -> ToolOutcome:
        """Do with an uncertain call what people have decided about it, or have them asked."""
        request = request_to_settle(call, round(started_at.timestamp() * 1000))
        found = settlement(request, self._claim.decisions)
        if found is None:
            self.to_settle[call.key] = request
            raise TurnStopped(f"call {call.key!r} of {call.tool} has to be settled")
        if found.verdict == "again":
            # Not before the calls beside it are known: if one of them has to be settled, the turn
            # ends, and this call would be cut short once it was started.
            await asyncio.sleep(0)
            self._check()
            return await self.tool_call(replace(call, on_uncertain="retry"), make)

        async def output() -> bytes:
            return self._encode(found.output)

        return await self._made(call, output)

    async def _made(self, call: ToolCall, make: Callable[[], Awaitable[bytes]]) -> ToolOutcome:
        output = await make()
        error = await self._finishes.ask(call.key, output)
        if error is not None:
            raise self._stopped(error, "tool") from error
        return ToolOutcome(output)

    def _key_of_next_reply(self, question: str) -> str:
        return f"{question}:{self._answered[question]}"

    def _uncertain(self, call: ToolCall) -> ToolOutcome:
        why = f"call {call.key!r} of {call.tool} was started, and whether it was made is unknown"
        if call.on_uncertain == "tell":
            return ToolOutcome(is_known=False)
        self.failure = self.failure or RunFailure("uncertain", "EffectUncertain", why)
        raise TurnStopped(why)

    def _check(self) -> None:
        if self.is_stopped:
            raise TurnStopped("the turn was stopped before")

    def _stopped(self, error: CapsuleError, about: FailureKind) -> TurnStopped:
        """Stop the turn. What the run itself does wrong, as an output too large, fails the run."""
        if isinstance(error, CallerError):
            self.failure = self.failure or RunFailure(about, type(error).__name__, str(error))
        else:
            self.error = self.error or error
        return TurnStopped(str(error))
