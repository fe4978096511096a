"""The ledger of a run: effects of tool calls and replies of models, as generators without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from capsule_tasks.errors import RunTooLarge
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.operations import Operation, Reply, call_script, named
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.locations import RunLocations
from capsule_tasks.storage.runs.replies import call_start_of, pack, refusal_of_owner, text_of
from capsule_tasks.storage.runs.types import (
    CallStarts,
    Claim,
    PlannedCall,
    check_calls,
    check_claim,
    check_outputs,
    check_replies,
)
from capsule_tasks.storage.scripts import Call, Code


class LedgerCore:
    """Records of an owner while it makes a turn; the docstrings hold for both facades."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.locations = RunLocations(settings)
        self._ttl_ms = int(settings.ttl_s * 1000)

    def start_calls(
        self,
        claim: Claim,
        calls: Sequence[PlannedCall],
        *,
        replies: Mapping[str, bytes] | None = None,
        operation_id: str | None = None,
    ) -> Operation[CallStarts]:
        """Record that tool calls start, and return which of them may.

        A call that was made before has its output; a call that was started and did not finish is
        `uncertain`, unless it has `retry`. `replies` are those of models from which the calls
        come: they are journaled with them, also if no call may start, under the rules of `journal`.
        If one call is refused (CallChanged, CallNotApproved), or the replies are, no call is
        started and no reply is journaled.
        """
        check_claim(claim)
        keys = self.locations.keys(claim.session_id, claim.run_id)
        check_calls("calls", calls, PlannedCall)
        replies = {} if replies is None else replies
        max_bytes = self.settings.max_journal_bytes
        check_replies(replies, max_bytes)
        packed = pack([[call.call_id, call.fingerprint, call.retry] for call in calls])
        start = scripts.run_start_calls.call(
            keys,
            operation_id=named("run_start_calls", operation_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
            revision=claim.revision,
            max_bytes=max_bytes,
            calls=packed,
            parts=list(chain.from_iterable(replies.items())),
        )
        reply = yield from self._done_by_owner(claim.run_id, start)
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
        yield from self._done_by_owner(claim.run_id, finish)

    def journal(self, claim: Claim, key: str, reply: bytes) -> Operation[str | None]:
        """Record a reply of a model, and return who cancelled the run, if somebody did.

        The next claim brings the replies that were recorded since the last commit, which erases
        them. Another reply under the same key replaces the first. Raises RunTooLarge for more than
        `RunSettings.max_journal_bytes` in one turn, RunClaimLost for an owner whose claim is over,
        and RunConflict for a claim that is older than the last commit.
        """
        check_claim(claim)
        max_bytes = self.settings.max_journal_bytes
        check_replies({key: reply}, max_bytes)
        call = scripts.run_journal.call(
            self.locations.keys(claim.session_id, claim.run_id),
            ttl_ms=self._ttl_ms,
            token=claim.token,
            revision=claim.revision,
            max_bytes=max_bytes,
            key=key,
            reply=reply,
        )
        answer = yield from self._done_by_owner(claim.run_id, call)
        return text_of(answer[1])

    def _done_by_owner(self, run_id: str, call: Call) -> Operation[Reply]:
        """The reply of a script that was done; raises for one that was refused."""
        reply = yield from call_script(call, self.settings.retry)
        if reply[0] == Code.FULL:
            max_bytes = self.settings.max_journal_bytes
            raise RunTooLarge("the journal of the turn", int(reply[1]), max_bytes)
        if reply[0] != Code.DONE:
            raise refusal_of_owner(run_id, reply)
        return reply
