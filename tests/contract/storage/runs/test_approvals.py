"""Calls that wait for a person: decisions, their index, their time limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import (
    AlreadyDecided,
    CallChanged,
    CallNotApproved,
    DecisionExpired,
    InvalidSetting,
    MayNotDecide,
    RunExists,
    RunParked,
    UnknownCall,
)
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import CallKeys
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.approval_index import Entry, Index
from capsule_tasks.storage.runs.types import PlannedCall
from tests.contract.storage.runs.subjects import PRINT, Subject, ask, until


async def swept(runs: Any) -> Any:
    async def expired() -> Any:
        return (await runs.approvals.expire_due()).expired

    return await until(expired)


# --- decisions ------------------------------------------------------------------------------------


async def test_the_output_of_a_settled_call_is_a_field_of_its_decision(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", kind="settle"), ask("c2", kind="settle"), ask("c3"))
    kinds = {call.call_id: call.kind for call in (await runs.approvals.pending()).calls}
    assert kinds == {"c1": "settle", "c2": "settle", "c3": "approval"}
    with pytest.raises(UnknownCall, match="'c3' is not to be settled: it waits for an approval"):
        await runs.approvals.settle("run-1", "c3", output='"9"')
    for wrong in (None, b"9", 9):
        with pytest.raises(InvalidSetting):
            await runs.approvals.settle("run-1", "c1", output=wrong)
    assert (await runs.approvals.settle("run-1", "c1", output='{"é": 9}', by="ann")).resume
    with pytest.raises(AlreadyDecided, match="settled by ann"):
        await runs.approvals.approve("run-1", "c1")
    await runs.approvals.reject("run-1", "c2", message='made:"9"')
    settled, rejected = (await runs.claim("run-1", "w1")).decisions.exact
    assert (settled.approved, settled.output, settled.message) == (False, '{"é": 9}', None)
    assert (rejected.approved, rejected.output, rejected.message) == (False, None, 'made:"9"')


async def test_a_decision_needs_the_run_and_the_call_and_wakes_the_run_once(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    with pytest.raises(RunParked) as waits:
        await runs.claim("run-1", "w1")
    assert waits.value.calls == 2
    first = await subject.runs().approvals.approve("run-1", "c1", by="ann")
    second = await runs.approvals.reject("run-1", "c2", message="no", by="bob")
    assert [(each.resume, each.status) for each in (first, second)] == [
        (True, "queued"),
        (False, "queued"),
    ]
    claim = await runs.claim("run-1", "w1")
    found = {each.call: (each.approved, each.by, each.message) for each in claim.decisions.exact}
    assert found == {"c1": (True, "ann", None), "c2": (False, "bob", "no")}
    assert claim.decisions.standing == ()


async def test_two_decisions_of_one_call_store_one_and_refuse_the_other(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask())
    decisions = [
        runs.approvals.approve("run-1", "call-1", by="ann"),
        runs.approvals.reject("run-1", "call-1", by="bob"),
        runs.approvals.approve("run-1", "call-1", by="ann"),
    ]
    outcomes = await asyncio.gather(*decisions, return_exceptions=True)
    already_decided = [each for each in outcomes if isinstance(each, AlreadyDecided)]
    (taken,) = (each for each in outcomes if not isinstance(each, BaseException))
    assert taken.resume
    assert len(already_decided) == 2
    claim = await runs.claim("run-1", "w1")
    assert all(each.decision == claim.decisions.exact[0] for each in already_decided)


async def test_a_decision_repeated_under_its_operation_gets_the_same_answer(
    subject: Subject,
) -> None:
    approvals = subject.runs().approvals
    await subject.parked(subject.runs(), ask())
    answers = [await approvals.approve("run-1", "call-1", operation_id="click") for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].resume


async def test_a_call_without_an_approval_request_cannot_be_decided(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"))
    with pytest.raises(UnknownCall, match="'c9'"):
        await runs.approvals.approve("run-1", "c9")
    with pytest.raises(InvalidSetting, match="roles"):
        await runs.approvals.approve("run-1", "c1", roles="admin")


async def test_only_the_named_people_may_decide(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", may_decide=("ann", "ops")), ask("c2"))
    for who in ({}, {"by": "bob"}, {"by": "bob", "roles": ["sales"]}):
        with pytest.raises(MayNotDecide) as caught:
            await runs.approvals.approve("run-1", "c1", **who)
        assert caught.value.may == ("ann", "ops")
    assert (await runs.read("run-1")).status == "interrupted"
    await runs.approvals.approve("run-1", "c1", by="bob", roles=["ops"])
    await runs.approvals.approve("run-1", "c2")


async def test_a_standing_decision_goes_to_the_owner_and_covers_later_requests(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2", tool="namespaced:crm/pay"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    assert [each.tool for each in claim.decisions.standing] == ["bare:pay"]
    later = [ask("c3"), ask("c2", tool="namespaced:crm/pay")]
    done = await runs.commit(claim, b"x", turn=2, status="interrupted", approval_requests=later)
    assert done.status == "queued", "a standing decision was there before the call was"
    waiting = (await runs.read("run-1")).pending
    assert [each.call_id for each in waiting] == ["c2"], "another namespace was covered"


async def test_an_exact_decision_beats_a_standing_one(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1", always=True)
    await runs.approvals.reject("run-1", "c2")
    claim = await runs.claim("run-1", "w1")
    starts = await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    assert starts.calls[0].state == "go"
    with pytest.raises(CallNotApproved, match="'c2'"):
        await runs.start_calls(claim, [PlannedCall("c2", PRINT)])


async def test_a_decision_while_the_run_is_running_is_there_when_it_parks(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    late = await runs.approvals.approve("run-1", "c2")
    assert (late.resume, late.status) == (False, "running")
    done = await runs.commit(
        claim, b"x", turn=2, status="interrupted", approval_requests=[ask("c2")]
    )
    assert done.status == "queued", "the run would have waited for what was decided"
    assert [each.call for each in (await runs.claim("run-1", "w1")).decisions.exact] == ["c2"]


async def test_partial_resolution_parks_again_and_keeps_the_first_times(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2", expires_in_s=500))
    (_, before) = (await runs.read("run-1")).pending
    await runs.approvals.approve("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    again = [ask("c2", expires_in_s=900)]
    done = await runs.commit(claim, b"x", turn=2, status="interrupted", approval_requests=again)
    assert done.status == "interrupted"
    assert (await runs.read("run-1")).pending == (before,)


async def test_a_call_that_is_asked_for_again_has_to_be_the_same(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    for call_id in ("c1", "c2"):
        changed = [ask(call_id, fingerprint="other")]
        with pytest.raises(CallChanged, match=call_id):
            await runs.commit(claim, b"x", turn=2, status="interrupted", approval_requests=changed)
    assert (await runs.read("run-1")).revision == 2


# --- the index ------------------------------------------------------------------------------------


async def test_pending_approvals_are_listed_over_all_runs_oldest_first(subject: Subject) -> None:
    runs = subject.runs()
    for number in range(3):
        asks = [
            ask(f"pay-{number}"),
            ask(f"mail-{number}", tool="bare:mail", agent=f"agent-{number % 2}"),
        ]
        await subject.parked(runs, *asks, run_id=f"run-{number}", worker=f"w{number}")

    async def listed(**wanted: Any) -> list[str]:
        return [each.call_id for each in (await runs.approvals.pending(**wanted)).calls]

    assert await listed() == ["pay-0", "mail-0", "pay-1", "mail-1", "pay-2", "mail-2"]
    assert await listed(tool="bare:pay") == ["pay-0", "pay-1", "pay-2"]
    assert await listed(agent="agent-0") == ["mail-0", "mail-2"]
    assert await listed(agent="triage", tool="bare:pay") == ["pay-0", "pay-1", "pay-2"]
    assert await listed(agent="agent-1", tool="bare:pay") == []
    page = await runs.approvals.pending(limit=4)
    rest = await runs.approvals.pending(limit=4, cursor=page.cursor)
    assert [each.call_id for each in page.calls + rest.calls] == await listed()
    assert rest.cursor is None
    await runs.approvals.approve("run-1", "pay-1")
    assert await listed(tool="bare:pay") == ["pay-0", "pay-2"]
    for bad in ({"limit": 0}, {"limit": True}, {"cursor": "x"}):
        with pytest.raises(InvalidSetting):
            await runs.approvals.pending(**bad)


async def test_a_listing_tells_all_that_a_person_needs(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask(expires_in_s=60, on_expiry="cancel", may_decide=("ann",)))
    (call,) = (await runs.approvals.pending()).calls
    assert (call.run_id, call.session_id, call.call_id) == ("run-1", "user-42", "call-1")
    assert (call.tool, call.agent, call.arguments) == ("bare:pay", "triage", '{"to": "ann"}')
    assert call.expires_at is not None
    assert abs((call.expires_at - call.asked_at).total_seconds() - 60) < 0.01
    assert (call.on_expiry, call.may_decide) == ("cancel", ("ann",))


async def test_an_index_that_is_lost_is_made_again_from_the_runs(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", expires_in_s=60), ask("c2", tool="bare:mail"))
    page = await runs.approvals.pending()
    await lose_index(subject)
    assert (await runs.approvals.pending()).calls == []
    assert await runs.approvals.reindex("run-1") == 2
    assert (await runs.approvals.pending()).calls == page.calls
    assert (await runs.approvals.pending(tool="bare:mail")).calls == page.calls[1:]


async def lose_index(subject: Subject) -> None:
    index = Index(RunSettings(prefix=subject.prefix))
    for call, tool in (("c1", "bare:pay"), ("c2", "bare:mail")):
        entry = Entry("run-1", call, "triage", tool, "user-42")
        await subject.drive(index.drop(entry, idle_ms=0))


async def test_pending_approvals_are_listed_though_the_details_of_the_index_are_lost(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("old"), ask("due", expires_in_s=0.001), run_id="run-1")
    keys = CallKeys("triage", "bare:pay", subject.prefix)
    for name in ("all", "due", "agent", "tool", "both"):
        setattr(keys, name, f"{getattr(keys, name)}:other")
    await subject.call(scripts.approvals_drop.call(keys, member=b'["run-1","old"]', idle_ms=0))
    await subject.parked(runs, ask("new"), run_id="run-2", worker="w2")
    (due,) = await swept(runs)
    assert due.calls == ("due",)
    for query in ({}, {"agent": "triage"}, {"tool": "bare:pay"}):
        page = await runs.approvals.pending(**query)
        assert [call.call_id for call in page.calls] == ["old", "new"]


# --- time limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_expiry", "status", "approved"),
    [("reject", "queued", False), ("approve", "queued", True), ("cancel", "cancelled", False)],
)
async def test_an_approval_that_expires_is_decided_as_the_request_says(
    subject: Subject, on_expiry: str, status: str, approved: bool
) -> None:
    runs = subject.runs()
    asks = [ask("c1", expires_in_s=0.05, on_expiry=on_expiry), ask("c2", expires_in_s=600)]
    await subject.parked(runs, *asks)
    (expired,) = await swept(runs)
    assert (expired.run_id, expired.calls, expired.status) == ("run-1", ("c1",), status)
    assert expired.resume, "also for a cancel: a worker ends the task"
    sweep = await runs.approvals.expire_due()
    assert sweep.expired == []
    assert sweep.next_in_s is not None
    assert 0 < sweep.next_in_s <= 600
    with pytest.raises(AlreadyDecided) as caught:
        await runs.approvals.approve("run-1", "c1", by="ann")
    assert (caught.value.decision.approved, caught.value.decision.by) == (approved, "expiry")


async def test_a_decision_after_its_time_is_refused_also_before_the_sweep(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask(expires_in_s=0.05))

    async def outcome() -> Any:
        due = (await runs.read("run-1")).pending[0].expires_at
        record = await runs.read("run-1")
        from datetime import UTC, datetime

        return due is not None and due < datetime.now(UTC) and record

    await until(outcome)
    with pytest.raises(DecisionExpired) as caught:
        await runs.approvals.approve("run-1", "call-1", by="ann")
    assert caught.value.decision.by == "expiry"
    assert caught.value.resume, "no caller is asked to send the run on"
    assert not caught.value.decision.approved
    assert (await runs.read("run-1")).status == "queued"


async def test_several_sweepers_at_once_wake_a_run_once(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", expires_in_s=0.03), ask("c2", expires_in_s=0.03))
    found: list[Any] = []

    async def sweep() -> bool:
        found.extend((await runs.approvals.expire_due()).expired)
        return not (await runs.read("run-1")).pending

    await asyncio.gather(*(until(sweep) for _ in range(4)))
    assert sorted(call for expired in found for call in expired.calls) == ["c1", "c2"]
    assert [expired.resume for expired in found].count(True) == 1


async def test_a_cancelled_run_leaves_nothing_in_the_index(subject: Subject) -> None:
    """Its calls stayed until somebody listed, and each listing asked their runs again."""
    runs = subject.runs()
    await subject.parked(runs, ask("c1", expires_in_s=600), ask("c2", tool="bare:other"))
    await runs.cancel("run-1")
    index = Index(RunSettings(prefix=subject.prefix))
    for agent, tool in ((None, None), ("triage", None), (None, "bare:other")):
        assert await subject.drive(index.page(agent, tool, "0", 10)) == []
    assert await subject.drive(index.due(10)) == ([], None)


async def test_calls_that_no_longer_wait_do_not_hide_one_that_is_due(subject: Subject) -> None:
    """As many as one sweep takes were looked at over and over, and nothing behind them was."""
    runs = subject.runs()
    index, limited = Index(RunSettings(prefix=subject.prefix)), ask(expires_in_s=0.001)
    for number in range(4):
        # As of a process that died before it wrote the run.
        await subject.drive(index.add(f"gone-{number}", "s", [limited]))
    await subject.parked(runs, ask("c1"), ask("c2", expires_in_s=600), run_id="early")
    again = [ask("c1", expires_in_s=0.001), ask("c2", expires_in_s=0.001)]
    with pytest.raises(RunExists):
        await runs.create(
            "early", subject.session_id, b"", schema="1", agent="a", approval_requests=again
        )
    await runs.create("late", "s", b"", schema="1", agent="a", approval_requests=[limited])

    async def is_due() -> bool:
        entries, _ = await subject.drive(index.due(100))
        return len(entries) == 6

    await until(is_due)

    async def expired() -> list[str]:
        """By one sweep; a run's call is due a millisecond after its entry in the index."""
        sweep = await runs.approvals.expire_due(limit=2)
        return [each.run_id for each in sweep.expired]

    assert await until(expired) == ["late"]
    left = (await runs.read("early")).pending
    assert [(call.call_id, call.expires_at is None) for call in left] == [
        ("c1", True),
        ("c2", False),
    ]
