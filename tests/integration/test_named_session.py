"""Named sessions from their producer: real storage, and an owner that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule, History
from capsule_tasks.client import NamedSession
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import (
    CheckpointUnreadable,
    InvalidId,
    NamedSessionBusy,
    SessionClosing,
    SessionMismatch,
    SessionRequestFailed,
    SessionUnknown,
    StorageUnavailable,
)
from capsule_tasks.protocol.calls import (
    CheckpointMade,
    NamesListed,
    RequestDone,
    RequestFailed,
)
from capsule_tasks.protocol.events import Ended, InterruptCommand, Outcome, decode_command
from capsule_tasks.protocol.messages import NamespaceEntry
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.settings import HistorySettings
from capsule_tasks.testing.servers import free_port
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


async def test_the_value_of_a_call_comes_from_the_result_backend(
    app: Celery, session: NamedSession
) -> None:
    async with FakeOwner(app, session.id) as owner:
        execution = await session.aexecute("6 * 7", timeout_s=2)
        await owner.run_next()
        assert await execution.aget(HANG_S) == 42
        assert await asyncio.to_thread(execution.get, timeout=HANG_S) == 42
        assert [call.timeout_s for call in owner.ran] == [2]
        events = [event.message async for event in execution.aevents()]
    assert isinstance(events[-1], Ended)


async def test_calls_run_in_the_order_in_which_they_were_submitted(
    app: Celery, session: NamedSession
) -> None:
    executions = [await session.aexecute(f"{n} + 1") for n in range(5)]
    async with FakeOwner(app, session.id) as owner:
        for _ in executions:
            await owner.run_next()
    assert [await each.aget(HANG_S) for each in executions] == [1, 2, 3, 4, 5]


async def test_a_session_without_an_owner_is_listed_before_its_call_is_stored(
    app: Celery, session: NamedSession
) -> None:
    await session.aexecute("1")
    store = (await watch_thread.watcher(app)).sessions
    page = await store.take_wanted(session.profile, 10)
    assert [wanted.session_id for wanted in page.sessions] == [session.id]
    assert (await session.ainfo()).waiting == 1


async def test_one_round_trip_is_enough_with_a_live_owner(
    app: Celery, session: NamedSession, valkey_url: str, prefix: str
) -> None:
    async with FakeOwner(app, session.id):
        await session.aexecute("1")  # the server has the script from now on
        with redis.Redis.from_url(valkey_url) as client:

            def calls() -> int:
                stats = client.info("commandstats")
                return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in SCRIPTS)

            before = calls()
            await session.aexecute("2")
            assert calls() == before + 1


SCRIPTS = ("evalsha", "eval")


async def test_a_call_is_submitted_once_under_its_id(app: Celery, session: NamedSession) -> None:
    call_id = uuid4().hex
    first = await session.aexecute("1 + 1", call_id=call_id)
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        again = await session.aexecute("1 + 1", call_id=call_id, busy="error")
        assert (first.id, again.id) == (call_id, call_id)
        assert await again.aget(HANG_S) == 2
        assert (await session.ainfo()).unfinished == 0


async def test_a_busy_session_can_be_refused(session: NamedSession) -> None:
    await session.aexecute("1")
    with pytest.raises(NamedSessionBusy, match="1 of its calls are unfinished"):
        await session.aexecute("2", busy="error")


async def test_a_session_keeps_its_profile_and_tenant(app: Celery, session: NamedSession) -> None:
    await session.aexecute("1")
    other = NamedSession(app, session.id, profile="other")
    with pytest.raises(SessionMismatch, match="profile 'sandbox', not 'other'"):
        await other.aexecute("1")
    other = NamedSession(app, session.id, tenant="acme")
    with pytest.raises(SessionMismatch, match="tenant '', not 'acme'"):
        await other.aexecute("1")


async def test_an_error_of_redis_names_the_call_to_repeat() -> None:
    app = Celery()
    app.conf.capsule_redis_url = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(StorageUnavailable) as raised:
        await NamedSession(app, "s").aexecute("1", call_id="c1")
    assert raised.value.operation_id == "c1"


def test_the_blocking_forms_work_in_a_thread_without_a_loop(session: NamedSession) -> None:
    with pytest.raises(SessionUnknown):
        session.info()
    execution = session.execute("1")
    assert session.info().waiting == 1
    assert execution.cancel() == "requested"
    assert execution.snapshot().outcome == "cancelled"


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"source": 1}, TypeError, "source must be of type str, not 1"),
        ({"source": "\ud800"}, ValueError, "source"),
        ({"source": "1", "timeout_s": 0}, ValueError, "timeout_s = 0: must be more than 0"),
        ({"source": "1", "timeout_s": float("nan")}, ValueError, "timeout_s = nan"),
        ({"source": "1", "timeout_s": "5"}, TypeError, "timeout_s = '5'"),
        ({"source": "1", "timeout_s": True}, TypeError, "timeout_s = True"),
        (
            {"source": "1", "busy": "queue"},
            ValueError,
            "busy = 'queue': must be one of wait, error",
        ),
        ({"source": "1", "call_id": ""}, InvalidId, "call_id '' must not be empty"),
        ({"source": "1", "call_id": 7}, TypeError, "call_id must be of type str, not 7"),
    ],
)
async def test_wrong_arguments_are_named(
    session: NamedSession, arguments: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        await session.aexecute(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"session_id": ""}, "session id ''"),
        ({"session_id": "s", "profile": ""}, "profile ''"),
        ({"session_id": "s", "tenant": ""}, "tenant ''"),
    ],
)
def test_wrong_names_of_sessions_are_refused(
    app: Celery, arguments: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidId, match=named):
        NamedSession(app, **arguments)


# --- requests to the owner ------------------------------------------------------------------------


async def test_the_owner_is_asked_past_the_calls_that_wait(
    app: Celery, session: NamedSession
) -> None:
    await session.aexecute("1")
    names = NamesListed(total=1, entries=(NamespaceEntry(name="n", type_name="int", size=28),))
    made = CheckpointMade(at=1.0, size=5, saved=("n",))
    async with FakeOwner(app, session.id) as owner:
        for ask, reply in (
            (session.anamespace(), names),
            (session.acheckpoint(), made),
            (session.arestart(), RequestDone()),
        ):
            answer, _ = await asyncio.gather(ask, owner.answer(reply))
            assert answer == (None if isinstance(reply, RequestDone) else reply)


async def test_what_the_owner_could_not_do_is_an_error(app: Celery, session: NamedSession) -> None:
    await session.aexecute("1")
    async with FakeOwner(app, session.id) as owner:
        failure = RequestFailed(message="the disk is full")
        with pytest.raises(SessionRequestFailed, match="checkpoint failed: the disk is full"):
            await asyncio.gather(session.acheckpoint(), owner.answer(failure))


async def test_a_session_that_sleeps_is_brought_to_life_for_a_request(
    app: Celery, session: NamedSession
) -> None:
    await session.aexecute("1")
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        await owner.store.release(session.id, owner.token)
    asking = asyncio.create_task(session.anamespace())
    await listed(app, session)
    async with FakeOwner(app, session.id, "w2") as owner:
        await owner.answer(NamesListed(total=0))
        assert await asking == NamesListed(total=0)


async def test_a_request_that_nobody_answers_times_out(session: NamedSession) -> None:
    with pytest.raises(SessionUnknown):
        await session.anamespace()
    await session.aexecute("1")
    with pytest.raises(TimeoutError, match=r"no worker has answered the request 'names'.*0\.1 s"):
        await session.anamespace(timeout_s=0.1)
    with pytest.raises(ValueError, match="timeout_s = 0: must be more than 0"):
        await session.arestart(timeout_s=0)


async def test_a_session_is_closed_by_its_owner_when_its_calls_are_done(
    app: Celery, session: NamedSession
) -> None:
    execution = await session.aexecute("1")
    async with FakeOwner(app, session.id) as owner:
        closing = asyncio.create_task(session.aclose())
        await owner.asked.wait()
        with pytest.raises(SessionClosing):
            await session.aexecute("2")
        await owner.run_next()
        await owner.close_when_asked()
        await closing
    assert await execution.aget(HANG_S) == 1
    with pytest.raises(SessionUnknown):
        await session.ainfo()
    await session.aclose()  # nothing is there to close


async def test_a_session_that_no_worker_has_is_closed_at_once(
    app: Celery, session: NamedSession
) -> None:
    await session.aexecute("1")
    with pytest.raises(TimeoutError, match="takes no calls"):
        await session.aclose(timeout_s=0.1)
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        await owner.close_when_asked()
    await session.aexecute("1")
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        await owner.store.release(session.id, owner.token)
    await session.aclose()
    assert await Capsule(app).asessions() == []
    with pytest.raises(SessionUnknown):
        await session.ainfo()
    assert await Capsule(app).asessions() == []


# --- lists and tenants ----------------------------------------------------------------------------


def keys_of(url: str, prefix: str, *words: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        found = client.scan_iter(f"{prefix}:*", count=1000)
        return [key for key in found if any(word in key for word in words)]


async def test_a_session_is_forgotten_with_its_calls_results_and_history(
    app: Celery, session: NamedSession, valkey_url: str, prefix: str
) -> None:
    capsule = Capsule(app)
    settings = HistorySettings(prefix=prefix)
    async with History(session.id, valkey_url, settings=settings) as history:
        await history.add_items([{"role": "user", "content": "hello"}])
    done, waiting = await session.aexecute("1"), await session.aexecute("2")
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        await owner.store.release(session.id, owner.token, even_unfinished=True)
    await waiting.acancel()
    assert [entry.session_id for entry in await capsule.asessions()] == [session.id]
    await capsule.aforget(session=session.id)
    await capsule.aforget(session=session.id)
    left = keys_of(valkey_url, prefix, session.id, done.id, waiting.id)
    # Its token and the ids of operations, for ten minutes.
    assert {key.rpartition(":")[2] for key in left} == {"session", "operations"}
    assert await capsule.asessions() == []
    backend = app.backend
    assert not await asyncio.to_thread(backend.client.exists, backend.get_key_for_task(done.id))
    with pytest.raises(SessionUnknown):
        await session.ainfo()


async def test_a_tenant_is_forgotten_with_all_its_sessions(
    app: Celery, valkey_url: str, prefix: str
) -> None:
    capsule, tenant = Capsule(app), uuid4().hex
    mine = [capsule.session(uuid4().hex, tenant=tenant) for _ in range(3)]
    other = capsule.session(uuid4().hex, tenant="other")
    for session in (*mine, other):
        await session.aexecute("1")
    found = await capsule.asessions(tenant=tenant)
    assert {entry.session_id for entry in found} == {session.id for session in mine}
    assert (await capsule.ausage(tenant)).total_calls == 0
    await capsule.aforget(tenant=tenant)
    for session in mine:
        with pytest.raises(SessionUnknown):
            await session.ainfo()
    assert keys_of(valkey_url, prefix, tenant) == []
    assert (await other.ainfo()).waiting == 1


@pytest.mark.parametrize("names", [{}, {"session": "s", "tenant": "t"}])
async def test_one_thing_is_forgotten_at_a_time(app: Celery, names: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="say which one to forget"):
        await Capsule(app).aforget(**names)


# --- cancelling ----------------------------------------------------------------------------------


async def test_a_call_that_has_not_begun_is_cancelled_at_once(
    app: Celery, session: NamedSession
) -> None:
    kept, cancelled = await session.aexecute("1"), await session.aexecute("2")
    assert await cancelled.acancel() == "requested"
    with pytest.raises(TaskRevokedError, match="cancelled before it began"):
        await cancelled.aget(HANG_S)
    assert (await cancelled.asnapshot()).outcome == "cancelled"
    assert await asyncio.to_thread(lambda: cancelled.state) == "REVOKED"
    assert await cancelled.acancel() == "over"
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        assert await owner.run_next() is None
        assert [call.source for call in owner.ran] == ["1"]
    assert await kept.aget(HANG_S) == 1


async def test_a_call_that_has_begun_is_cancelled_by_its_owner(
    app: Celery, session: NamedSession
) -> None:
    execution = await session.aexecute("1")
    async with FakeOwner(app, session.id) as owner:
        begun = await owner.next_call()
        claimed = await owner.claim(begun)
        assert await execution.acancel(grace_s=3) == "requested"
        assert (await execution.asnapshot()).state == "running"
        (command,) = await owner.executions.read_commands(execution.id)
        assert decode_command(command.data).grace_s == 3  # type: ignore[union-attr]
        await owner.finish(begun, claimed)
    assert await execution.acancel() == "over"


async def test_a_cancel_races_with_the_owner_that_begins_the_call(
    app: Celery, session: NamedSession
) -> None:
    """Whichever is first has the call: it is ended by exactly one of them."""
    async with FakeOwner(app, session.id) as owner:
        for _ in range(30):
            execution = await session.aexecute("1")
            ended, answer = await asyncio.gather(owner.run_next(), execution.acancel())
            outcome = (await execution.asnapshot()).outcome
            assert outcome == (Outcome.CANCELLED if ended is None else ended.outcome)
            assert answer == "requested" or ended is not None


async def test_an_interrupt_reaches_the_call_that_runs(app: Celery, session: NamedSession) -> None:
    execution = await session.aexecute("1")
    assert await session.ainterrupt() == "over"
    async with FakeOwner(app, session.id) as owner:
        begun = await owner.next_call()
        await owner.claim(begun)
        assert await session.ainterrupt() == "requested"
        (command,) = await owner.executions.read_commands(execution.id)
    assert isinstance(decode_command(command.data), InterruptCommand)


async def test_a_close_leaves_the_checkpoint_to_an_owner_that_takes_the_session_meanwhile(
    app: Celery, session: NamedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.aexecute("1")
    checkpoints = (await watch_thread.watcher(app)).checkpoints
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        manifest = await checkpoints.write(
            session.id, owner.token, SavedNamespace(pieces=(b"1",), saved=("n",))
        )
        await owner.store.release(session.id, owner.token)
    async with contextlib.AsyncExitStack() as stack:
        delete, owners = checkpoints.delete, []

        async def take_and_delete(*args: Any) -> None:
            owners.append(await stack.enter_async_context(FakeOwner(app, session.id, "w2")))
            await delete(*args)

        monkeypatch.setattr(checkpoints, "delete", take_and_delete)
        closing = asyncio.create_task(session.aclose())
        while not (await session.ainfo()).is_closing:
            await asyncio.sleep(0)
        assert await checkpoints.find(session.id) == manifest
        await owners[0].close_when_asked()
        await closing


async def test_a_call_to_a_session_whose_owner_died_closing_it_begins_a_new_session(
    app: Celery, session: NamedSession
) -> None:
    first = await session.aexecute("1")
    checkpoints = (await watch_thread.watcher(app)).checkpoints
    async with FakeOwner(app, session.id) as owner:
        await owner.run_next()
        namespace = SavedNamespace(pieces=(b"1",), saved=("n",))
        manifest = await checkpoints.write(session.id, owner.token, namespace)
        assert not await owner.store.close_session(session.id)
        with pytest.raises(SessionClosing):  # its owner is to close it
            await session.aexecute("2")
        await owner.store.release(session.id, owner.token)  # as a reaper does
    execution = await session.aexecute("2")
    assert await checkpoints.find(session.id) is None
    with pytest.raises(CheckpointUnreadable):
        await checkpoints.read(session.id, manifest)
    info = await session.ainfo()
    assert (info.executions, info.waiting, info.is_closing) == (0, 1, False)
    async with FakeOwner(app, session.id, "w2") as owner:
        await owner.run_next()
    assert [await first.aget(HANG_S), await execution.aget(HANG_S)] == [1, 2]
