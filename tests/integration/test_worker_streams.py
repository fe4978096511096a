"""The streams of a worker over a real Redis, which may be away, or reached too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import msgspec
import pytest
import redis

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.executions import background
from capsule_tasks.executions.publishing import claimer, publisher, worker_lease
from capsule_tasks.executions.states import Claim
from capsule_tasks.protocol.events import AttemptEnded, CancelCommand, Ended, InterruptCommand
from capsule_tasks.protocol.messages import Failure, Output, TaskResult
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.taskpool.reporting.reporter import group_of
from tests.attempts import claim
from tests.servers import fresh_prefix
from tests.streaming import (
    HANG_S,
    Ground,
    eventually,
    has_started,
    is_held,
    new_execution,
    reporter_of,
)

REPLACED = TaskResult(
    execution_id="replaced",
    failure=Failure(module="celery.exceptions", name="Ignore", message="Replaced by new task"),
)


@asynccontextmanager
async def started(ground: Ground) -> AsyncIterator[Ground]:
    await ground.start()
    await ground.publisher.lease.is_held.wait()
    yield ground
    await ground.stop()


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
        ("fine", {"retention_bytes": -1}),
        ("fine", {"retention_s": float("inf")}),
        ("fine", {"retention_s": "long"}),
        ("fine", "all of it"),
    ],
)
async def test_a_task_that_cannot_have_a_stream_runs_without(
    ground: Ground, task_id: str, kept: Any
) -> None:
    ground.task_retention = kept
    execution = ground.admitted(new_execution(task_id))
    assert ground.dispatcher.queued == [task_id]
    assert execution.stream is None


async def test_a_group_that_cannot_be_counted_holds_up_no_other_note(ground: Ground) -> None:
    bad = "g" * 513
    assert group_of({"group": bad, "group_index": 0}) == ("", -1)
    assert group_of({"group": "g", "group_index": 0}) == ("g", 0)
    for task_id, group in (("of-bad", (bad, 0)), ("of-good", ("g", 0))):
        await ground.end(ground.admitted(new_execution(task_id, group=group)))
    await ground.publisher.index.write()
    assert (await ground.store.read_group("g")).counts == {"succeeded": 1}
    assert {entry.execution_id for entry in await ground.store.list_recent()} == {
        "of-bad",
        "of-good",
    }


async def test_output_from_before_the_claim_is_published_before_the_end(
    valkey_url: str,
) -> None:
    """Later output too, which became due while nothing could be sent."""
    ground = Ground(valkey_url, claim_wait_s=0.0)
    execution = ground.admitted(new_execution("late"))
    await eventually(lambda: has_started(execution))
    ground.begin(execution)
    ground.publisher.claimer._on_due([execution])
    ground.supervisor.on_message(execution, output("said while Redis was away"))
    async with started(ground):
        await eventually(lambda: is_held(execution))
        assert execution.stream is not None
        stream = execution.stream
        await eventually(lambda: not stream.is_busy)
        page = await ground.store.read("late")
    assert page is not None
    said = [event.message for event in page.events]
    assert "said while Redis was away" in [m.data for m in said if isinstance(m, Output)]


async def test_commands_for_an_earlier_attempt_are_not_for_the_next(valkey_url: str) -> None:
    """The execution began before its claim, so that it could not know of the earlier attempt."""
    ground = Ground(valkey_url, claim_wait_s=0.0)
    await claim(ground.store, "again", owner="another", claim="c")
    await ground.store.send_command("again", InterruptCommand())
    execution = ground.admitted(new_execution("again"))
    await eventually(lambda: has_started(execution))
    ground.begin(execution)
    async with started(ground):
        await eventually(lambda: is_held(execution))
        assert ground.dispatcher.done == []
        await ground.store.send_command("again", InterruptCommand())
        await eventually(lambda: ground.dispatcher.done)
        assert ground.dispatcher.done == ["interrupt again"]


async def test_a_command_is_read_as_soon_as_redis_answers(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_DELAY_S", 0.0)
    await ground.running("commanded")
    monkeypatch.setattr(ground.store, "read_commands", Away(ground.store.read_commands, times=2))
    await ground.store.send_command("commanded", CancelCommand())
    await eventually(lambda: ground.dispatcher.done)
    assert ground.dispatcher.done == ["cancel commanded"]


async def test_a_redis_that_allows_no_subscription_delays_commands_but_no_task(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose user lacks the permission for channels."""
    monkeypatch.setattr(publisher, "_DOORBELLS_S", 0.05)
    name = fresh_prefix()
    with redis.from_url(valkey_url) as client:
        client.execute_command("ACL SETUSER", name, "on", ">p", "~*", "&*", "+@all", "-subscribe")
        deaf = Ground(valkey_url.replace("//", f"//{quote(name)}:p@"), claim_wait_s=10 * HANG_S)
        async with started(deaf):
            await deaf.running("commanded")
            await deaf.store.send_command("commanded", CancelCommand())
            client.execute_command("ACL SETUSER", name, "+subscribe")
            await eventually(lambda: deaf.dispatcher.done)
        assert deaf.dispatcher.done == ["cancel commanded"]
        client.execute_command("ACL DELUSER", name)


async def test_running_executions_are_claimed_again_though_redis_was_away_at_first(
    ground: Ground, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doorbell of a lost lease is not listened to any more."""
    monkeypatch.setattr(worker_lease, "RETRY_DELAY_S", 0.0)
    held = ground.publisher.lease
    life = (await ground.running("retaken")).life
    old = held.incarnation
    monkeypatch.setattr(held.hold_store, "hold", Away(held.hold_store.hold, times=2))
    with redis.from_url(valkey_url) as client:
        client.delete(f"{ground.retention.prefix}:{{W:{old}}}")
    held._renew_now.set()
    await eventually(lambda: life.owner not in ("", old) and life.claim is Claim.CLAIMED)
    assert (await ground.store.read_record("retaken")).owner == held.incarnation
    bells = {ground.store.doorbell_of(of).encode() for of in (held.incarnation, "")}
    channels = ground.publisher._doorbells._channels
    assert set(channels) == bells
    assert all(len(channel.rings) == 1 for channel in channels.values())


async def test_a_worker_does_not_reap_its_own_running_executions_before_claiming_them_again(
    ground: Ground, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of Redis its own lost lease is due, like those of the dead."""
    monkeypatch.setattr(ground.publisher.claimer, "_reclaim_all", AsyncMock())
    await ground.running("mine", acks_late=False)
    held = ground.publisher.lease
    old = held.incarnation
    with redis.from_url(valkey_url) as client:
        client.delete(f"{ground.retention.prefix}:{{W:{old}}}")
    held._renew_now.set()
    await eventually(lambda: held.incarnation != old)
    await ground.publisher.claimer._reap(old)
    record = await ground.store.read_record("mine")
    assert (record.state, record.owner) == ("running", old)


async def test_a_lease_that_was_taken_for_lost_and_lasts_is_held(ground: Ground) -> None:
    held = ground.publisher.lease
    held._on_refused(held.incarnation)
    assert not held.is_held.is_set()
    async with asyncio.timeout(30):
        await held.is_held.wait()


async def test_a_message_is_not_given_up_before_a_reaper_would_find_its_task(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is cut; the hold and the claim are repeated, in either order."""
    held, may_hold = ground.publisher.lease, asyncio.Event()
    hold = held.hold_store.hold

    async def hold_later(*arguments: Any) -> None:
        await may_hold.wait()
        await hold(*arguments)

    def cut(_call: Any, answer: Any, **_: Any) -> None:
        asyncio.get_running_loop().call_soon(answer, StorageUnavailable("Redis: cut"))

    monkeypatch.setattr(held.hold_store, "hold", hold_later)
    monkeypatch.setattr(ground.publisher.connection, "send_nowait", cut)
    reporter = reporter_of(await ground.running("early", ack_waits_for_claim=True))
    assert not reporter.is_acknowledged.is_set()
    may_hold.set()
    async with asyncio.timeout(3):
        await reporter.is_acknowledged.wait()


async def test_while_redis_is_away_only_so_many_wait_for_it_and_the_rest_runs_unseen(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_MAX_UNSTORED", 3)
    ground = Ground(valkey_url, claim_wait_s=0.0, end_wait_s=0.0)
    for number in range(3):
        execution = ground.admitted(new_execution(f"waits-{number}"))
        await eventually(lambda one=execution: has_started(one))
        await ground.end(execution)
    unseen = ground.admitted(new_execution("unseen"))
    ground.supervisor.discard(new_execution("revoked"), "revoked")
    assert unseen.stream is None
    assert "unseen" in ground.dispatcher.queued
    assert not ground.publisher.background._tasks
    async with started(ground):
        await eventually(lambda: not ground.publisher._unstored_ends)
        assert (await ground.store.read_record("waits-2")).outcome == "succeeded"
        await ground.end(ground.admitted(new_execution("seen")))
        ground.supervisor.discard(new_execution("revoked"), "revoked")
        await eventually(lambda: not ground.publisher._unstored_ends)


async def test_with_output_that_waits_in_plenty_the_rest_runs_unseen_while_redis_is_away(
    valkey_url: str,
) -> None:
    ground = Ground(valkey_url, claim_wait_s=0.0, end_wait_s=0.0, window_bytes=1024)
    settings = ground.publisher.settings
    ground.publisher.settings = msgspec.structs.replace(settings, total_bytes=2048)
    running = ground.admitted(new_execution("running"))
    await eventually(lambda: has_started(running))
    ground.supervisor.on_message(running, output("x" * 4096))
    seen = ground.admitted(new_execution("seen"))  # Redis may be there, and slow
    await ground.end(running)
    unseen = ground.admitted(new_execution("unseen"))
    assert seen.stream is not None
    assert unseen.stream is None


async def test_a_renewal_that_confirms_the_lease_has_the_message_acknowledged(
    ground: Ground,
) -> None:
    ground.publisher.lease._certain_until = 0.0
    reporter = reporter_of(await ground.running("early", ack_waits_for_claim=True))
    async with asyncio.timeout(3):  # sooner than after `claim_wait_s`
        await reporter.is_acknowledged.wait()


async def test_a_stopped_worker_ends_the_tasks_it_had_acknowledged(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is redelivered: acknowledged late, or not acknowledged yet."""
    async with started(Ground(valkey_url)) as ground:
        early = await ground.running("early", ack_waits_for_claim=True)
        await reporter_of(early).is_acknowledged.wait()
        await ground.running("kept", acks_late=True)
        monkeypatch.setattr(ground.publisher.lease, "_renew", AsyncMock(return_value=None))
        ground.publisher.lease._certain_until = 0.0  # so that it is not acknowledged yet
        put_off = await ground.running("put off", ack_waits_for_claim=True)
    async with ExecutionStore(valkey_url, settings=ground.retention) as store:
        assert (await store.read_record("early")).outcome == "lost"
        assert [(await store.read_record(one)).state for one in ("kept", "put off")] == [
            "waiting"
        ] * 2
    assert not reporter_of(put_off).is_acknowledged.is_set()


async def test_attempts_that_replace_each_other_are_stored_in_their_order(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is over before the first is, and the third as well."""
    monkeypatch.setattr(claimer, "_PREVIOUS_S", ())
    first = await ground.running("replaced")
    second = ground.admitted(new_execution("replaced"))
    ground.begin(second)
    ground.supervisor.finished(second, REPLACED, None)
    third = ground.admitted(new_execution("replaced"))
    ground.begin(third)
    ground.finish(third)
    ground.supervisor.finished(first, REPLACED, None)
    for attempt in (first, second, third):
        await reporter_of(attempt).has_ended.wait()
    page = await ground.store.read("replaced")
    assert page is not None
    ends = [m for event in page.events if isinstance(m := event.message, (AttemptEnded, Ended))]
    assert [end.outcome for end in ends] == ["replaced", "replaced", "succeeded"]


async def test_an_execution_that_needs_its_claim_runs_in_one_place_at_most(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, claimer = ground.publisher.lease, ground.publisher.claimer
    lease_renewed = claimer.lease_renewed
    monkeypatch.setattr(lease, "is_certain", lambda _: False)
    monkeypatch.setattr(claimer, "lease_renewed", lambda _: None)
    call = ground.admitted(new_execution("call", needs_claim=True))
    await eventually(lambda: call in claimer.awaiting_renewal)
    assert is_held(call)
    assert not has_started(call), "its lease may have lapsed"
    lease_renewed(lease.incarnation)
    assert has_started(call)
    async with ExecutionStore(ground.publisher.connection, settings=ground.retention) as store:
        await claim(store, "elsewhere", owner="another", claim="c")
    refused = ground.admitted(new_execution("elsewhere", needs_claim=True))
    await reporter_of(refused).has_ended.wait()
    assert reporter_of(refused).heard == ["ended"]
    assert (await ground.store.read_record("elsewhere")).owner == "another"
    ground.begin(call)
    await ground.end(call)
