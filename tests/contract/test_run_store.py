"""What every store of runs promises: Redis 6.2, Valkey 9, a cluster and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.errors import (
    AlreadyDecided,
    CallChanged,
    CallNotApproved,
    DecisionExpired,
    HistoryFull,
    InvalidId,
    InvalidSetting,
    ItemNotStorable,
    ItemTooLarge,
    LeaseLost,
    MayNotDecide,
    RunConflict,
    RunEnded,
    RunExists,
    RunHeld,
    RunLost,
    RunNotFound,
    RunTooLarge,
    RunWaits,
    UnknownCall,
    UnreadableSchema,
)
from capsule_tasks.storage.encryption import EncryptingCodec
from capsule_tasks.storage.run_types import PlannedCall
from tests.contract.run_subjects import PRINT, Subject, ask, opened, until

STORES = {
    "redis62": "redis62_url",
    "valkey": "valkey_url",
    "cluster": "cluster_url",
    "memory": None,
}


@pytest.fixture(params=[(store, face) for store in STORES for face in ("async", "sync")],
                ids="-".join)  # fmt: skip
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    store, face = request.param
    fixture = STORES[store]
    async with opened(request.getfixturevalue(fixture) if fixture else None, face) as subject:
        yield subject


# --- life of a run -------------------------------------------------------------------------------


async def test_a_run_is_made_claimed_committed_and_ended(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("w1")
    snapshot = b'\x00\xff any bytes {"a": "\xc3\xa9"}'
    assert await runs.create("run-1", "user-42", snapshot, schema="1.2", agent="a") == "queued"
    claim = await runs.claim("run-1", "w1")
    assert (claim.snapshot, claim.revision, claim.turn) == (snapshot, 1, 0)
    assert (claim.schema, claim.agent, claim.cancelled_by) == ("1.2", "a", None)
    items = [{"n": 1}, {"n": 2}]
    done = await runs.commit(claim, b"second", turn=1, agent="b", items=items)
    assert (done.status, done.claim.revision) == ("running", 2)
    done = await runs.commit(done.claim, b"last", turn=2, status="completed", items=[{"n": 3}])
    assert done.status == "completed"
    assert await subject.items() == [{"n": 1}, {"n": 2}, {"n": 3}]
    record = await runs.read("run-1")
    assert (record.status, record.snapshot, record.agent) == ("completed", b"last", "b")
    assert (record.turn, record.revision, record.owner) == (2, 3, None)
    with pytest.raises(RunEnded, match="completed"):
        await runs.claim("run-1", "w1")


async def test_another_store_finds_a_run_by_its_id_alone(subject: Subject) -> None:
    await subject.claimed(subject.runs())
    record = await subject.runs().read("run-1", with_snapshot=False)
    assert (record.session_id, record.status, record.snapshot) == ("user-42", "running", b"")


async def test_an_unknown_run_is_named(subject: Subject) -> None:
    runs = subject.runs()
    for call in (
        runs.read("ghost"),
        runs.claim("ghost", "w1"),
        runs.cancel("ghost"),
        runs.approvals.approve("ghost", "c"),
        runs.approvals.expire("ghost"),
    ):
        with pytest.raises(RunNotFound, match="'ghost'"):
            await call


async def test_an_id_that_is_taken_is_refused_and_the_run_stays(subject: Subject) -> None:
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"first", schema="1.2", agent="a")
    for session in ("user-42", "another"):
        with pytest.raises(RunExists):
            await runs.create("run-1", session, b"second", schema="1.2", agent="a")
    assert (await runs.read("run-1")).snapshot == b"first"


async def test_a_repeat_under_one_operation_is_the_same_run(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("w1")
    for _ in range(2):
        await runs.create("run-1", "user-42", b"", schema="1.2", agent="a", operation="make")
    claims = [await runs.claim("run-1", "w1", operation="take") for _ in range(2)]
    assert claims[0] == claims[1]
    done = [
        await runs.commit(claims[0], b"x", turn=1, items=[{}], operation="turn") for _ in range(2)
    ]
    assert done[0] == done[1]
    assert await subject.items() == [{}]
    assert (await runs.read("run-1")).revision == 2


# --- claims --------------------------------------------------------------------------------------


async def test_of_many_claims_at_once_one_wins(subject: Subject) -> None:
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"", schema="1.2", agent="a")
    for number in range(8):
        await subject.worker(f"w{number}")
    claims = [runs.claim("run-1", f"w{number}") for number in range(8)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    held = [each for each in outcomes if isinstance(each, RunHeld)]
    assert len(held) == 7
    owner = (await runs.read("run-1")).owner
    assert {each.owner for each in held} == {owner}
    with pytest.raises(RunHeld):
        await runs.claim("run-1", owner)


async def test_a_lapsed_lease_gives_the_run_to_another_and_fences_the_first(
    subject: Subject,
) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    await subject.worker("w2")
    await runs.create("run-1", "user-42", b"start", schema="1.2", agent="a")
    first = await runs.claim("run-1", "w1")
    started = await runs.start_calls(first, [PlannedCall("c1", PRINT)])
    assert started.calls[0].state == "go"
    await lease.release()
    second = await runs.claim("run-1", "w2")
    assert second.token > first.token
    assert second.snapshot == b"start"
    for stale in (
        runs.commit(first, b"late", turn=1, items=[{}]),
        runs.release(first),
        runs.start_calls(first, [PlannedCall("c2", PRINT)]),
    ):
        with pytest.raises(RunLost):
            await stale
    assert (await runs.read("run-1")).snapshot == b"start"
    assert await subject.items() == []
    await runs.finish_calls(first, {"c1": b"it happened"})
    known = await runs.start_calls(second, [PlannedCall("c1", PRINT)])
    assert (known.calls[0].state, known.calls[0].output) == ("finished", b"it happened")


async def test_a_lease_that_lapsed_stays_lapsed(subject: Subject) -> None:
    lease = await subject.worker("w1", lease_s=0.05)

    async def has_lapsed() -> bool:
        return bool(await lease.remaining_s() == 0)

    await until(has_lapsed)
    with pytest.raises(LeaseLost):
        await lease.renew()
    with pytest.raises(LeaseLost):
        await subject.worker("w1")
    fresh = await subject.worker("w2")
    await fresh.renew()
    assert 590 < await fresh.remaining_s() <= 600
    for _ in range(2):
        await fresh.release()
        assert await fresh.remaining_s() == 0
    with pytest.raises(LeaseLost):
        await fresh.renew()


async def test_a_run_that_is_handed_back_is_as_it_was(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    claim = (await runs.commit(claim, b"one", turn=1)).claim
    assert await runs.release(claim) == "queued"
    again = await runs.claim("run-1", "w1")
    assert (again.snapshot, again.turn, again.revision) == (b"one", 1, 2)


async def test_a_worker_leaves_alone_what_it_cannot_read(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("old")
    await subject.worker("new")
    await runs.create("run-1", "user-42", b"new", schema="9.0", agent="a")
    before = await runs.read("run-1")
    with pytest.raises(UnreadableSchema) as caught:
        await runs.claim("run-1", "old", readable=["1.0", "1.1"])
    assert (caught.value.version, caught.value.readable) == ("9.0", ("1.0", "1.1"))
    assert await runs.read("run-1") == before
    assert (await runs.claim("run-1", "new", readable=["1.1", "9.0"])).snapshot == b"new"


# --- commits -------------------------------------------------------------------------------------


async def test_a_turn_that_does_not_fit_the_history_commits_nothing(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    small = subject.history(max_items=1)
    with pytest.raises(HistoryFull):
        await runs.commit(claim, b"x", turn=1, items=[{}, {}], history=small)
    assert await subject.items() == []
    assert (await runs.read("run-1")).revision == 1
    await runs.commit(claim, b"x", turn=1, items=[{}], history=small)


async def test_a_turn_committed_twice_is_committed_once(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    first = await runs.commit(claim, b"one", turn=1, items=[{"n": 1}])
    again = await runs.commit(claim, b"one", turn=1, items=[{"n": 1}])
    assert again == first
    assert await subject.items() == [{"n": 1}]
    with pytest.raises(RunConflict):
        await runs.commit(claim, b"another", turn=1)
    with pytest.raises(RunConflict):
        await runs.commit(first.claim, b"back", turn=0)


async def test_of_two_commits_of_one_revision_one_is_stored(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    commits = [runs.commit(claim, bytes([n]), turn=1, items=[{}]) for n in range(5)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert sum(isinstance(each, RunConflict) for each in outcomes) == 4
    assert len(await subject.items()) == 1


async def test_what_is_too_large_or_makes_no_sense_is_refused(subject: Subject) -> None:
    runs = subject.runs(max_snapshot_bytes=10, max_output_bytes=3)
    claim = await subject.claimed(runs)
    with pytest.raises(RunTooLarge, match="11 bytes"):
        await runs.commit(claim, b"x" * 11, turn=1)
    with pytest.raises(InvalidSetting, match="asks"):
        await runs.commit(claim, b"x", turn=1, status="interrupted")
    with pytest.raises(InvalidSetting, match="status"):
        await runs.commit(claim, b"x", turn=1, status="paused")
    with pytest.raises(InvalidSetting, match="turn"):
        await runs.commit(claim, b"x", turn=-1)
    with pytest.raises(InvalidSetting, match="snapshot"):
        await runs.commit(claim, "text", turn=1)
    with pytest.raises(InvalidSetting, match="on_expiry"):
        await runs.commit(claim, b"x", turn=1, status="interrupted", asks=[ask(on_expiry="shrug")])
    with pytest.raises(InvalidSetting, match="may_decide"):
        await runs.commit(claim, b"x", turn=1, status="interrupted", asks=[ask(may_decide=())])
    with pytest.raises(InvalidId):
        await runs.create("x" * 600, "user-42", b"", schema="1", agent="a")
    await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    with pytest.raises(RunTooLarge):
        await runs.finish_calls(claim, {"c1": b"xxxx"})
    assert (await runs.read("run-1")).revision == 1


async def test_items_are_stored_as_the_sessions_history_stores_them(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    with pytest.raises(ItemNotStorable, match="item 1"):
        await runs.commit(claim, b"x", turn=1, items=[{}, {"bad": object()}])
    history = subject.history(max_item_bytes=5)
    with pytest.raises(ItemTooLarge):
        await runs.commit(claim, b"x", turn=1, items=[{"a": "long"}], history=history)
    with pytest.raises(InvalidSetting, match="'another'"):
        await runs.commit(claim, b"x", turn=1, history=subject.history("another"))
    sealed = subject.history(codec=EncryptingCodec(b"k" * 32))
    await runs.commit(claim, b"x", turn=1, items=[{"secret": 1}], history=sealed)
    (record,) = await subject.items()
    assert record.keys() == {"capsule_key", "sealed"}, "it was stored in the clear"
    found = sealed.get_items()
    assert (await found if subject.face == "async" else found) == [{"secret": 1}]


# --- cancel --------------------------------------------------------------------------------------


async def test_a_cancel_ends_what_nobody_holds_at_once(subject: Subject) -> None:
    runs = subject.runs()
    await runs.create("queued", "user-42", b"", schema="1", agent="a")
    await subject.parked(runs, ask(), run_id="parked")
    for run_id in ("queued", "parked"):
        cancelled = await runs.cancel(run_id, by="ann")
        assert (cancelled.status, cancelled.owner) == ("cancelled", None)
        assert (await runs.read(run_id)).cancelled_by == "ann"
        with pytest.raises(RunEnded):
            await runs.cancel(run_id)
    with pytest.raises(RunEnded):
        await runs.approvals.approve("parked", "call-1")
    assert (await runs.approvals.waiting()).calls == []


async def test_a_cancel_of_a_running_run_is_told_to_its_owner(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    for by in ("ann", "bob"):
        cancelled = await runs.cancel("run-1", by=by)
        assert (cancelled.status, cancelled.owner) == ("running", "w1")
    started = await runs.start_calls(claim, [])
    assert started.cancelled_by == "ann"
    done = await runs.commit(claim, b"kept", turn=1)
    assert (done.status, done.claim.cancelled_by) == ("running", "ann")
    done = await runs.commit(done.claim, b"end", turn=1, status="cancelled", items=[{}])
    assert done.status == "cancelled"
    assert await subject.items() == [{}]


@pytest.mark.parametrize("how", ["park", "release"])
async def test_a_run_that_was_cancelled_is_not_parked(subject: Subject, how: str) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.cancel("run-1")
    if how == "park":
        asks = [ask()]
        done = await runs.commit(claim, b"x", turn=1, status="interrupted", asks=asks)
        assert done.status == "cancelled"
    else:
        assert await runs.release(claim) == "cancelled"
    assert (await runs.read("run-1")).status == "cancelled"
    assert (await runs.approvals.waiting()).calls == []


async def test_a_run_that_completes_before_it_hears_of_a_cancel_is_complete(
    subject: Subject,
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.cancel("run-1")
    assert (await runs.commit(claim, b"x", turn=1, status="completed")).status == "completed"


# --- decisions -----------------------------------------------------------------------------------


async def test_a_decision_needs_the_run_and_the_call_and_wakes_the_run_once(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    with pytest.raises(RunWaits) as waits:
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


async def test_of_two_decisions_one_counts_and_the_other_is_told(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask())
    decisions = [
        runs.approvals.approve("run-1", "call-1", by="ann"),
        runs.approvals.reject("run-1", "call-1", by="bob"),
        runs.approvals.approve("run-1", "call-1", by="ann"),
    ]
    outcomes = await asyncio.gather(*decisions, return_exceptions=True)
    told = [each for each in outcomes if isinstance(each, AlreadyDecided)]
    (taken,) = (each for each in outcomes if not isinstance(each, BaseException))
    assert taken.resume
    assert len(told) == 2
    claim = await runs.claim("run-1", "w1")
    assert all(each.decision == claim.decisions.exact[0] for each in told)


async def test_a_decision_repeated_under_its_operation_gets_the_same_answer(
    subject: Subject,
) -> None:
    approvals = subject.runs().approvals
    await subject.parked(subject.runs(), ask())
    answers = [await approvals.approve("run-1", "call-1", operation="click") for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].resume


async def test_a_call_that_nobody_asked_for_cannot_be_decided(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"))
    with pytest.raises(UnknownCall, match="'c9'"):
        await runs.approvals.approve("run-1", "c9")
    with pytest.raises(InvalidSetting, match="roles"):
        await runs.approvals.approve("run-1", "c1", roles="admin")


async def test_only_those_may_decide_who_were_named(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", may_decide=("ann", "ops")), ask("c2"))
    for who in ({}, {"by": "bob"}, {"by": "bob", "roles": ["sales"]}):
        with pytest.raises(MayNotDecide) as caught:
            await runs.approvals.approve("run-1", "c1", **who)
        assert caught.value.may == ("ann", "ops")
    assert (await runs.read("run-1")).status == "interrupted"
    await runs.approvals.approve("run-1", "c1", by="bob", roles=["ops"])
    await runs.approvals.approve("run-1", "c2")


async def test_a_standing_decision_is_handed_to_the_owner_and_covers_what_is_asked_later(
    subject: Subject,
) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2", tool="namespaced:crm/pay"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    assert [each.tool for each in claim.decisions.standing] == ["bare:pay"]
    later = [ask("c3"), ask("c2", tool="namespaced:crm/pay")]
    done = await runs.commit(claim, b"x", turn=2, status="interrupted", asks=later)
    assert done.status == "queued", "a standing decision was there before the call was"
    waiting = (await runs.read("run-1")).waiting
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
    done = await runs.commit(claim, b"x", turn=2, status="interrupted", asks=[ask("c2")])
    assert done.status == "queued", "the run would have waited for what was decided"
    assert [each.call for each in (await runs.claim("run-1", "w1")).decisions.exact] == ["c2"]


async def test_partial_resolution_parks_again_and_keeps_the_first_times(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2", expires_in_s=500))
    (_, before) = (await runs.read("run-1")).waiting
    await runs.approvals.approve("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    again = [ask("c2", expires_in_s=900)]
    done = await runs.commit(claim, b"x", turn=2, status="interrupted", asks=again)
    assert done.status == "interrupted"
    assert (await runs.read("run-1")).waiting == (before,)


async def test_a_call_that_is_asked_for_again_has_to_be_the_same(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1")
    claim = await runs.claim("run-1", "w1")
    for call_id in ("c1", "c2"):
        changed = [ask(call_id, fingerprint="other")]
        with pytest.raises(CallChanged, match=call_id):
            await runs.commit(claim, b"x", turn=2, status="interrupted", asks=changed)
    assert (await runs.read("run-1")).revision == 2


# --- the index -----------------------------------------------------------------------------------


async def test_what_waits_is_listed_over_all_runs_oldest_first(subject: Subject) -> None:
    runs = subject.runs()
    for number in range(3):
        asks = [
            ask(f"pay-{number}"),
            ask(f"mail-{number}", tool="bare:mail", agent=f"agent-{number % 2}"),
        ]
        await subject.parked(runs, *asks, run_id=f"run-{number}", worker=f"w{number}")

    async def listed(**wanted: Any) -> list[str]:
        return [each.call_id for each in (await runs.approvals.waiting(**wanted)).calls]

    assert await listed() == ["pay-0", "mail-0", "pay-1", "mail-1", "pay-2", "mail-2"]
    assert await listed(tool="bare:pay") == ["pay-0", "pay-1", "pay-2"]
    assert await listed(agent="agent-0") == ["mail-0", "mail-2"]
    assert await listed(agent="triage", tool="bare:pay") == ["pay-0", "pay-1", "pay-2"]
    assert await listed(agent="agent-1", tool="bare:pay") == []
    page = await runs.approvals.waiting(limit=4)
    rest = await runs.approvals.waiting(limit=4, cursor=page.cursor)
    assert [each.call_id for each in page.calls + rest.calls] == await listed()
    assert rest.cursor is None
    await runs.approvals.approve("run-1", "pay-1")
    assert await listed(tool="bare:pay") == ["pay-0", "pay-2"]
    for bad in ({"limit": 0}, {"limit": True}, {"cursor": "x"}):
        with pytest.raises(InvalidSetting):
            await runs.approvals.waiting(**bad)


async def test_a_listing_tells_all_that_a_person_needs(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask(expires_in_s=60, on_expiry="cancel", may_decide=("ann",)))
    (call,) = (await runs.approvals.waiting()).calls
    assert (call.run_id, call.session_id, call.call_id) == ("run-1", "user-42", "call-1")
    assert (call.tool, call.agent, call.arguments) == ("bare:pay", "triage", '{"to": "ann"}')
    assert call.expires_at is not None
    assert abs((call.expires_at - call.asked_at).total_seconds() - 60) < 0.01
    assert (call.on_expiry, call.may_decide) == ("cancel", ("ann",))


async def test_an_index_that_is_lost_is_made_again_from_the_runs(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", expires_in_s=60), ask("c2", tool="bare:mail"))
    page = await runs.approvals.waiting()
    await lose_index(subject)
    assert (await runs.approvals.waiting()).calls == []
    assert await runs.approvals.reindex("run-1") == 2
    assert (await runs.approvals.waiting()).calls == page.calls
    assert (await runs.approvals.waiting(tool="bare:mail")).calls == page.calls[1:]


async def lose_index(subject: Subject) -> None:
    from capsule_tasks.settings import RunSettings
    from capsule_tasks.storage.approval_index import Entry, Index
    from capsule_tasks.storage.drivers import drive, drive_blocking

    index = Index(RunSettings(prefix=subject.prefix))
    for call, tool in (("c1", "bare:pay"), ("c2", "bare:mail")):
        dropping = index.drop(Entry("run-1", call, "triage", tool, "user-42"), idle_ms=0)
        if subject.face == "async":
            await drive(dropping, subject.store)
        else:
            drive_blocking(dropping, subject.store)


# --- time limits ---------------------------------------------------------------------------------


async def swept(runs: Any) -> Any:
    async def expired() -> Any:
        return (await runs.approvals.expire_due()).expired

    return await until(expired)


@pytest.mark.parametrize(
    ("on_expiry", "status", "approved"),
    [("reject", "queued", False), ("approve", "queued", True), ("cancel", "cancelled", False)],
)
async def test_what_nobody_decides_in_time_is_decided_as_it_said(
    subject: Subject, on_expiry: str, status: str, approved: bool
) -> None:
    runs = subject.runs()
    asks = [ask("c1", expires_in_s=0.05, on_expiry=on_expiry), ask("c2", expires_in_s=600)]
    await subject.parked(runs, *asks)
    (expired,) = await swept(runs)
    assert (expired.run_id, expired.calls, expired.status) == ("run-1", ("c1",), status)
    assert expired.resume == (status == "queued")
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
        due = (await runs.read("run-1")).waiting[0].expires_at
        record = await runs.read("run-1")
        from datetime import UTC, datetime

        return due is not None and due < datetime.now(UTC) and record

    await until(outcome)
    with pytest.raises(DecisionExpired) as caught:
        await runs.approvals.approve("run-1", "call-1", by="ann")
    assert caught.value.decision.by == "expiry"
    assert caught.value.resume, "nobody was told to send the run on"
    assert not caught.value.decision.approved
    assert (await runs.read("run-1")).status == "queued"


async def test_several_sweepers_at_once_wake_a_run_once(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1", expires_in_s=0.03), ask("c2", expires_in_s=0.03))
    found: list[Any] = []

    async def sweep() -> bool:
        found.extend((await runs.approvals.expire_due()).expired)
        return not (await runs.read("run-1")).waiting

    await asyncio.gather(*(until(sweep) for _ in range(4)))
    assert sorted(call for expired in found for call in expired.calls) == ["c1", "c2"]
    assert [expired.resume for expired in found].count(True) == 1


# --- the ledger ----------------------------------------------------------------------------------


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
    assert [each.state for each in (await runs.start_calls(claim, retried)).calls] == [
        "finished",
        "go",
    ]


async def test_a_start_repeated_under_its_operation_is_the_same_start(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    calls = [PlannedCall("c1", PRINT)]
    for _ in range(2):
        started = await runs.start_calls(claim, calls, operation="go")
        assert started.calls[0].state == "go"
    assert (await runs.start_calls(claim, calls)).calls[0].state == "uncertain"


async def test_changed_arguments_under_a_used_id_start_nothing(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    with pytest.raises(CallChanged, match="c1"):
        await runs.start_calls(claim, [PlannedCall("c2", PRINT), PlannedCall("c1", "other")])
    started = await runs.start_calls(claim, [PlannedCall("c2", PRINT)])
    assert started.calls[0].state == "go", "a refused batch had started a call"


async def test_what_waits_or_was_rejected_is_not_started(subject: Subject) -> None:
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
    """It came while the run, under a standing approval, was about to be parked without the call."""
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    await runs.approvals.reject("run-1", "c2")
    claim = (await runs.commit(claim, b"x", turn=2)).claim
    with pytest.raises(CallNotApproved, match="'c2'"):
        await runs.start_calls(claim, [PlannedCall("c2", PRINT)])


async def test_outputs_of_what_was_never_started_are_refused(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    with pytest.raises(UnknownCall, match="c9"):
        await runs.finish_calls(claim, {"c9": b""})
    await runs.start_calls(claim, [PlannedCall("c1", PRINT)])
    await runs.finish_calls(claim, {"c1": b"one"})
    await runs.finish_calls(claim, {"c1": b"one"})
    with pytest.raises(CallChanged):
        await runs.finish_calls(claim, {"c1": b"two"})


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
