"""The streams of a worker over a real Redis, which may be away, or reached too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import redis

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.protocol.events import CancelCommand, InterruptCommand
from capsule_tasks.protocol.messages import Output
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.taskpool.jobs import SILENT, group_of
from capsule_tasks.taskpool.streams import orders, tenure, worker
from tests.servers import fresh_prefix
from tests.streaming import HANG_S, Ground, eventually, new_job


@asynccontextmanager
async def started(ground: Ground) -> AsyncIterator[Ground]:
    ground.streams.start()
    await ground.streams.tenure.is_held.wait()
    yield ground
    await ground.streams.stop()


@pytest.fixture
async def ground(valkey_url: str) -> AsyncIterator[Ground]:
    async with started(Ground(valkey_url)) as ground:
        yield ground


def output(text: str) -> Output:
    return Output(execution_id="e", stream="stdout", data=text)


class Away:
    """Does not do what it is asked, so many times."""

    def __init__(self, call: Any, times: int) -> None:
        self._call = call
        self.times = times

    async def __call__(self, *arguments: Any) -> Any:
        if self.times:
            self.times -= 1
            raise StorageUnavailable("Redis: it is away")
        return await self._call(*arguments)


@pytest.mark.parametrize(
    ("task_id", "kept"),
    [
        ("x" * 513, {}),
        ("", {}),
        ("\ud800", {}),
        ("fine", {"kept_byte": 1}),
        ("fine", {"kept_bytes": -1}),
        ("fine", {"kept_s": float("inf")}),
        ("fine", {"kept_s": "long"}),
        ("fine", "all of it"),
    ],
)
async def test_a_task_that_cannot_have_a_stream_runs_without(
    ground: Ground, task_id: str, kept: Any
) -> None:
    ground.own_kept = kept
    job = new_job(task_id)
    ground.streams.admit(job)
    assert ground.crew.submitted == [job]
    assert job.publication is SILENT


async def test_a_group_that_cannot_be_counted_holds_up_no_other_note(ground: Ground) -> None:
    bad = "g" * 513
    assert group_of({"group": bad, "group_index": 0}) == ("", -1)
    assert group_of({"group": "g", "group_index": 0}) == ("g", 0)
    for task_id, group in (("of-bad", (bad, 0)), ("of-good", ("g", 0))):
        await ground.end(ground.admitted(new_job(task_id, group=group)))
    await ground.streams.notes.write()
    assert (await ground.store.read_group("g")).counts == {"succeeded": 1}
    assert {entry.execution_id for entry in await ground.store.list_recent()} == {
        "of-bad",
        "of-good",
    }


async def test_what_began_before_it_could_be_claimed_is_heard_before_its_end(
    valkey_url: str,
) -> None:
    """Also what it says later: in time it was due while nothing could be sent."""
    ground = Ground(valkey_url, claim_wait_s=0.0)
    publication = ground.admitted(new_job("late"))
    await eventually(lambda: publication.has_begun)
    publication.accepted(1, None)
    ground.streams._on_soon([publication])
    publication.say(output("said while Redis was away"))
    async with started(ground):
        await eventually(lambda: publication.is_live)
        await publication.drained()
        page = await ground.store.read("late")
    assert page is not None
    said = [event.message for event in page.events]
    assert "said while Redis was away" in [m.data for m in said if isinstance(m, Output)]


async def test_what_an_attempt_before_was_told_is_not_for_the_next(valkey_url: str) -> None:
    """It began before it could be claimed, and so before it could know."""
    ground = Ground(valkey_url, claim_wait_s=0.0)
    await ground.store.claim("again", owner="another", claim="c")
    await ground.store.tell("again", InterruptCommand())
    job = new_job("again")
    publication = ground.admitted(job)
    await eventually(lambda: publication.has_begun)
    async with started(ground):
        await eventually(lambda: publication.is_live)
        assert ground.crew.session.done == []
        await ground.store.tell("again", InterruptCommand())
        await eventually(lambda: ground.crew.session.done)
        assert ground.crew.session.done == ["interrupted"]


async def test_an_order_is_heard_when_redis_can_say_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "AGAIN_S", 0.0)
    publication = await ground.running("told")
    monkeypatch.setattr(ground.store, "told", Away(ground.store.told, times=2))
    await ground.store.tell("told", CancelCommand())
    await eventually(lambda: ground.crew.cancelled)
    assert ground.crew.cancelled == [publication.job]


async def test_a_redis_that_lets_nobody_listen_delays_no_task_and_its_orders_come_late(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose user lacks the permission for channels."""
    monkeypatch.setattr(worker, "_BELLS_S", 0.05)
    name = fresh_prefix()
    with redis.from_url(valkey_url) as client:
        client.execute_command("ACL SETUSER", name, "on", ">p", "~*", "&*", "+@all", "-subscribe")
        deaf = Ground(valkey_url.replace("//", f"//{quote(name)}:p@"), claim_wait_s=10 * HANG_S)
        async with started(deaf):
            publication = await deaf.running("told")
            await deaf.store.tell("told", CancelCommand())
            client.execute_command("ACL SETUSER", name, "+subscribe")
            await eventually(lambda: deaf.crew.cancelled)
        assert deaf.crew.cancelled == [publication.job]
        client.execute_command("ACL DELUSER", name)


async def test_what_runs_is_taken_anew_though_redis_was_away_at_first(
    ground: Ground, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the lease that was lost nobody rings any more."""
    monkeypatch.setattr(tenure, "AGAIN_S", 0.0)
    streams = ground.streams
    publication = await ground.running("retaken")
    old = streams.tenure.incarnation
    monkeypatch.setattr(
        streams.tenure._holdings, "hold", Away(streams.tenure._holdings.hold, times=2)
    )
    with redis.from_url(valkey_url) as client:
        client.delete(f"{ground.kept.prefix}:{{W:{old}}}")
    streams.tenure._doubt.set()
    await eventually(lambda: publication.attempt.owner not in ("", old) and publication.is_live)
    assert (await ground.store.look("retaken")).owner == streams.tenure.incarnation
    bells = {streams.store.core.bell_of(of).encode() for of in (streams.tenure.incarnation, "")}
    assert set(streams._bells._rings) == bells
    assert all(len(rings) == 1 for rings in streams._bells._rings.values())


async def test_a_lease_that_was_taken_for_lost_and_lasts_is_held(ground: Ground) -> None:
    held = ground.streams.tenure
    held._is_refused(held.incarnation)
    assert not held.is_held.is_set()
    async with asyncio.timeout(30):
        await held.is_held.wait()


async def test_a_message_is_not_given_up_before_a_reaper_would_find_its_task(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is cut: that it is held, and its claim, are said anew, in whatever order."""
    streams = ground.streams
    may_hold, acknowledged = asyncio.Event(), asyncio.Event()
    hold = streams.tenure._holdings.hold

    async def hold_later(*arguments: Any) -> None:
        await may_hold.wait()
        await hold(*arguments)

    def cut(_call: Any, answer: Any, **_: Any) -> None:
        asyncio.get_running_loop().call_soon(answer, StorageUnavailable("Redis: cut"))

    monkeypatch.setattr(streams.tenure._holdings, "hold", hold_later)
    monkeypatch.setattr(streams.connection, "cast", cut)
    publication = ground.admitted(new_job("early"))
    await eventually(lambda: publication.has_begun)
    publication.accepted(1, acknowledged.set)
    publication.on_due()
    await eventually(lambda: publication.is_live)
    assert not acknowledged.is_set()
    may_hold.set()
    async with asyncio.timeout(3):
        await acknowledged.wait()


async def test_while_redis_is_away_only_so_many_wait_for_it_and_the_rest_runs_unseen(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MOST_UNSTORED", 3)
    ground = Ground(valkey_url, claim_wait_s=0.0, end_wait_s=0.0)
    streams = ground.streams
    for number in range(3):
        await ground.end(ground.admitted(new_job(f"waits-{number}")))
    unseen = new_job("unseen")
    streams.admit(unseen)
    streams.discard(new_job("revoked"), "revoked")
    assert unseen.publication is SILENT
    assert unseen in ground.crew.submitted
    assert not streams.background._tasks
    async with started(ground):
        await eventually(lambda: not streams._late)
        assert (await ground.store.look("waits-2")).outcome == "succeeded"
        await ground.end(ground.admitted(new_job("seen")))
        streams.discard(new_job("revoked"), "revoked")
        await eventually(lambda: not streams._late)


async def test_with_output_that_waits_in_plenty_the_rest_runs_unseen_while_redis_is_away(
    valkey_url: str,
) -> None:
    ground = Ground(valkey_url, claim_wait_s=0.0, end_wait_s=0.0, window_bytes=1024)
    ground.streams.settings = msgspec.structs.replace(ground.streams.settings, total_bytes=2048)
    running = ground.admitted(new_job("running"))
    running.say(output("x" * 4096))
    seen, unseen = new_job("seen"), new_job("unseen")
    ground.streams.admit(seen)  # Redis may be there, and slow
    await ground.end(running)
    ground.streams.admit(unseen)
    assert seen.publication is not SILENT
    assert unseen.publication is SILENT


async def test_a_worker_that_is_stopped_ends_what_it_had_acknowledged(valkey_url: str) -> None:
    """The rest comes again: acknowledged late, or not acknowledged yet."""
    async with started(Ground(valkey_url)) as ground:
        await ground.running("early")
        kept = ground.admitted(new_job("kept", acks_late=True))
        await eventually(lambda: kept.has_begun)
        kept.accepted(1, None)
        kept.on_due()
        await eventually(lambda: kept.is_live)
        ground.streams.tenure._sure_until = 0.0  # so that it is not acknowledged yet
        put_off = ground.admitted(new_job("put off"))
        await eventually(lambda: put_off.has_begun)
        acknowledged: list[str] = []
        put_off.accepted(1, lambda: acknowledged.append("put off"))
        put_off.on_due()
        await eventually(lambda: put_off.is_live)
    async with ExecutionStore(valkey_url, settings=ground.kept) as store:
        assert (await store.look("early")).outcome == "lost"
        assert [(await store.look(one)).state for one in ("kept", "put off")] == ["waiting"] * 2
    assert acknowledged == []
