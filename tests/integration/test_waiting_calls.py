"""Producers that wait for calls of named sessions, and what a Redis may have lost meanwhile."""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import uuid4

import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client import NamedSession
from capsule_tasks.client.watching import watcher
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import CallIdTaken, InvalidSetting, NoResult
from capsule_tasks.protocol.calls import task_of_session
from capsule_tasks.protocol.events import Ended, Outcome
from tests.integration.named_sessions import FakeOwner, listed
from tests.sessions import HANG_S

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes


@pytest.fixture
def app(valkey_url: str, prefix: str) -> Celery:
    app = Celery(broker=valkey_url, backend=valkey_url)
    app.conf.update(capsule_redis_url=valkey_url, capsule_prefix=prefix)
    return app


@pytest.fixture
def session(app: Celery) -> NamedSession:
    return Capsule(app).session(uuid4().hex)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers look after their calls at once, and again and again."""
    monkeypatch.setattr(watcher, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(watcher, "LOOK_AGAIN_S", 0.05)


async def lose_listing(app: Celery, session: NamedSession) -> None:
    store = (await watch_thread.watcher(app)).sessions
    ((wanted,), _) = await store.take_wanted(session.profile, 10)
    assert await store.unwant(session.profile, wanted)


@pytest.mark.usefixtures("soon")
async def test_a_session_whose_listing_was_lost_is_listed_again_while_a_producer_waits(
    app: Celery, session: NamedSession
) -> None:
    execution = await session.aexecute("6 * 7")
    await lose_listing(app, session)
    waiting = asyncio.create_task(execution.aget())
    await listed(app, session)
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        assert await waiting == 42


@pytest.mark.usefixtures("soon")
async def test_a_session_whose_owner_died_unseen_is_listed_again_while_its_call_runs(
    app: Celery, session: NamedSession
) -> None:
    async with FakeOwner(app, session.id) as owner:
        execution = await session.aexecute("6 * 7")
        await owner.claim(await owner.next_call())
    watching = asyncio.create_task(anext(execution.aevents("999999999999999-0")))
    await listed(app, session)
    watching.cancel()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["aget", "get", "events"])
async def test_a_call_that_redis_has_lost_ends_and_says_that_it_may_have_run(
    app: Celery, session: NamedSession, how: str
) -> None:
    execution = await session.aexecute("6 * 7")
    await (await watch_thread.watcher(app)).sessions.forget_session(session.id)
    if how != "events":
        waiting = execution.aget if how == "aget" else partial(asyncio.to_thread, execution.get)
        with pytest.raises(NoResult, match=r"does not know the call.* may have run"):
            await waiting(HANG_S)
    else:
        (ended,) = [event.message async for event in execution.aevents()]
        assert isinstance(ended, Ended)
        assert (ended.outcome, ended.type) == (Outcome.LOST, "CallLost")


@pytest.mark.usefixtures("soon")
async def test_a_call_whose_end_was_lost_ends(app: Celery, session: NamedSession) -> None:
    async with FakeOwner(app, session.id) as owner:
        execution = await session.aexecute("6 * 7")
        begun = await owner.next_call()
        await owner.store.done(session.id, owner.token, begun.seq)
        with pytest.raises(NoResult, match="it has ended, but how it ended has expired"):
            await execution.aget(HANG_S)


@pytest.mark.usefixtures("soon")
async def test_a_profile_that_no_worker_hosts_is_logged_once_and_shown(
    app: Celery, session: NamedSession, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await session.aexecute("1"), await session.aexecute("2")
    assert (await session.ainfo()).hosts == 0
    waiting = [asyncio.create_task(each.aget()) for each in (first, second)]
    async with asyncio.timeout(HANG_S):
        while not caplog.records:
            await asyncio.sleep(0.01)
    async with FakeOwner(app, session.id) as owner:
        for task in waiting:
            await owner.run_next()
            await task
    (record,) = caplog.records
    of_app = await watch_thread.watcher(app)
    async with of_app.ringing(of_app.sessions.wanted_channel("sandbox"), asyncio.Event()):
        assert (await session.ainfo()).hosts == 1
    assert f"of session {session.id!r} waits: no worker hosts sessions of profile 'sandbox'" in (
        record.getMessage()
    )


async def test_an_id_of_a_call_of_another_session_is_refused(
    app: Celery, session: NamedSession
) -> None:
    other = Capsule(app).session("other")
    mine = await session.aexecute("1", call_id="twice")
    await other.aexecute("2", call_id="twice")
    store = (await watch_thread.watcher(app)).store
    ended = Ended(outcome=Outcome.CANCELLED)
    await store.end_unclaimed("twice", ended, task=task_of_session(session.id), group="", index=-1)
    with pytest.raises(CallIdTaken) as taken:
        await other.aexecute("2", call_id="twice")
    mistake = f"'twice' is the id of a call of session {session.id!r}, not of 'other'"
    assert str(taken.value) == mistake
    await session.aexecute("1", call_id="twice")  # its own call is known
    assert [event async for event in mine.aevents()]


async def test_a_session_that_has_begun_anew_says_so(
    app: Celery, session: NamedSession, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert not (await session.aexecute("1")).has_begun_anew
    await (await watch_thread.watcher(app)).sessions.forget_session(session.id)
    assert (await session.aexecute("1")).has_begun_anew
    assert "has begun anew, with an empty namespace" in caplog.text
    assert not (await session.aexecute("1")).has_begun_anew


async def test_a_profile_that_the_app_does_not_configure_is_refused(
    app: Celery, session: NamedSession
) -> None:
    app.conf.capsule_code_profiles = {"numpy": {}, "plain": {}}
    with pytest.raises(InvalidSetting) as refused:
        await session.aexecute("1")
    assert str(refused.value) == (
        "profile = 'sandbox': must be one of capsule_code_profiles: numpy, plain"
    )


def test_a_limit_that_is_no_count_is_refused_by_name(app: Celery) -> None:
    with pytest.raises(TypeError, match="limit must be of type int, not 'a'"):
        Capsule(app).sessions(limit="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit = 0: must be how many sessions, from 1"):
        Capsule(app).sessions(limit=0)
