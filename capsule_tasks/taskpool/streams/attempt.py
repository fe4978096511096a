"""One attempt of an execution, as Redis knows it: its calls, and what the replies say."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.execution_core import ExecutionCore, about_attempt
from capsule_tasks.storage.execution_types import Claimed
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.jobs import Job

_AGAIN = "again-"
"""Begins the ids of claims for messages that were delivered before."""


class Attempt:
    """Decides nothing and sends nothing."""

    __slots__ = (
        "_about",
        "_begun",
        "_claim_id",
        "_core",
        "_kept",
        "_keys",
        "_mark",
        "_seq",
        "_task_id",
        "number",
        "owner",
    )

    def __init__(
        self, core: ExecutionCore, job: Job, kept: ExecutionSettings, worker: str, begun: bytes
    ) -> None:
        self.number = 0
        self.owner = ""
        """The incarnation under which it was claimed."""
        self._core = core
        ack = "late" if job.acks_late else "early"
        self._about = about_attempt(ack, job.call.name, worker, *job.group, kept)
        self._task_id = job.call.task_id
        self._kept = kept
        self._keys = core.keys_of(job.call.task_id)
        self._begun = begun
        self._claim_id = ""
        self._mark = _AGAIN if job.is_redelivered else ""
        self._seq = 0

    def name_claim(self, claim_id: str) -> None:
        """What is claimed from now on is one attempt, however often it is tried."""
        self._claim_id = self._mark + claim_id

    def is_robbed_by(self, claim_id: str) -> bool:
        """Whether a later attempt under this claim is a fault: another run of the same message.

        Without a redelivery there are two messages with one task id, as the application sent them.
        """
        is_reaped = claim_id == self._claim_id  # a reaper's attempt makes no claim of its own
        return is_reaped or bool(self._mark) or claim_id.startswith(_AGAIN)

    def claim_call(
        self,
        owner: str,
        *,
        held_by: str,
        events: Sequence[bytes] = (),
        ending: Ending | None = None,
        is_loud: bool = False,
    ) -> Call:
        """Have it, with what it has said already."""
        self.owner = owner
        return self._core.claim_call(
            self._keys,
            self._claim_id,
            self._about,
            owner,
            [self._begun, *events],
            held_by=held_by,
            state=ending.state if ending is not None else "",
            outcome=ending.outcome if ending is not None else "",
            is_loud=is_loud,
        )

    def claimed(self, reply: Reply) -> Claimed:
        """It is ours; raises what `ExecutionCore.claim` does."""
        claimed = self._core.claimed(self._task_id, reply)
        self.number, self._seq = claimed.attempt, claimed.seq
        return claimed

    def append_call(self, events: Sequence[bytes], ending: Ending | None, *, is_loud: bool) -> Call:
        """Have stored what it says next."""
        return self._core.append_call(
            self._keys,
            self.number,
            self._seq + 1,
            events,
            state=ending.state if ending is not None else "",
            outcome=ending.outcome if ending is not None else "",
            is_loud=is_loud,
            kept=self._kept,
        )

    def appended(self, call: Call, reply: Reply) -> None:
        """It is stored; raises what `ExecutionCore.append` does."""
        self._seq = self._core.appended(self._task_id, call, reply)
