"""Arguments that are refused, each with its own message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capsule_tasks.errors import (
    InvalidId,
    InvalidSetting,
    RunNotFound,
)
from capsule_tasks.storage.runs.store import SyncLease
from capsule_tasks.storage.runs.types import PlannedCall
from tests.contract.storage.runs.subjects import PRINT, Subject, ask, until

WRONG_DECISIONS: list[dict[str, Any]] = [
    {"call_id": 5},
    {"call_id": ["call-1"]},
    {"by": 5},
    {"roles": "ops"},
    {"roles": 5},
    {"roles": [5]},
    {"always": "no"},
]


async def test_a_decision_of_a_wrong_type_is_refused_and_none_is_taken(subject: Subject) -> None:
    runs = subject.runs()
    await subject.parked(runs, ask("5"), ask("call-1"))
    for wrong in WRONG_DECISIONS:
        about = {"run_id": "run-1", "call_id": "call-1", **wrong}
        with pytest.raises((InvalidId, InvalidSetting)):
            await runs.approvals.approve(**about)
    with pytest.raises(InvalidSetting, match="message"):
        await runs.approvals.reject("run-1", "call-1", message=5)
    assert len((await runs.read("run-1")).pending) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool": 5},
        {"tool": "\ud800"},
        {"agent": None},
        {"fingerprint": 5},
        {"arguments": {}},
        {"may_decide": "ops"},
        {"may_decide": (5,)},
        {"expires_in_s": "1"},
    ],
)
async def test_an_ask_that_cannot_be_kept_binds_the_runs_id_to_no_session(
    subject: Subject, wrong: dict[str, Any]
) -> None:
    runs = subject.runs()
    with pytest.raises(InvalidSetting):
        await runs.create(
            "run-1", "here", b"{}", schema="1", agent="a", approval_requests=[ask(**wrong)]
        )
    assert (await runs.create("run-1", "there", b"{}", schema="1", agent="a")).status == "queued"


async def test_a_header_of_a_wrong_type_is_refused(subject: Subject) -> None:
    runs = subject.runs()
    for header in ({"schema": 5}, {"agent": None}, {"schema": "\ud800"}):
        with pytest.raises(InvalidSetting):
            await runs.create("new", "s", b"{}", **{"schema": "1", "agent": "a", **header})
    with pytest.raises(RunNotFound):
        await runs.read("new")
    claim = await subject.claimed(runs)
    for changes in ({"schema": 5}, {"agent": 5}, {"turn": 2**60}):
        with pytest.raises(InvalidSetting):
            await runs.commit(claim, b"{}", **{"turn": 1, **changes})
    with pytest.raises(InvalidSetting, match="by"):
        await runs.cancel("run-1", by=5)
    assert (await runs.read("run-1")).revision == claim.revision
    await runs.release(claim)
    for readable in ("1.2", [1.2], 5, iter(["1.2"])):
        with pytest.raises(InvalidSetting, match="readable"):
            await runs.claim("run-1", "w1", readable=readable)


JUNK: list[Any] = [None, 5, 1.5, True, "x", b"x", [None], {"a": 1}, object()]


async def test_wrong_types_of_claim_history_items_and_outputs_are_refused(
    subject: Subject,
) -> None:
    """Python's own errors do not say which argument was wrong."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    for junk in JUNK:
        for call in (
            runs.commit(junk, b"", turn=1),
            runs.release(junk),
            runs.start_calls(junk, []),
            runs.finish_calls(junk, {}),
        ):
            with pytest.raises(InvalidSetting, match="claim"):
                await call
        for field in ("token", "revision"):
            forged = replace(claim, **{field: str(junk) if junk == 5 else junk})
            with pytest.raises(InvalidSetting, match=f"claim.{field}"):
                await runs.commit(forged, b"", turn=1)
        if junk is not None:
            with pytest.raises(InvalidSetting, match="history"):
                await runs.commit(claim, b"", turn=1, history=junk)
        if not isinstance(junk, list):
            with pytest.raises(InvalidSetting, match="items"):
                await runs.commit(claim, b"", turn=1, items=junk)
        if not isinstance(junk, dict):
            with pytest.raises(InvalidSetting, match="outputs"):
                await runs.finish_calls(claim, junk)
        if not isinstance(junk, str):
            with pytest.raises(InvalidId, match="run id"):
                await runs.read(junk)
            with pytest.raises(InvalidSetting, match="prefix"):
                SyncLease("w", "redis://localhost", prefix=junk)
    with pytest.raises(InvalidSetting, match="arguments"):
        await runs.commit(
            claim, b"", turn=1, status="interrupted", approval_requests=[ask(arguments=None)]
        )
    assert (await runs.read("run-1")).revision == 1


async def test_an_error_is_no_longer_than_a_screen_however_long_the_value_is(
    subject: Subject,
) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    with pytest.raises(InvalidSetting) as caught:
        await runs.commit(claim, b"", turn=1, status="x" * 1_000_000)
    assert len(str(caught.value)) < 1000


async def test_one_call_twice_in_one_start_is_never_told_to_go(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    for other in (PRINT, "fedcba"):
        with pytest.raises(InvalidSetting, match="there twice"):
            await runs.start_calls(claim, [PlannedCall("c", PRINT), PlannedCall("c", other)])
    with pytest.raises(InvalidSetting, match="retry"):
        await runs.start_calls(claim, [PlannedCall("c", PRINT, retry="no")])  # type: ignore[arg-type]
    starts = await runs.start_calls(claim, [PlannedCall("c", PRINT)])
    assert [each.state for each in starts.calls] == ["go"]
    for outputs in ({"c": "text"}, {"c": 5}, {5: b""}):
        with pytest.raises((InvalidId, InvalidSetting)):
            await runs.finish_calls(claim, outputs)
    starts = await runs.start_calls(claim, [PlannedCall("c", PRINT)])
    assert [each.state for each in starts.calls] == ["uncertain"]


async def test_one_call_asked_for_twice_is_refused(subject: Subject) -> None:
    runs = subject.runs()
    claim = await subject.claimed(runs)
    twice = [ask(), ask(fingerprint="other")]
    with pytest.raises(InvalidSetting, match="there twice"):
        await runs.commit(claim, b"{}", turn=1, status="interrupted", approval_requests=twice)
    assert (await runs.read("run-1")).status == "running"


async def test_iterators_are_refused(subject: Subject) -> None:
    """Calls of a generator were put into the index, and the run then waited for nothing."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    with pytest.raises(InvalidSetting, match="a list or a tuple"):
        await runs.create("new", "s", b"{}", schema="1", agent="a", approval_requests=iter([ask()]))
    with pytest.raises(InvalidSetting, match="a list or a tuple"):
        await runs.commit(claim, b"{}", turn=1, approval_requests=iter([ask()]))
    with pytest.raises(InvalidSetting, match="a list or a tuple"):
        await runs.start_calls(claim, iter([PlannedCall("c", PRINT)]))
    assert (await runs.approvals.pending()).calls == []
    assert (await runs.read("run-1")).revision == claim.revision


async def test_a_sweep_without_a_limit_is_refused(subject: Subject) -> None:
    runs = subject.runs()
    for limit in (0, -1, "all", True):
        with pytest.raises(InvalidSetting, match="limit"):
            await runs.approvals.expire_due(limit=limit)
    with pytest.raises(InvalidSetting, match="agent"):
        await runs.approvals.pending(agent=5)
    with pytest.raises(InvalidSetting, match="cursor"):
        await runs.approvals.pending(cursor=5)


async def test_more_calls_at_once_than_a_script_should_handle_are_refused(
    subject: Subject,
) -> None:
    """With many thousands, expiring failed after its writes, and no caller sent the run on."""
    runs = subject.runs()
    claim = await subject.claimed(runs)
    many = [ask(f"c{number}", expires_in_s=0.001) for number in range(1001)]
    planned = [PlannedCall(each.call_id, PRINT) for each in many]
    for refused in (
        runs.create("new", "s", b"", schema="1", agent="a", approval_requests=many),
        runs.commit(claim, b"", turn=1, status="interrupted", approval_requests=many),
        runs.start_calls(claim, planned),
        runs.finish_calls(claim, {each.call_id: b"" for each in many}),
        runs.start_calls(claim, [], replies={each.call_id: b"" for each in many}),
    ):
        with pytest.raises(InvalidSetting, match="at most 1000"):
            await refused
    assert (await runs.approvals.pending()).calls == []
    await runs.commit(claim, b"", turn=1, status="interrupted", approval_requests=many[1:])

    async def expired() -> Any:
        found = await runs.approvals.expire("run-1")
        return found if found.calls else None

    found = await until(expired)
    assert (len(found.calls), found.resume) == (1000, True)
