"""Calls and owners of named sessions: who gets what, in which order, and what stays listed."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import (
    InvalidId,
    LeaseLost,
    NamedSessionBusy,
    SessionCallsFull,
    SessionClosing,
    SessionHeld,
    SessionMismatch,
    SessionNotLive,
    SessionOwnerLost,
    SessionUnfinished,
    SessionUnknown,
    SessionUnlisted,
)
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import History
from capsule_tasks.storage.sessions.types import (
    BegunCall,
    CallLook,
    CallPlace,
    SessionEntry,
    Submitted,
    Wanted,
)
from tests.contract.storage.sessions.subjects import PROFILE, Subject


async def test_calls_of_a_session_are_begun_in_the_order_in_which_they_were_submitted(
    subject: Subject,
) -> None:
    store = subject.sessions()
    for number in range(3):
        submitted = await subject.submit(f"c{number}", tenant="acme")
        assert submitted == Submitted(number + 1, "", number + 1)
    await subject.worker("w")
    taken = await subject.take("w")
    assert (taken.profile, taken.tenant, taken.waiting) == (PROFILE, "acme", 3)
    assert (taken.begun, taken.checkpoint, taken.executions) == (None, None, 0)
    assert await subject.submit("c3") == Submitted(4, "w", 4)
    for number in range(4):
        call = BegunCall(number + 1, f"c{number}", f"run c{number}".encode(), "acme")
        assert await store.begin("s", taken.token) == call
        assert await store.begin("s", taken.token) == call
        for _ in range(2):
            assert await store.done("s", taken.token, number + 1, cpu_ms=7) == 3 - number
    assert await store.begin("s", taken.token) is None
    info = await store.info("s")
    assert (info.executions, info.cpu_ms, info.unfinished) == (4, 28, 0)
    assert info.created_at is not None
    assert info.used_at is not None
    assert info.created_at <= info.used_at
    for _ in range(2):
        await store.release("s", taken.token)
    assert (await store.info("s")).owner == ""


async def test_a_call_whose_id_is_known_is_not_appended_again(subject: Subject) -> None:
    store = subject.sessions()
    await subject.submit("c")
    assert (await subject.submit("c")).is_known
    await subject.worker("w")
    taken = await subject.take("w")
    begun = await store.begin("s", taken.token)
    assert begun is not None
    assert (await subject.submit("c")).is_known
    await store.done("s", taken.token, begun.seq)
    assert await subject.submit("c") == Submitted(0, "w", 0)
    assert await store.begin("s", taken.token) is None


async def test_a_session_without_an_owner_is_listed_before_its_first_call_is_appended(
    subject: Subject,
) -> None:
    store = subject.sessions()
    with pytest.raises(SessionUnlisted) as refused:
        await store.append("s", "c", b"", profile=PROFILE)
    assert refused.value.token == 0
    with pytest.raises(SessionUnknown):
        await store.info("s")
    await store.want(PROFILE, "s")
    # A worker is faster, finds nothing, and lets the session go.
    await subject.worker("w")
    wanted = await subject.one_wanted()
    taken = await subject.take("w")
    assert taken.waiting == 0
    assert await store.unwant(PROFILE, wanted)
    await store.release("s", taken.token)
    with pytest.raises(SessionUnlisted) as refused:
        await store.append("s", "c", b"", profile=PROFILE, listed_under="0")
    assert refused.value.token == taken.token
    assert await subject.wanted() == []
    assert (await subject.submit("c")).owner == ""
    assert await subject.wanted() == ["s"]


async def test_a_session_that_was_listed_again_is_not_removed_from_the_list(
    subject: Subject,
) -> None:
    store = subject.sessions()
    await subject.submit("c")
    wanted = await subject.one_wanted()
    assert await subject.wanted() == []
    await store.want(PROFILE, "s")
    assert await subject.wanted() == ["s"]
    assert not await store.unwant(PROFILE, wanted)
    again = await subject.one_wanted()
    assert await store.unwant(PROFILE, again)
    assert not await store.unwant(PROFILE, again)
    assert (await store.wanted_state(PROFILE)).sessions == 0
    await store.want(PROFILE, "s")
    assert not await store.unwant(PROFILE, again)


async def test_those_that_wait_longest_are_given_first_and_each_to_one_worker(
    subject: Subject,
) -> None:
    store = subject.sessions()
    for number in range(5):
        await store.want(PROFILE, f"s{number}")
    await store.want(PROFILE, "s0")
    assert (await store.wanted_state(PROFILE)).sessions == 5
    pages = await asyncio.gather(*(store.take_wanted(PROFILE, 2, 600) for _ in range(2)))
    given = sorted(each.session_id for page in pages for each in page.sessions)
    assert given == ["s0", "s1", "s2", "s3"]
    assert (await store.take_wanted(PROFILE, 0)) == ((), 0.0)
    last = await store.take_wanted(PROFILE, 9, 600)
    assert [each.session_id for each in last.sessions] == ["s4"]
    nothing = await store.take_wanted(PROFILE, 9)
    assert nothing.sessions == ()
    assert nothing.next_s is not None
    assert 590 < nothing.next_s <= 600
    assert (await store.take_wanted("other", 9)) == ((), None)


async def test_exactly_one_of_many_workers_takes_a_session(subject: Subject) -> None:
    await subject.submit("c")
    workers = [f"w{number}" for number in range(8)]
    for worker in workers:
        await subject.worker(worker)
    replies = await asyncio.gather(*map(subject.take, workers), return_exceptions=True)
    (taken,) = [reply for reply in replies if not isinstance(reply, BaseException)]
    held = [reply for reply in replies if isinstance(reply, SessionHeld)]
    assert len(held) == 7
    owner = (await subject.sessions().info("s")).owner
    assert {(each.owner, each.token) for each in held} == {(owner, taken.token)}


async def test_a_session_is_taken_from_a_worker_whose_lease_has_lapsed_and_from_no_other(
    subject: Subject,
) -> None:
    store = subject.sessions()
    await subject.submit("c1")
    await subject.submit("c2")
    await subject.worker("w1")
    await subject.worker("w2")
    first = await subject.take("w1")
    begun = await store.begin("s", first.token)
    with pytest.raises(SessionHeld):
        await subject.take("w2")
    await subject.kill("w1")
    second = await subject.take("w2")
    assert second.token > first.token
    assert (second.begun, second.waiting) == (begun, 1)
    with pytest.raises(SessionOwnerLost) as lost:
        await store.begin("s", first.token)
    assert lost.value.owner == "w2"
    with pytest.raises(SessionOwnerLost):
        await store.done("s", first.token, 1)
    with pytest.raises(SessionOwnerLost):
        await store.release("s", first.token, even_unfinished=True)
    assert await store.begin("s", second.token) == begun


async def test_a_take_that_is_repeated_is_the_same(subject: Subject) -> None:
    store = subject.sessions()
    await subject.worker("w")
    first = await store.take("s", "w", profile=PROFILE, operation_id="o")
    assert await store.take("s", "w", profile=PROFILE, operation_id="o") == first
    await store.release("s", first.token)
    with pytest.raises(SessionHeld):
        await store.take("s", "w", profile=PROFILE, operation_id="o")
    again = await subject.take("w")
    assert again.token > first.token
    assert (await subject.take("w")).token > again.token


async def test_a_session_with_unfinished_calls_is_released_only_onto_the_list(
    subject: Subject,
) -> None:
    store = subject.sessions()
    await subject.submit("c1")
    await subject.submit("c2")
    await subject.worker("w")
    wanted = await subject.one_wanted()
    taken = await subject.take("w")
    await store.unwant(PROFILE, wanted)
    await store.begin("s", taken.token)
    with pytest.raises(SessionUnfinished) as refused:
        await store.release("s", taken.token)
    assert refused.value.unfinished == 2
    assert (await store.info("s")).owner == "w"
    await store.release("s", taken.token, even_unfinished=True)
    assert await subject.wanted() == ["s"]
    await store.unwant(PROFILE, await subject.one_wanted())
    await store.release("s", taken.token, even_unfinished=True)
    assert await subject.wanted() == []


async def test_a_reaper_lists_what_a_dead_worker_held(subject: Subject) -> None:
    store = subject.sessions()
    token = await subject.worker("w1")
    for session in ("busy", "idle", "left"):
        await subject.submit(f"c {session}", session)
    await store.hold("w1", token, ["busy", "idle", "left", "never"])
    for _ in range(3):
        wanted = await subject.one_wanted()
        taken = await subject.take("w1", wanted.session_id)
        await store.unwant(PROFILE, wanted)
        begun = await store.begin(wanted.session_id, taken.token)
        assert begun is not None
        if wanted.session_id == "idle":
            await store.done("idle", taken.token, begun.seq)
        if wanted.session_id == "left":  # dies between the release and the listing
            await store._release("left", taken.token, even_unfinished=True)
    assert await subject.wanted() == []
    assert await store.held_sessions("w1") is None
    await subject.kill("w1")
    held = await store.held_sessions("w1")
    assert held is not None
    assert sorted(held) == ["busy", "idle", "left", "never"]
    assert [await store.reap(each, "w1") for each in sorted(held)] == [True, True, True, False]
    assert await store.held_sessions("w1", held) == []
    assert sorted(await subject.wanted()) == ["busy", "left"]
    assert (await store.info("idle")).owner == ""


async def test_a_reaper_lists_a_session_that_a_dead_worker_was_to_close(subject: Subject) -> None:
    store = subject.sessions()
    token = await subject.worker("w1")
    await store.hold("w1", token, ["s"])
    taken = await subject.take("w1")
    await subject.submit("c")
    await store.begin("s", taken.token)
    await store.done("s", taken.token, 1)
    assert not await store.close_session("s")
    await subject.kill("w1")
    for _ in range(2):  # the first reaper may die before it has listed the session
        assert await store.reap("s", "w1")
        assert await subject.wanted() == ["s"]
        await store.unwant(PROFILE, await subject.one_wanted())
    await subject.worker("w2")
    assert (await subject.take("w2")).is_closing


async def test_a_worker_without_a_lease_holds_nothing(subject: Subject) -> None:
    store = subject.sessions()
    token = await subject.worker("w")
    await store.hold("w", token, ["a", "b"])
    await store.hold("w", token, ["c"], ["a"])
    await subject.kill("w")
    with pytest.raises(LeaseLost):
        await store.hold("w", token, ["d"])
    assert sorted(await store.held_sessions("w") or ()) == ["b", "c"]


async def test_a_call_that_cannot_wait_or_does_not_fit_is_refused(subject: Subject) -> None:
    store = subject.sessions(max_waiting=2)
    await subject.submit("c1", on_busy="error")
    with pytest.raises(NamedSessionBusy, match="1 of its calls"):
        await subject.submit("c2", on_busy="error")
    await subject.submit("c2")
    with pytest.raises(SessionCallsFull, match="2 calls wait for session 's'"):
        await store.submit("s", "c3", b"", profile=PROFILE)
    await store.submit("s", "c3", b"", profile=PROFILE, max_waiting=3)
    assert (await store.info("s")).waiting == 3


async def test_a_session_keeps_its_profile_and_its_tenant(subject: Subject) -> None:
    store = subject.sessions()
    await subject.submit("c1", tenant="acme")
    assert (await subject.submit("c2")).waiting == 2
    with pytest.raises(SessionMismatch, match="the profile 'sandbox', not 'other'"):
        await store.submit("s", "c3", b"", profile="other")
    with pytest.raises(SessionMismatch, match="the tenant 'acme', not 'other'"):
        await subject.submit("c3", tenant="other")
    await subject.submit("c1", "free")
    with pytest.raises(SessionMismatch, match="the tenant '', not 'acme'"):
        await subject.submit("c2", "free", tenant="acme")
    await subject.worker("w")
    await subject.take("w", "new")
    assert (await subject.submit("c1", "new", tenant="acme")).owner == "w"


async def test_ids_that_cannot_be_stored_are_refused(subject: Subject) -> None:
    store = subject.sessions()
    for session, call, profile in (("", "c", "p"), ("s", "", "p"), ("s", "c", "x" * 513)):
        with pytest.raises(InvalidId):
            await store.submit(session, call, b"", profile=profile)
    with pytest.raises(InvalidId):
        await store.take("s", "", profile="p")
    assert not await store.unwant("p", Wanted("s", 1))


# --- requests, and the ends of sessions -----------------------------------------------------------


async def test_an_owner_answers_requests_past_the_calls_that_wait(subject: Subject) -> None:
    store = subject.sessions()
    with pytest.raises(SessionUnknown):
        await store.request("s", b"early")
    await subject.submit("c")
    with pytest.raises(SessionNotLive):
        await store.request("s", b"early")
    await subject.worker("w")
    taken = await subject.take("w")
    first = await store.request("s", b"one")
    second = await store.request("s", b"two", request_id="r")
    assert await store.request("s", b"two", request_id="r") == second == "r"
    assert await store.read_reply("s", first) is None
    page = await store.take_requests("s", taken.token)
    assert [(each.request_id, each.payload) for each in page.requests] == [
        (first, b"one"),
        ("r", b"two"),
    ]
    assert not page.is_closing
    after = page.requests[0].entry
    assert (await store.take_requests("s", taken.token, after)).requests == page.requests[1:]
    for _ in range(2):
        await store.reply("s", taken.token, page.requests[0], b"done")
    assert await store.read_reply("s", first) == b"done"
    assert (await store.take_requests("s", taken.token)).requests == page.requests[1:]
    await store.release("s", taken.token, even_unfinished=True)
    await store.reply("s", taken.token, page.requests[1], b"done, too")
    assert await store.read_reply("s", "r") == b"done, too"
    again = await subject.take("w")
    with pytest.raises(SessionOwnerLost):
        await store.reply("s", taken.token, page.requests[1], b"late")
    with pytest.raises(SessionOwnerLost):
        await store.take_requests("s", taken.token)
    assert (await store.take_requests("s", again.token)).requests == ()


async def test_an_idle_session_is_closed_at_once_and_another_by_its_owner(
    subject: Subject,
) -> None:
    store = subject.sessions()
    assert await store.close_session("s")
    await subject.submit("c1", tenant="acme")
    assert not await store.close_session("s")
    with pytest.raises(SessionClosing):
        await subject.submit("c2")
    assert (await subject.submit("c1")).is_known
    await subject.worker("w")
    taken = await subject.take("w")
    assert taken.is_closing
    assert (await store.take_requests("s", taken.token)).is_closing
    with pytest.raises(SessionUnfinished):
        await store.close_session("s", taken.token)
    await store.begin("s", taken.token)
    await store.done("s", taken.token, 1)
    for _ in range(2):
        assert await store.close_session("s", taken.token)
    with pytest.raises(SessionUnknown):
        await store.info("s")
    with pytest.raises(SessionOwnerLost):
        await store.begin("s", taken.token)
    assert (await subject.submit("c1")).is_known
    assert (await subject.submit("c2", tenant="other")).seq == 2
    info = await store.info("s")
    assert (info.tenant, info.executions, info.waiting, info.owner) == ("other", 0, 1, "")
    second = await subject.take("w")
    with pytest.raises(SessionOwnerLost):
        await store.close_session("s", taken.token)
    await store.begin("s", second.token)
    await store.done("s", second.token, 2)
    await store.release("s", second.token)
    assert await store.close_session("s")
    with pytest.raises(SessionUnknown):
        await store.info("s")


async def test_a_session_that_is_forgotten_leaves_nothing_and_its_owner_finds_out(
    subject: Subject,
) -> None:
    store = subject.sessions()
    history = History("s", subject.store, settings=HistorySettings(prefix=subject.prefix))
    await history.add_items([{"n": 1}])
    for number in range(3):
        await subject.submit(f"c{number}")
    await subject.worker("w")
    taken = await subject.take("w")
    await store.request("s", b"r")
    assert sorted([each async for each in store.calls_of("s")]) == ["c0", "c1", "c2"]
    await store.index.record([SessionEntry("s", PROFILE)])
    for _ in range(2):
        await store.forget_session("s")
    for lost in (store.begin("s", taken.token), store.done("s", taken.token, 1)):
        with pytest.raises(SessionOwnerLost):
            await lost
    with pytest.raises(SessionUnknown):
        await store.info("s")
    assert await history.get_items() == []
    assert [each async for each in store.index.entries()] == []
    assert [each async for each in store.calls_of("s")] == []
    with pytest.raises(SessionUnlisted) as refused:
        await store.append("s", "c0", b"", profile=PROFILE, listed_under="0")
    assert refused.value.token == taken.token
    assert await subject.submit("c0") == Submitted(1, "", 1)


async def test_a_session_that_was_taken_and_never_used_is_unknown_after_its_release(
    subject: Subject,
) -> None:
    store = subject.sessions()
    await subject.worker("w")
    taken = await subject.take("w")
    assert (await store.info("s")).created_at is None
    await store.release("s", taken.token)
    with pytest.raises(SessionUnknown):
        await store.info("s")
    assert (await store.submit("s", "c", b"", profile="another")).seq == 1


async def test_a_worker_that_lets_go_leaves_nothing_behind_that_it_may_own(
    subject: Subject,
) -> None:
    store = subject.sessions()
    token = await subject.worker("w")
    for session in ("owned", "unlisted", "idle"):
        await store.hold("w", token, [session])
        await subject.submit("c", session)
        await store.unwant(PROFILE, await subject.one_wanted())
    await subject.take("w", "owned")
    taken = await subject.take("w", "idle")
    await store.begin("idle", taken.token)
    await store.done("idle", taken.token, 1)
    for session in ("owned", "unlisted", "idle"):
        await store.let_go(session, "w", token)
        with pytest.raises(SessionOwnerLost):
            await store.begin(session, taken.token)
    assert sorted(await subject.wanted()) == ["owned", "unlisted"]
    await subject.kill("w")
    assert await store.held_sessions("w") == []


async def test_a_session_is_listed_again_for_a_caller_who_has_waited_long(
    subject: Subject,
) -> None:
    store = subject.sessions()

    async def place() -> str:
        return (await store.look_after("s", "c")).place

    assert await place() == "gone"
    await subject.submit("c")
    await store.unwant(PROFILE, await subject.one_wanted())  # as if the listing were lost
    assert await place() == "unfinished"
    wanted = await subject.one_wanted()
    await subject.worker("w")
    taken = await subject.take("w")
    await store.unwant(PROFILE, wanted)
    assert await store.look_after("s", "c") == CallLook(CallPlace.UNFINISHED, PROFILE)
    assert await subject.wanted() == []
    await subject.kill("w")
    assert await place() == "unfinished"
    assert await subject.wanted() == ["s"]
    again = await subject.take("w")
    assert again.token > taken.token
    await store.begin("s", again.token)
    await store.done("s", again.token, 1)
    assert await store.look_after("s", "c") == CallLook(CallPlace.DONE, PROFILE)
