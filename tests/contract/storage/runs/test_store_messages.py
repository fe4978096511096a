"""What travels with a run: its message, replies of models, the result or error of its end."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import (
    CallChanged,
    InvalidSetting,
    RunClaimLost,
    RunConflict,
    RunEnded,
    RunTooLarge,
)
from capsule_tasks.storage import PlannedCall, RunUsage
from tests.contract.storage.runs.subjects import Subject, ask


async def test_a_message_is_kept_until_a_claim_brings_another(subject: Subject) -> None:
    runs = subject.runs()
    await subject.worker("w1")
    about = {"schema": "1.2", "agent": "a"}
    await runs.create("run-1", "user-42", b"", message=b"\x00 first", **about)
    assert (await runs.read("run-1", with_snapshot=False)).message == b"\x00 first"
    claim = await runs.claim("run-1", "w1")
    assert claim.message == b"\x00 first"
    await runs.release(claim)
    claims = [
        await runs.claim("run-1", "w1", message=b"with a chord", operation_id="one")
        for _ in range(2)
    ]
    assert claims[0] == claims[1]
    assert claims[0].message == b"with a chord"
    await runs.release(claims[0])
    assert (await runs.claim("run-1", "w1")).message == b"with a chord"


async def test_usage_is_kept_with_each_turn(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    assert claim.usage == RunUsage()
    usage = RunUsage(requests=2, input_tokens=30, output_tokens=4, time_ms=500)
    claim = (await runs.commit(claim, b"x", turn=1, usage=usage)).claim
    assert claim.usage == usage
    await runs.release(claim)
    claim = await runs.claim("run-1", "w1")
    assert claim.usage == usage
    await runs.commit(claim, b"x", turn=2, status="completed")
    assert (await runs.read("run-1")).usage == usage
    with pytest.raises(InvalidSetting, match="usage = 3: must be a RunUsage"):
        await runs.commit(claim, b"x", turn=3, usage=3)


async def test_a_decided_call_is_known_until_the_next_turn(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    requests = [ask("c1"), ask("c2")]
    await runs.commit(claim, b"x", turn=1, status="interrupted", approval_requests=requests)
    assert (await runs.read("run-1")).decided == ()
    await runs.approvals.approve("run-1", "c2")
    record = await runs.read("run-1", with_snapshot=False)
    assert (record.decided, [each.call_id for each in record.pending]) == (("c2",), ["c1"])
    await runs.commit(await runs.claim("run-1", "w1"), b"y", turn=2)
    assert (await runs.read("run-1")).decided == ()


async def test_replies_of_models_come_with_the_next_claim(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    assert claim.journal == {}
    await runs.journal(claim, "call-7/m1", b"\x00\xff")
    await runs.journal(claim, "m2", b"replaced")
    await runs.journal(claim, "m2", b"second")
    await runs.release(claim)
    claim = await runs.claim("run-1", "w1")
    assert claim.journal == {"call-7/m1": b"\x00\xff", "m2": b"second"}
    claim = (await runs.commit(claim, b"x", turn=1)).claim
    assert claim.journal == {}
    await runs.release(claim)
    assert (await runs.claim("run-1", "w1")).journal == {}


async def test_replies_are_journaled_with_the_calls_that_come_of_them(subject: Subject) -> None:
    runs = subject.runs()
    first = await subject.claimed(runs)
    await runs.journal(first, "m1", b"1")
    call = PlannedCall("c1", "f")
    starts = await runs.start_calls(first, [call], replies={"m2": b"2", "call-7/m1": b"\xff"})
    assert [each.state for each in starts.calls] == ["go"]
    with pytest.raises(CallChanged):
        await runs.start_calls(first, [PlannedCall("c1", "other")], replies={"m3": b"3"})
    await runs.release(first)
    second = await runs.claim("run-1", "w1")
    assert second.journal == {"m1": b"1", "m2": b"2", "call-7/m1": b"\xff"}
    with pytest.raises(RunClaimLost):
        await runs.start_calls(first, [], replies={"m3": b"3"})
    third = (await runs.commit(second, b"x", turn=1)).claim
    with pytest.raises(RunConflict):
        await runs.start_calls(second, [], replies={"m3": b"late"})
    await runs.release(third)
    assert (await runs.claim("run-1", "w1")).journal == {}


async def test_a_run_that_is_parked_inside_its_turn_keeps_the_replies(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.journal(claim, "m1", b"reply")
    request = ask("c9")
    await runs.commit(
        claim, b"x", turn=claim.turn, status="interrupted", approval_requests=[request]
    )
    await runs.approvals.approve("run-1", "c9")
    claim = await runs.claim("run-1", "w1")
    assert claim.journal == {"m1": b"reply"}
    await runs.commit(claim, b"x", turn=claim.turn, status="completed")


async def test_only_the_owner_journals_and_only_in_its_turn(subject: Subject) -> None:
    """A reply that was sent before a commit and arrived after it was taken for the next turn's."""
    runs = subject.runs()
    first = await subject.claimed(runs)
    second = (await runs.commit(first, b"x", turn=1)).claim
    with pytest.raises(RunConflict):
        await runs.journal(first, "m1", b"late")
    await runs.release(second)
    with pytest.raises(RunClaimLost):
        await runs.journal(second, "m1", b"late")
    assert (await runs.claim("run-1", "w1")).journal == {}


async def test_a_journaled_reply_is_answered_with_a_cancel(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    assert await runs.journal(claim, "m1", b"1") is None
    await runs.cancel("run-1", by="ann")
    assert await runs.journal(claim, "m2", b"2") == "ann"


async def test_an_end_keeps_its_result_or_its_error(subject: Subject) -> None:
    runs = subject.runs()
    for status, ends_with in (("completed", "result"), ("failed", "error")):
        claim = await subject.claimed(runs, status, f"{status}-worker")
        await runs.journal(claim, "m1", b"reply")
        about = {ends_with: b"\x00 what it came to"}
        await runs.commit(claim, b"x", turn=1, status=status, **about)
        record = await runs.read(status, with_snapshot=False)
        with pytest.raises(RunEnded, match=status) as refused:
            await runs.claim(status, f"{status}-worker")
        for one in (record, refused.value):
            assert getattr(one, ends_with) == b"\x00 what it came to"
            assert {one.result, one.error} == {b"", b"\x00 what it came to"}


async def test_a_run_that_is_cancelled_in_place_of_parking_has_no_result(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    await runs.cancel("run-1")
    await runs.commit(claim, b"x", turn=1, status="interrupted", approval_requests=[ask()])
    with pytest.raises(RunEnded) as refused:
        await runs.claim("run-1", "w1")
    assert (refused.value.status, refused.value.result, refused.value.error) == (
        "cancelled",
        b"",
        b"",
    )


async def test_what_is_too_large_or_out_of_place_is_refused(subject: Subject) -> None:
    runs = subject.runs(max_snapshot_bytes=10, max_output_bytes=3, max_journal_bytes=5)
    claim = await subject.claimed(runs)
    with pytest.raises(RunTooLarge, match="message has 11 bytes, over the limit of 10"):
        await runs.create("run-2", "s", b"", message=b"x" * 11, schema="1", agent="a")
    with pytest.raises(RunTooLarge, match="message"):
        await runs.claim("run-1", "w1", message=b"x" * 11)
    with pytest.raises(RunTooLarge, match="result"):
        await runs.commit(claim, b"x", turn=1, status="completed", result=b"1234")
    with pytest.raises(InvalidSetting, match="error"):
        await runs.commit(claim, b"x", turn=1, error=b"no")
    with pytest.raises(RunTooLarge, match="the reply 'm1'"):
        await runs.journal(claim, "m1", b"123456")
    await runs.journal(claim, "m1", b"123")
    with pytest.raises(RunTooLarge, match="the journal of the turn has 6 bytes"):
        await runs.journal(claim, "m2", b"456")
    for wrong in ("", 5):
        with pytest.raises(InvalidSetting, match="key"):
            await runs.journal(claim, wrong, b"1")
    with pytest.raises(InvalidSetting, match="bytes"):
        await runs.journal(claim, "m1", "text")
