"""A run from its making to its end: claims, commits, cancels."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import (
    HistoryFull,
    InvalidId,
    InvalidSetting,
    ItemNotStorable,
    ItemTooLarge,
    LeaseLost,
    LeaseMissing,
    LeaseTaken,
    RunClaimed,
    RunClaimLost,
    RunConflict,
    RunEnded,
    RunExists,
    RunNotFound,
    RunTooLarge,
    UnreadableSchema,
)
from capsule_tasks.storage.encryption import EncryptingCodec
from capsule_tasks.storage.runs.types import PlannedCall
from tests.contract.storage.runs.subjects import PRINT, Subject, ask, until

# --- life of a run --------------------------------------------------------------------------------


async def test_a_run_is_made_claimed_committed_and_ended(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("w1")
    snapshot = b'\x00\xff any bytes {"a": "\xc3\xa9"}'
    created = await runs.create("run-1", "user-42", snapshot, schema="1.2", agent="a")
    assert created.status == "queued"
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
        await runs.create("run-1", "user-42", b"", schema="1.2", agent="a", operation_id="make")
    claims = [await runs.claim("run-1", "w1", operation_id="take") for _ in range(2)]
    assert claims[0] == claims[1]
    done = [
        await runs.commit(claims[0], b"x", turn=1, items=[{}], operation_id="turn")
        for _ in range(2)
    ]
    assert done[0] == done[1]
    assert await subject.items() == [{}]
    assert (await runs.read("run-1")).revision == 2


async def test_a_claim_from_a_lapsed_owner_is_repeated_under_its_operation(
    subject: Subject,
) -> None:
    """A caller that had lost the reply was refused because the run was held: by itself."""
    runs = subject.runs()
    await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1.2", agent="a")
    lease = await subject.worker("gone")
    await runs.claim("run-1", "gone")
    await lease.release()
    claims = [await runs.claim("run-1", "w1", operation_id="take") for _ in range(3)]
    assert claims[0] == claims[1] == claims[2]


# --- claims ---------------------------------------------------------------------------------------


async def test_one_of_many_claims_at_once_wins(subject: Subject) -> None:
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"", schema="1.2", agent="a")
    for number in range(8):
        await subject.worker(f"w{number}")
    claims = [runs.claim("run-1", f"w{number}") for number in range(8)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    held = [each for each in outcomes if isinstance(each, RunClaimed)]
    assert len(held) == 7
    owner = (await runs.read("run-1")).owner
    assert {each.owner for each in held} == {owner}
    with pytest.raises(RunClaimed):
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
        with pytest.raises(RunClaimLost):
            await stale
    assert (await runs.read("run-1")).snapshot == b"start"
    assert await subject.items() == []
    await runs.finish_calls(first, {"c1": b"it happened"})
    known = await runs.start_calls(second, [PlannedCall("c1", PRINT)])
    assert (known.calls[0].state, known.calls[0].output) == ("finished", b"it happened")


async def test_a_run_cannot_be_claimed_without_a_lease(subject: Subject) -> None:
    """Its owner looked as if it were gone: any other worker could take the run at once."""
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"", schema="1.2", agent="a")
    before = await runs.read("run-1")
    with pytest.raises(LeaseMissing, match="'w1' has no lease"):
        await runs.claim("run-1", "w1")
    lapsed = await subject.worker("w1")
    await lapsed.release()
    with pytest.raises(LeaseLost, match="'w1'"):
        await runs.claim("run-1", "w1")
    assert await runs.read("run-1") == before
    await subject.worker("w2")
    assert (await runs.claim("run-1", "w2")).snapshot == b""


async def test_a_lease_that_is_held_is_acquired_once(subject: Subject) -> None:
    lease = await subject.worker("w1")
    await lease.acquire()
    await lease.renew()
    with pytest.raises(LeaseTaken, match="'w1' is held by another worker"):
        await subject.worker("w1")
    await lease.renew()
    await lease.release()
    with pytest.raises(LeaseLost, match="'w1' has lapsed"):
        await lease.acquire()


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


async def test_a_worker_ignores_entries_it_cannot_read(subject: Subject) -> None:
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


# --- commits --------------------------------------------------------------------------------------


async def test_a_turn_that_does_not_fit_the_history_commits_nothing(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    small = subject.history(max_items=1)
    with pytest.raises(HistoryFull):
        await runs.commit(claim, b"x", turn=1, items=[{}, {}], history=small)
    assert await subject.items() == []
    assert (await runs.read("run-1")).revision == 1
    await runs.commit(claim, b"x", turn=1, items=[{}], history=small)


async def test_a_turn_committed_again_with_another_status_is_no_repeat(subject: Subject) -> None:
    """The commit was once answered as if stored, and a run that had to end went on."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.commit(claim, b"x", turn=1)
    with pytest.raises(RunConflict):
        await runs.commit(claim, b"x", turn=1, status="completed")
    assert (await runs.read("run-1")).status == "running"


@pytest.mark.parametrize("meanwhile", ["cancel", "approve", "nothing"])
async def test_a_parked_turn_committed_again_returns_what_became_of_it(
    subject: Subject, meanwhile: str
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    parking = {"turn": 1, "status": "interrupted", "approval_requests": [ask()]}
    first = await runs.commit(claim, b"x", **parking)
    expected = "interrupted"
    if meanwhile == "cancel":
        expected = (await runs.cancel("run-1")).status
    elif meanwhile == "approve":
        expected = (await runs.approvals.approve("run-1", "call-1")).status
    again = await runs.commit(claim, b"x", **parking)
    assert (first.status, again.status) == ("interrupted", expected)
    assert again.claim.revision == first.claim.revision


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


async def test_one_of_two_commits_of_one_revision_is_stored(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    commits = [runs.commit(claim, bytes([n]), turn=1, items=[{}]) for n in range(5)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert sum(isinstance(each, RunConflict) for each in outcomes) == 4
    assert len(await subject.items()) == 1


async def test_arguments_that_are_too_large_or_invalid_are_refused(subject: Subject) -> None:
    runs = subject.runs(max_snapshot_bytes=10, max_output_bytes=3)
    claim = await subject.claimed(runs)
    with pytest.raises(RunTooLarge, match="11 bytes"):
        await runs.commit(claim, b"x" * 11, turn=1)
    with pytest.raises(InvalidSetting, match="approval_requests"):
        await runs.commit(claim, b"x", turn=1, status="interrupted")
    with pytest.raises(InvalidSetting, match="status"):
        await runs.commit(claim, b"x", turn=1, status="paused")
    with pytest.raises(InvalidSetting, match="turn"):
        await runs.commit(claim, b"x", turn=-1)
    with pytest.raises(InvalidSetting, match="snapshot"):
        await runs.commit(claim, "text", turn=1)
    with pytest.raises(InvalidSetting, match="on_expiry"):
        await runs.commit(
            claim, b"x", turn=1, status="interrupted", approval_requests=[ask(on_expiry="shrug")]
        )
    with pytest.raises(InvalidSetting, match="may_decide"):
        await runs.commit(
            claim, b"x", turn=1, status="interrupted", approval_requests=[ask(may_decide=())]
        )
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


# --- cancel ---------------------------------------------------------------------------------------


async def test_a_cancel_ends_a_run_without_an_owner_at_once(subject: Subject) -> None:
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
    assert (await runs.approvals.pending()).calls == []


async def test_a_cancel_of_a_running_run_is_reported_to_its_owner(subject: Subject) -> None:
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
        done = await runs.commit(claim, b"x", turn=1, status="interrupted", approval_requests=asks)
        assert done.status == "cancelled"
    else:
        assert await runs.release(claim) == "cancelled"
    assert (await runs.read("run-1")).status == "cancelled"
    assert (await runs.approvals.pending()).calls == []


async def test_a_run_that_completes_before_it_reads_a_cancel_is_complete(
    subject: Subject,
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.cancel("run-1")
    assert (await runs.commit(claim, b"x", turn=1, status="completed")).status == "completed"
