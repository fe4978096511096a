"""Nobody has to remember a run: lapsed owners, messages that were not sent, lists of runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import (
    InvalidSetting,
    LeaseLost,
    LeaseMissing,
    RunClaimed,
    RunClaimLost,
    RunEnded,
    StorageError,
)
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import OwnerKeys, run_owners
from capsule_tasks.storage.runs import keeping, scripts
from capsule_tasks.storage.runs.locations import Place, RunLocations
from capsule_tasks.storage.runs.run_index import RunIndex
from capsule_tasks.storage.runs.types import Claim, PlannedCall
from capsule_tasks.storage.scripts import Code
from tests.contract.storage.runs.subjects import Subject, ask


async def held(subject: Subject, owner: str) -> list[bytes]:
    """What a lapsed owner is recorded to hold."""
    call = scripts.run_held.call(OwnerKeys(owner, subject.prefix), count=100, holds=[])
    return list((await subject.call(call))[1:])


async def lapse(subject: Subject, lease: object, owner: str) -> None:
    """End a lease, and let the time pass at which it would have ended."""
    await lease.release()  # type: ignore[attr-defined]
    call = scripts.run_owners.call(
        run_owners(subject.prefix), owner=owner, in_ms=-1, ttl_ms=1000, max_due=0, incarnations=[]
    )
    await subject.call(call)


async def test_runs_of_a_lapsed_owner_are_queued_as_they_were_committed(subject: Subject) -> None:
    runs, keeper = subject.runs(), subject.runs()
    lease = await subject.worker("w1")
    for number in range(5):
        await runs.create(f"run-{number}", f"user-{number}", b"new", schema="1", agent="a")
    claims = [await runs.claim(f"run-{number}", "w1") for number in range(5)]
    await runs.commit(claims[1], b"one", turn=1)
    await runs.journal(claims[2], "m1", b"reply")
    await runs.cancel("run-3", by="ann")
    await runs.commit(claims[4], b"over", turn=1, status="completed")
    sweep = await keeper.requeue_lapsed()
    assert sweep.requeued == []
    assert 590 < sweep.next_in_s <= 600
    await lapse(subject, lease, "w1")
    sweep = await keeper.requeue_lapsed()
    assert {each.run_id: each.status for each in sweep.requeued} == {
        "run-0": "queued",
        "run-1": "queued",
        "run-2": "queued",
        "run-3": "cancelled",
    }
    for each in sweep.requeued:
        assert (await runs.read(each.run_id)).updated_us == each.updated_us
    assert sweep.next_in_s is None
    assert await held(subject, "w1") == []
    await subject.worker("w2")
    assert (await runs.claim("run-1", "w2")).snapshot == b"one"
    assert (await runs.claim("run-2", "w2")).journal == {"m1": b"reply"}
    with pytest.raises(RunEnded, match="cancelled"):
        await runs.claim("run-3", "w2")
    with pytest.raises(RunClaimLost):
        await runs.commit(claims[0], b"late", turn=1)


async def test_one_of_many_keepers_is_told_of_each_run(subject: Subject) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    for number in range(4):
        await runs.create(f"run-{number}", f"user-{number}", b"", schema="1", agent="a")
        await runs.claim(f"run-{number}", "w1")
    await lapse(subject, lease, "w1")
    sweeps = await asyncio.gather(*(subject.runs().requeue_lapsed() for _ in range(4)))
    told = sorted(each.run_id for sweep in sweeps for each in sweep.requeued)
    assert told == ["run-0", "run-1", "run-2", "run-3"]


async def test_a_sweep_queues_no_more_than_its_limit_and_comes_again(subject: Subject) -> None:
    runs = subject.runs()
    leases = [await subject.worker(f"w{number}") for number in range(2)]
    for number in range(6):
        await runs.create(f"run-{number}", "user-42", b"", schema="1", agent="a")
        await runs.claim(f"run-{number}", f"w{number % 2}")
    for number, lease in enumerate(leases):
        await lapse(subject, lease, f"w{number}")
    told: list[str] = []
    for _ in range(3):
        sweep = await runs.requeue_lapsed(limit=2)
        assert (len(sweep.requeued), sweep.next_in_s) == (2, 0.0)
        told += [each.run_id for each in sweep.requeued]
    assert sorted(told) == [f"run-{number}" for number in range(6)]
    while sweep.next_in_s is not None:
        sweep = await runs.requeue_lapsed(limit=2)
        assert sweep.requeued == []


async def test_only_the_run_of_a_lapsed_owner_is_queued(subject: Subject) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    await subject.worker("w2")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    await runs.claim("run-1", "w1")
    with pytest.raises(RunClaimed, match="'w1'"):
        await runs.requeue("run-1", "w1")
    await lease.release()
    claim = await runs.claim("run-1", "w2")
    assert await runs.requeue("run-1", "w1") is None
    assert await runs.release(claim) == "queued"
    assert await runs.requeue("run-1", "w1") is None
    assert (await runs.read("run-1")).status == "queued"


@pytest.mark.parametrize("how", ["end", "park", "release", "refused"])
async def test_an_owner_that_has_let_go_of_a_run_does_not_hold_it(
    subject: Subject, how: str
) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    claim = await runs.claim("run-1", "w1")
    if how == "end":
        await runs.commit(claim, b"", turn=1, status="completed")
    elif how == "park":
        await runs.commit(claim, b"", turn=1, status="interrupted", approval_requests=[ask()])
    elif how == "release":
        await runs.release(claim)
    else:
        with pytest.raises(RunClaimed):
            await runs.claim("run-1", "w1")
    await lease.release()
    assert len(await held(subject, "w1")) == (1 if how == "refused" else 0)


async def test_a_claim_is_held_although_an_earlier_one_is_let_go_of_late(subject: Subject) -> None:
    """The run was claimed again by the worker that had just released it."""
    runs = subject.runs()
    lease = await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    first = await runs.claim("run-1", "w1")
    await runs.release(first)
    await runs.claim("run-1", "w1")
    with pytest.raises(RunClaimLost):
        await runs.release(first)
    hold = scripts.run_hold.call(
        OwnerKeys("w1", subject.prefix), ttl_ms=60_000, count=0, holds=[first.hold]
    )
    await subject.call(hold)
    await lapse(subject, lease, "w1")
    assert [each.run_id for each in (await runs.requeue_lapsed()).requeued] == ["run-1"]


async def test_an_owner_without_a_lease_is_known_once_it_has_one(subject: Subject) -> None:
    """It was forgotten between its first claim, which was refused, and its lease."""
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    with pytest.raises(LeaseMissing):
        await runs.claim("run-1", "w1")
    assert (await runs.requeue_lapsed()).next_in_s is None
    lease = await subject.worker("w1")
    await runs.claim("run-1", "w1")
    await lapse(subject, lease, "w1")
    assert len((await runs.requeue_lapsed()).requeued) == 1
    with pytest.raises(LeaseLost):
        await runs.claim("run-1", "w1")


async def test_a_claim_that_comes_after_its_owners_runs_were_queued_is_found(
    subject: Subject,
) -> None:
    """The owner stood still between its hold and its claim, and died after the claim."""
    runs = subject.runs()
    core = runs.core if subject.face == "async" else runs.face.core
    lease = await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    real, held = core.owners.hold, list[int]()

    def hold(*args: str) -> object:
        return (yield from real(*args)) if not held else (held.pop(), held.pop())

    hold_of_w1, held_ms = await subject.drive(real("w1", "run-1", "run_claim:late"))
    await lapse(subject, lease, "w1")
    sweep = await runs.requeue_lapsed()
    assert sweep.requeued == []
    assert 100 < sweep.next_in_s <= 120
    core.owners.hold = hold
    held[:] = [held_ms, hold_of_w1]
    assert (await runs.claim("run-1", "w1", operation_id="late")).owner == "w1"
    await lapse(subject, lease, "w1")
    assert [each.run_id for each in (await runs.requeue_lapsed()).requeued] == ["run-1"]
    # A claim that is later than that is refused.
    held[:] = [held_ms - 31_000, hold_of_w1]
    with pytest.raises(LeaseLost):
        await runs.claim("run-1", "w1")
    assert (await runs.read("run-1")).status == "queued"


async def test_holds_of_claims_that_never_came_are_dropped_in_the_end(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = subject.runs()
    core = runs.core if subject.face == "async" else runs.face.core
    lease = await subject.worker("w1")
    for number in range(5):
        await runs.create(f"run-{number}", "user-42", b"", schema="1", agent="a")
        await subject.drive(core.owners.hold("w1", f"run-{number}", "run_claim:x"))
    await runs.claim("run-4", "w1")
    await lapse(subject, lease, "w1")
    told = [each.run_id for each in (await runs.requeue_lapsed()).requeued]
    assert told == ["run-4"]
    # The second hold of the run that was queued may be that of another claim.
    assert len(await held(subject, "w1")) == 5
    monkeypatch.setattr(keeping, "IDLE_MS", 0)
    await lapse(subject, lease, "w1")
    sweep = await runs.requeue_lapsed()
    assert (sweep.requeued, sweep.next_in_s) == ([], None)
    assert await held(subject, "w1") == []


async def test_a_claim_that_was_refused_is_not_granted_to_a_lost_attempt_of_it(
    subject: Subject,
) -> None:
    """The attempt was on its way to Redis while its repeat was refused."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await subject.worker("w2")
    with pytest.raises(RunClaimed):
        await runs.claim("run-1", "w2", operation_id="mine")
    await runs.release(claim)
    call = scripts.run_claim.call(
        RunLocations(RunSettings(prefix=subject.prefix)).keys("user-42", "run-1"),
        operation_id="run_claim:mine",
        ttl_ms=1000,
        incarnation="w2",
        steal=0,
        readable=b"\x90",
        listed=b"\x80",
        message=b"",
        held_ms=2**52,
    )
    with pytest.raises(StorageError):
        await subject.drive(refusing_abandoned(call))
    assert (await runs.read("run-1")).status == "queued"


def refusing_abandoned(call: Any) -> Any:
    """The reply of a script as it is; a driver would go on under another name."""
    reply = yield call
    if reply[0] == Code.ABANDONED:
        raise StorageError("abandoned")
    return reply


# --- messages that were not sent ------------------------------------------------------------------


async def unsent(subject: Subject, runs: object) -> dict[str, str]:
    """Runs that are found unsent once the time for sending them has passed, by status."""
    index = RunIndex(RunSettings(prefix=subject.prefix))
    for entry, _ in await subject.drive(index.page(None, None, "0", 100)):
        await subject.drive(index.postpone(entry, -1))
    found = await runs.queued_unsent()  # type: ignore[attr-defined]
    return {record.run_id: record.status for record in found.runs}


async def test_a_new_run_is_found_until_its_message_is_noted_as_sent(subject: Subject) -> None:
    runs = subject.runs()
    about = {"schema": "1", "agent": "a"}
    created = await runs.create("run-1", "user-42", b"", message=b"m", **about)
    early = await runs.queued_unsent()
    assert early.runs == []
    assert 0 < early.next_in_s <= 5
    assert await unsent(subject, runs) == {"run-1": "queued"}
    again = await runs.queued_unsent()
    assert again.runs == [], "two processes were told of it at once"
    assert 0 < again.next_in_s <= 5
    record = await runs.read("run-1")
    assert (record.message, record.unsent_us) == (b"m", created.updated_us)
    await runs.note_sent("run-1", created.updated_us)
    assert (await runs.read("run-1")).unsent_us == 0
    assert await unsent(subject, runs) == {}


async def test_a_late_note_is_about_the_message_before(subject: Subject) -> None:
    """It came when the run had been claimed, parked, and decided on by a process that died."""
    runs = subject.runs()
    await subject.worker("w1")
    created = await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    claim = await runs.claim("run-1", "w1")
    await runs.commit(claim, b"", turn=1, status="interrupted", approval_requests=[ask()])
    assert await unsent(subject, runs) == {}
    resolved = await runs.approvals.approve("run-1", "call-1")
    await runs.note_sent("run-1", created.updated_us)
    assert await unsent(subject, runs) == {"run-1": "queued"}
    await runs.note_sent("run-1", resolved.updated_us)
    assert await unsent(subject, runs) == {}


@pytest.mark.parametrize("how", ["release", "requeue", "expire", "cancel queued", "cancel parked"])
async def test_whatever_queues_or_cancels_a_run_needs_a_message(subject: Subject, how: str) -> None:
    runs = subject.runs()
    lease = await subject.worker("w1")
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    expected, updated_us = "queued", 0
    if how == "cancel queued":
        cancelled = await runs.cancel("run-1")
        assert cancelled.resume
        expected, updated_us = "cancelled", cancelled.updated_us
    else:
        claim = await runs.claim("run-1", "w1")
        assert await unsent(subject, runs) == {}, "the claim shows that a message arrived"
        asks = [ask(expires_in_s=0.001 if how == "expire" else None)]
        if how == "release":
            await runs.release(claim)
        elif how == "requeue":
            await lease.release()
            updated_us = (await runs.requeue("run-1", "w1")).updated_us
        else:
            parking = {"turn": 1, "status": "interrupted", "approval_requests": asks}
            await runs.commit(claim, b"", **parking)
            if how == "expire":
                expired = await runs.approvals.expire("run-1")
                while not expired.calls:
                    expired = await runs.approvals.expire("run-1")
                updated_us = expired.updated_us
            else:
                cancelled = await runs.cancel("run-1")
                assert cancelled.resume
                expected, updated_us = "cancelled", cancelled.updated_us
    assert await unsent(subject, runs) == {"run-1": expected}
    await runs.note_sent("run-1", updated_us or (await runs.read("run-1")).unsent_us)
    assert await unsent(subject, runs) == {}


async def test_a_cancel_of_a_running_run_needs_no_message(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    assert not (await runs.cancel("run-1")).resume
    await runs.commit(claim, b"", turn=1, status="cancelled")
    assert await unsent(subject, runs) == {}


async def test_a_decision_before_the_commit_leaves_the_run_unsent(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("c1"), ask("c2"))
    await runs.approvals.approve("run-1", "c1", always=True)
    claim = await runs.claim("run-1", "w1")
    parking = {"turn": 2, "status": "interrupted", "approval_requests": [ask("c3")]}
    done = await runs.commit(claim, b"x", **parking)
    assert done.status == "queued"
    assert await unsent(subject, runs) == {"run-1": "queued"}


# --- lists ----------------------------------------------------------------------------------------


async def listed(runs: object, **query: object) -> list[str]:
    page = await runs.list(**query)  # type: ignore[attr-defined]
    assert all(record.snapshot == b"" for record in page.runs)
    return [record.run_id for record in page.runs]


async def test_runs_are_listed_by_status_and_by_agent(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("w1")
    for run_id, agent in (("r1", "a"), ("r2", "b"), ("r3", "a"), ("r4", "a"), ("r5", "a")):
        await runs.create(run_id, run_id, b"snapshot", schema="1", agent=agent)
    for run_id, status in (("r3", "interrupted"), ("r4", "completed"), ("r5", "running")):
        claim = await runs.claim(run_id, "w1")
        asks = [ask()] if status == "interrupted" else []
        await runs.commit(claim, b"x", turn=1, status=status, agent="z", approval_requests=asks)
    assert await listed(runs, status="queued") == ["r2", "r1"]
    assert await listed(runs, status="queued", newest_first=False) == ["r1", "r2"]
    assert await listed(runs, status="queued", agent="a") == ["r1"]
    assert await listed(runs, agent="a", newest_first=False) == ["r1", "r3", "r4", "r5"]
    assert await listed(runs, agent="z") == [], "it is listed under its first agent"
    for status, run_id in (("interrupted", "r3"), ("completed", "r4"), ("running", "r5")):
        assert await listed(runs, status=status) == [run_id]
    await runs.approvals.reject("r3", "call-1")
    assert await listed(runs, status="interrupted") == []
    assert await listed(runs, status="queued") == ["r3", "r2", "r1"]
    await runs.cancel("r2")
    assert await listed(runs, status="cancelled") == ["r2"]
    assert (await runs.read("r4")).start_agent == "a"


async def test_a_list_comes_in_pages(subject: Subject) -> None:
    runs = subject.runs()
    for number in range(5):
        await runs.create(f"r{number}", "user-42", b"", schema="1", agent="a")
    for newest_first, expected in ((True, ["r4", "r3", "r2", "r1", "r0"]), (False, None)):
        found, cursor = list[str](), None
        for _ in range(3):
            page = await runs.list(limit=2, cursor=cursor, newest_first=newest_first)
            found += [record.run_id for record in page.runs]
            cursor = page.cursor
        assert cursor is None
        assert found == (expected or ["r0", "r1", "r2", "r3", "r4"])
    for wrong in ({"cursor": "x"}, {"status": "over"}, {"limit": 0}, {"agent": 5}):
        with pytest.raises(InvalidSetting):
            await runs.list(**wrong)


async def test_entries_that_are_wrong_are_not_listed_and_a_lost_one_is_put_back(
    subject: Subject,
) -> None:
    settings = RunSettings(prefix=subject.prefix)
    runs, index = subject.runs(), RunIndex(settings)
    await runs.create("r1", "user-42", b"", schema="1", agent="a")
    place = Place("r1", "user-42", "a", RunLocations(settings).keys("user-42", "r1"))
    gone = Place("gone", "user-42", "a", RunLocations(settings).keys("user-42", "gone"))
    await subject.drive(index.add(place, "completed"))
    await subject.drive(index.add(gone, "queued"))
    assert await listed(runs) == ["r1"]
    entries = [entry for entry, _ in await subject.drive(index.page(None, None, "0", 100))]
    assert len(entries) == 3, "an entry was dropped whose run may be about to change"
    for entry in entries:
        await subject.drive(index.drop(entry))
    assert await listed(runs) == []
    assert await runs.reindex("r1") == "queued"
    assert await listed(runs, status="queued") == ["r1"]


async def test_a_change_is_listed_again_if_it_was_listed_too_long_ago(subject: Subject) -> None:
    """Its writer had stood still, and a reader may have dropped the entry in the meantime."""
    settings = RunSettings(prefix=subject.prefix)
    runs, index = subject.runs(), RunIndex(settings)
    await subject.parked(runs, ask())
    core = runs.core if subject.face == "async" else runs.face.core
    real, calls = core.run_index.add, list[str]()

    def add(place: Place, status: str) -> object:
        calls.append(status)
        added_ms = yield from real(place, status)
        return added_ms - 31_000 if len(calls) == 1 else added_ms

    core.run_index.add = add
    assert (await runs.approvals.approve("run-1", "call-1")).status == "queued"
    assert calls == ["queued", "queued"]
    assert len(await subject.drive(index.page(None, "queued", "0", 9))) == 1


async def test_lost_owners_are_counted_until_the_run_makes_progress(subject: Subject) -> None:
    runs = subject.runs()
    await runs.create("run-1", "user-42", b"", schema="1", agent="a")
    lives = 0

    async def claimed() -> Claim:
        nonlocal lives
        lives += 1
        leases.append(await subject.worker(f"w{lives}"))
        claim: Claim = await runs.claim("run-1", f"w{lives}")
        return claim

    leases: list[Any] = []
    assert (await claimed()).losses == 0
    await leases[-1].release()
    assert (await claimed()).losses == 1, "a claim takes the run of an owner that is gone"
    await leases[-1].release()
    await runs.requeue("run-1", "w2")
    claim = await claimed()
    assert claim.losses == 2, "a keeper takes it away"
    await runs.release(claim)
    claim = await claimed()
    assert claim.losses == 2, "an owner that hands a run back is not lost"
    await runs.journal(claim, "m1", b"reply")
    await leases[-1].release()
    claim = await claimed()
    assert claim.losses == 1, "a reply of a model is progress"
    await runs.start_calls(claim, [PlannedCall("c1", "f", retry=True)])
    await leases[-1].release()
    claim = await claimed()
    assert claim.losses == 1, "so is a call"
    await runs.start_calls(claim, [PlannedCall("c1", "f", retry=True)])
    await leases[-1].release()
    claim = await claimed()
    assert claim.losses == 2, "a call that is made again is none"
    await runs.commit(claim, b"", turn=1)
    await leases[-1].release()
    assert (await claimed()).losses == 1, "a commit is progress"
