"""Reapers over a real server: two at once, and one that finishes what another had begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container

import pytest
import redis
from msgspec.structs import replace

from capsule_tasks.executions.publishing.reaper import Reaper
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.settings import ExecutionSettings, LeaseSettings, NamedSessionSettings
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.runs.store import Lease
from capsule_tasks.storage.sessions.store import NamedSessionStore
from tests.attempts import claim
from tests.servers import fresh_prefix

HELD = [f"e{place}" for place in range(50)]
NO_KEY = "i" * 600
"""Held too, by a worker of another version: it cannot be read, and all the others end."""
SESSIONS = ["s1", "s2"]
GONE = "gone"


class Died(Exception):
    """Stands for the death of a reaper in the middle of its work."""


class Ground:
    """The executions of a dead worker, and a reaper that ends them."""

    def __init__(self, connection: PipelinedConnection) -> None:
        self.settings = ExecutionSettings(prefix=fresh_prefix())
        self.connection = connection
        self.store = ExecutionStore(connection, settings=self.settings)
        self.holdings = HoldStore(connection, self.settings)
        self.sessions = NamedSessionStore(
            connection, settings=NamedSessionSettings(prefix=self.settings.prefix)
        )
        self.failed: set[str] = set()

    async def leave(self) -> None:
        """A worker claims all of them, acknowledges, and is gone."""
        lease = Lease(
            GONE,
            self.connection,
            settings=LeaseSettings(lease_s=60),
            prefix=self.settings.prefix,
        )
        await lease.acquire()
        await self.holdings.register_worker(GONE, 0.0)
        await self.holdings.hold(GONE, lease.core.token, [*HELD, NO_KEY], ())
        await self.sessions.hold(GONE, lease.core.token, SESSIONS)
        for place, name in enumerate(HELD):
            await claim(
                self.store,
                name,
                owner=GONE,
                claim="c",
                ack="early",
                task="t",
                group="g",
                index=place,
            )
        await lease.release()

    def reaper(
        self,
        *,
        dies: bool = False,
        cannot: str = "",
        kept: ExecutionSettings | None = None,
        present: Container[str] = (),
    ) -> Reaper:
        def fail_result(name: str, _why: str) -> None:
            if dies or name == cannot:
                raise Died
            self.failed.add(name)

        def ended_elsewhere(_name: str) -> None:
            return None

        def retention_of(_name: str) -> ExecutionSettings:
            return kept or self.settings

        return Reaper(
            self.store,
            self.holdings,
            self.sessions,
            ended_elsewhere,
            fail_result,
            retention_of,
            present,
        )

    async def look(self) -> None:
        """Each has one end that is reported everywhere, and nothing is left to do."""
        for name in HELD:
            page = await self.store.read(name)
            assert page is not None
            ends = [event.message for event in page.events if isinstance(event.message, Ended)]
            assert [end.outcome for end in ends] == [Outcome.LOST]
            assert page.events[-1].is_last
        progress = await self.store.read_group("g")
        assert progress.counts == {"lost": len(HELD)}
        failures = {name: why for _, name, why in progress.failures}
        assert failures == dict.fromkeys(
            HELD, "WorkerLostError: its worker died while it ran, so it may have run in part"
        )
        recent = await self.store.list_recent(state="lost", task="t", limit=100)
        assert {entry.execution_id for entry in recent} == set(HELD)
        assert self.failed == set(HELD)
        due = await self.holdings.register_worker("living", 60.0)
        assert GONE not in due.workers
        assert await self.holdings.held_by(GONE) == []
        assert await self.sessions.held_sessions(GONE) == []


@pytest.fixture(params=["valkey_url", "cluster_url"])
async def ground(request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    connection = PipelinedConnection(request.getfixturevalue(request.param))
    ground = Ground(connection)
    await ground.leave()
    yield ground
    await connection.close()


async def test_two_reapers_at_once_write_one_end_each(ground: Ground) -> None:
    await asyncio.gather(ground.reaper().reap(GONE), ground.reaper().reap(GONE))
    await ground.look()


async def test_a_reap_left_half_done_is_finished_by_the_next_reaper(ground: Ground) -> None:
    """A reaper wrote ends, and died before it updated the result backend, group and index."""
    await ground.reaper(dies=True).reap(GONE)
    assert await ground.store.list_recent() == []
    await ground.reaper().reap(GONE)
    await ground.look()


async def test_an_execution_that_cannot_be_ended_delays_no_other(ground: Ground) -> None:
    """The next round ends it."""
    await ground.reaper(cannot=HELD[7]).reap(GONE)
    assert ground.failed == {*HELD} - {HELD[7]}
    assert await ground.holdings.held_by(GONE) == [HELD[7]]
    await ground.reaper().reap(GONE)
    await ground.look()


async def test_a_session_that_cannot_be_released_delays_no_execution(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round releases it: the dead worker stays registered until then."""
    reap_session = ground.sessions.reap

    async def reap(name: str, worker: str) -> bool:
        if name == SESSIONS[0]:
            raise Died
        return await reap_session(name, worker)

    with monkeypatch.context() as broken:
        broken.setattr(ground.sessions, "reap", reap)
        await ground.reaper().reap(GONE)
    assert ground.failed == {*HELD}
    assert await ground.sessions.held_sessions(GONE) == [SESSIONS[0]]
    assert GONE in (await ground.holdings.register_worker("living", 60.0)).workers
    await ground.reaper().reap(GONE)
    await ground.look()


async def test_executions_that_run_here_are_not_reaped_until_claimed_again(
    ground: Ground,
) -> None:
    """A worker whose own lease was lost finds that owner, too."""
    present = {HELD[3], HELD[11]}
    await ground.reaper(present=present).reap(GONE)
    assert [(await ground.store.read_record(one)).state for one in present] == ["running"] * 2
    assert ground.failed == {*HELD} - present
    await ground.reaper().reap(GONE)
    await ground.look()


async def test_a_lost_execution_is_kept_for_the_retention_of_its_task(valkey_url: str) -> None:
    connection = PipelinedConnection(valkey_url)
    ground = Ground(connection)
    await ground.leave()
    await ground.reaper(kept=replace(ground.store.settings, silent_retention_s=5000.0)).reap(GONE)
    with redis.from_url(valkey_url) as client:
        assert 4000 < client.ttl(ground.store.keys_of(HELD[0]).meta) <= 5000
    await connection.close()


async def test_whoever_asks_is_told_of_each_lost_attempt_until_it_could_be_told(
    ground: Ground,
) -> None:
    settings, lease_settings = ground.settings, LeaseSettings(lease_s=60)
    lease = Lease("w2", ground.connection, settings=lease_settings, prefix=settings.prefix)
    await lease.acquire()
    await ground.holdings.register_worker("w2", 0.0)
    await ground.holdings.hold("w2", lease.core.token, ["late"], ())
    await claim(
        ground.store, "late", owner="w2", claim="c", ack="late", task="t", group="", index=-1
    )
    await lease.release()
    told: list[tuple[str, str]] = []

    async def after_lost_attempt(task: str, execution_id: str) -> None:
        told.append((task, execution_id))
        if len(told) == 1:
            raise Died

    reaper = ground.reaper()
    reaper.after_lost_attempt = after_lost_attempt
    await reaper.reap("w2")
    assert await ground.holdings.held_by("w2") == ["late"]
    await reaper.reap("w2")
    assert await ground.holdings.held_by("w2") == []
    assert told == [("t", "late")] * 2
