"""The ledger: a tool call is made once, and its output is kept."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import (
    CallChanged,
    CallNotApproved,
    RunClaimLost,
    UnknownCall,
)
from capsule_tasks.storage.keys import RunKeys
from capsule_tasks.storage.operations import operation_abandon
from capsule_tasks.storage.runs.types import Claim, PlannedCall
from tests.contract.storage.runs.subjects import PRINT, Subject, ask


async def test_a_call_is_made_once_and_its_output_is_kept(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    calls = [PlannedCall("c1", PRINT), PlannedCall("c2", PRINT)]
    assert [each.state for each in (await runs.start_calls(claim, calls)).calls] == ["go", "go"]
    await runs.finish_calls(claim, {"c1": b"\x00\xff"})
    again = (await runs.start_calls(claim, calls)).calls
    assert [each.state for each in again] == ["finished", "uncertain"]
    assert again[0].output == b"\x00\xff"
    assert again[1].started_at is not None
    retried = [PlannedCall(call.call_id, PRINT, retry=True) for call in calls]
    for _ in range(2):
        repeated = (await runs.start_calls(claim, retried, operation_id="retried")).calls
        assert [each.state for each in repeated] == ["finished", "go"]
        assert repeated[1].started_at == again[1].started_at


async def test_a_start_repeated_under_its_operation_is_the_same_start(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    calls = [PlannedCall("c1", PRINT)]
    for _ in range(2):
        started = await runs.start_calls(claim, calls, operation_id="go")
        assert started.calls[0].state == "go"
        assert started.calls[0].started_at is None
    assert (await runs.start_calls(claim, calls)).calls[0].state == "uncertain"


async def test_changed_arguments_under_a_used_id_start_nothing(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    with pytest.raises(CallChanged, match="c1"):
        await runs.start_calls(claim, [PlannedCall("c2", PRINT), PlannedCall("c1", "other")])
    started = await runs.start_calls(claim, [PlannedCall("c2", PRINT)])
    assert started.calls[0].state == "go", "a refused batch had started a call"


async def test_calls_that_wait_or_were_rejected_are_not_started(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"), ask("c3", tool="bare:other"))
    await runs.approvals.reject("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    for call_id in ("c1", "c2"):
        with pytest.raises(CallNotApproved, match=call_id):
            await runs.start_calls(claim, [PlannedCall(call_id, PRINT)])
    await runs.approvals.approve("run-1", "c2", always=True)
    assert (await runs.start_calls(claim, [PlannedCall("c2", PRINT)])).calls[0].state == "go"


async def test_a_rejection_holds_also_after_the_run_stopped_asking(subject: Subject) -> None:
    """The rejection came while the run, under a standing approval, was parked without the call."""
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    await runs.approvals.reject("run-1", "c2")
    claim = (await runs.commit(claim, b"x", turn=2)).claim
    with pytest.raises(CallNotApproved, match="'c2'"):
        await runs.start_calls(claim, [PlannedCall("c2", PRINT)])


async def test_outputs_of_calls_that_never_started_are_refused(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    with pytest.raises(UnknownCall, match="call 'c9' cannot be finished: it was never started"):
        await runs.finish_calls(claim, {"c9": b""})
    await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    await runs.finish_calls(claim, {"c1": b"one"})
    await runs.finish_calls(claim, {"c1": b"one"})
    with pytest.raises(CallChanged):
        await runs.finish_calls(claim, {"c1": b"two"})


async def inherited(subject: Subject, runs: Any) -> tuple[Claim, Claim]:
    """The claims of an owner that started the call `c1` and was lost, and of the next owner."""
    lease = await subject.worker("w1")
    await subject.worker("w2")
    await runs.create("run-1", subject.session_id, b"{}", schema="1.2", agent="triage")
    former = await runs.claim("run-1", "w1")
    await runs.start_calls(former, [PlannedCall("c1", PRINT)])
    await lease.release()
    return former, await runs.claim("run-1", "w2")


async def test_the_owner_reports_the_result_of_a_call_that_it_inherited(subject: Subject) -> None:
    """The owner was refused as if it had lost the run."""
    runs = subject.runs()
    former, owner = await inherited(subject, runs)
    start = (await runs.start_calls(owner, [PlannedCall("c1", PRINT)])).calls[0]
    assert start.state == "uncertain"
    await runs.finish_calls(owner, {"c1": b"it was made"})
    start = (await runs.start_calls(owner, [PlannedCall("c1", PRINT)])).calls[0]
    assert start.output == b"it was made"
    with pytest.raises(CallChanged):
        await runs.finish_calls(former, {"c1": b"something else"})


async def test_a_former_owner_cannot_report_on_a_call_that_was_started_again(
    subject: Subject,
) -> None:
    runs = subject.runs()
    former, owner = await inherited(subject, runs)
    await runs.start_calls(owner, [PlannedCall("c1", PRINT, retry=True)])
    with pytest.raises(RunClaimLost, match="is running now"):
        await runs.finish_calls(former, {"c1": b"late"})
    await runs.finish_calls(owner, {"c1": b"made anew"})


async def test_an_owner_that_parked_the_run_cannot_report_on_calls_it_did_not_start(
    subject: Subject,
) -> None:
    runs = subject.runs()
    former, owner = await inherited(subject, runs)
    await runs.commit(owner, b"x", turn=1, status="interrupted", approval_requests=[ask("c2")])
    with pytest.raises(RunClaimLost, match="is interrupted now"):
        await runs.finish_calls(owner, {"c1": b"a guess"})
    await runs.finish_calls(former, {"c1": b"it was made"})


async def test_a_call_under_a_standing_approval_that_was_made_cannot_be_decided_any_more(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    await runs.start_calls(claim, [PlannedCall("c2", PRINT)])
    with pytest.raises(UnknownCall, match="it was made"):
        await runs.approvals.reject("run-1", "c2")


async def test_a_write_cancelled_before_it_was_done_can_be_repeated(subject: Subject) -> None:
    """The caller left before the command was sent; a repeat was answered `done`, or `forgotten`."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.start_calls(claim, [PlannedCall("c", PRINT)])
    keys = RunKeys(subject.session_id, "run-1", subject.prefix)
    await subject.call(
        operation_abandon.call(keys.operations, operation_id="run_finish_calls:mine").repeated(1)
    )
    await runs.finish_calls(claim, {"c": b"out"}, operation_id="mine")
    await runs.finish_calls(claim, {"c": b"out"}, operation_id="mine")
    starts = await runs.start_calls(claim, [PlannedCall("c", PRINT)])
    assert starts.calls[0].output == b"out"
