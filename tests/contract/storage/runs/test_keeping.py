"""Runs of owners that are gone are queued again, by any process."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import LeaseLost, LeaseMissing, RunClaimed, RunClaimLost, RunEnded
from capsule_tasks.storage.keys import OwnerKeys, run_owners
from capsule_tasks.storage.runs import scripts
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
