"""The keeper of runs in a worker, on a real server, with a broker that takes notes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from capsule_tasks.errors import RunEnded
from capsule_tasks.settings import LeaseSettings, RetrySettings, RunSettings
from capsule_tasks.storage import ApprovalRequest, RunStore
from capsule_tasks.storage.keys import RunIndexKeys
from capsule_tasks.storage.runs import run_index
from capsule_tasks.taskpool import run_keeper
from capsule_tasks.taskpool.run_keeper import RunKeeper
from capsule_tasks.testing.servers import PrivateServer

LIMIT_S = 30.0
LEASE_S = 2.0
"""The lease of an owner that does not renew it, but has to claim within it."""
SHORT = RetrySettings(attempts=2, first_delay_s=0.01, max_delay_s=0.02)


class Broker:
    """Takes messages of runs, on threads, and fails while it is away."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.sent: list[tuple[str, bytes]] = []
        self.refused = 0
        self.is_away = False
        self.arrived = asyncio.Event()
        self.held: threading.Event | None = None

    def send(self, run_id: str, message: bytes) -> None:
        if self.held is not None:
            self.held.wait(LIMIT_S)
        if self.is_away:
            self.refused += 1
        else:
            self.sent.append((run_id, message))
        self.loop.call_soon_threadsafe(self.arrived.set)
        if self.is_away:
            raise ConnectionError("the broker is away")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    @property
    def runs(self) -> list[str]:
        return sorted(run_id for run_id, _ in self.sent)


@pytest.fixture
async def broker() -> Broker:
    return Broker()


@asynccontextmanager
async def keeping(
    url: str, prefix: str, broker: Broker, count: int = 1, **settings: object
) -> AsyncIterator[list[RunKeeper]]:
    """Keepers that run, as in so many workers."""
    runs = RunSettings(prefix=prefix, **settings)  # type: ignore[arg-type]
    keepers = [RunKeeper(RunStore(url, settings=runs), broker.send, ["a"]) for _ in range(count)]
    for keeper in keepers:
        await keeper.start()
    try:
        yield keepers
    finally:
        for keeper in keepers:
            await keeper.stop()


async def created(store: RunStore, run_id: str, *, is_sent: bool = True) -> None:
    """A run that is queued, whose producer has sent its message or has died before that."""
    made = await store.create(
        run_id, run_id, b"{}", schema="1", agent="a", message=f"to {run_id}".encode()
    )
    if is_sent:
        await store.note_sent(run_id, made.updated_us)


@asynccontextmanager
async def owner_until_the_end(store: RunStore, owner: str) -> AsyncIterator[None]:
    """The lease of an owner that is gone once the block ends."""
    lease = store.lease(owner, LeaseSettings(lease_s=600))
    await lease.acquire()
    yield
    await lease.release()


def ask(**limits: object) -> ApprovalRequest:
    options: dict[str, object] = {"tool": "bare:pay", "agent": "a", "fingerprint": "f", **limits}
    return ApprovalRequest(call_id="c", **options)  # type: ignore[arg-type]


async def status_of(store: RunStore, run_id: str) -> tuple[str, bool]:
    """The status of a run, and whether a message is still needed."""
    record = await store.read(run_id, with_snapshot=False)
    return record.status, bool(record.unsent_us)


async def noted(store: RunStore, run_id: str) -> str:
    """The status of a run once its message is noted as sent."""
    async with asyncio.timeout(LIMIT_S):
        while (found := await status_of(store, run_id))[1]:
            await asyncio.sleep(0.01)  # a poll: Redis gives no signal
    return found[0]


async def test_runs_of_an_owner_that_is_gone_are_sent_again(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker
) -> None:
    for number in range(3):
        await created(store, f"r{number}")
    await store.lease("w-dead", LeaseSettings(lease_s=LEASE_S)).acquire()
    for number in range(3):
        await store.claim(f"r{number}", "w-dead")
    await store.cancel("r2", by="ann")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with keeping(valkey_url, prefix, broker):
        await broker.until(lambda: len(broker.sent) == 3)
        assert loop.time() - began < LEASE_S + 5
        assert sorted(broker.sent) == [(f"r{n}", f"to r{n}".encode()) for n in range(3)]
        assert [await noted(store, f"r{n}") for n in range(3)] == ["queued", "queued", "cancelled"]


async def test_runs_whose_owner_lives_are_left_alone(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker
) -> None:
    await created(store, "mine")
    await created(store, "other", is_sent=False)
    await store.claim("mine", "w1")
    async with keeping(valkey_url, prefix, broker) as (keeper,):
        await broker.until(lambda: broker.sent)
        await keeper.look()
    assert broker.runs == ["other"]
    assert (await status_of(store, "mine"))[0] == "running"


@pytest.mark.parametrize(
    ("on_expiry", "status"), [("reject", "queued"), ("approve", "queued"), ("cancel", "cancelled")]
)
async def test_time_limits_of_approvals_are_kept(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, on_expiry: str, status: str
) -> None:
    await created(store, "r")
    claim = await store.claim("r", "w1")
    async with keeping(valkey_url, prefix, broker):
        requests = [ask(expires_in_s=0.2, on_expiry=on_expiry)]
        await store.commit(claim, b"{}", turn=1, status="interrupted", approval_requests=requests)
        await broker.until(lambda: broker.sent)
        assert await noted(store, "r") == status
    if status == "queued":
        (decision,) = (await store.claim("r", "w1")).decisions.exact
        assert decision.approved == (on_expiry == "approve")
        assert decision.by == "expiry"


async def test_a_run_whose_producer_died_before_it_sent_it_is_sent(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 100)
    await created(store, "r", is_sent=False)
    async with keeping(valkey_url, prefix, broker):
        await broker.until(lambda: broker.sent)
        assert await noted(store, "r") == "queued"
    assert broker.sent == [("r", b"to r")]


async def test_messages_wait_for_a_broker_that_is_away(
    store: RunStore,
    valkey_url: str,
    prefix: str,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 100)
    monkeypatch.setattr("capsule_tasks.storage.runs.keeping.SEND_AGAIN_S", 0.1)
    broker.is_away = True
    for number in range(5):
        await created(store, f"r{number}", is_sent=False)
    async with keeping(valkey_url, prefix, broker):
        await broker.until(lambda: broker.refused >= 10)
        assert [await status_of(store, f"r{n}") for n in range(5)] == [("queued", True)] * 5
        broker.is_away = False
        await broker.until(lambda: len(set(broker.runs)) == 5)
        for number in range(5):
            await noted(store, f"r{number}")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["messages of runs cannot be sent, and wait: the broker is away"]


async def test_a_broker_that_hangs_holds_up_no_expiry(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 100)
    monkeypatch.setattr(run_keeper, "_SEND_S", 0.1)
    broker.held = threading.Event()
    await created(store, "stuck", is_sent=False)
    await created(store, "r")
    claim = await store.claim("r", "w1")
    async with keeping(valkey_url, prefix, broker):
        requests = [ask(expires_in_s=0.3)]
        await store.commit(claim, b"{}", turn=1, status="interrupted", approval_requests=requests)
        async with asyncio.timeout(LIMIT_S):
            while (await status_of(store, "r"))[0] != "queued":
                await asyncio.sleep(0.01)  # a poll: Redis gives no signal
        assert broker.sent == []
        broker.held.set()
        await broker.until(lambda: len(broker.sent) >= 2)
    assert broker.runs.count("stuck") == 1, "a message on its way is not sent twice"


async def test_keepers_wait_for_a_redis_that_is_away(
    tmp_path: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port, url = server.port, server.url
        async with RunStore(url) as store:
            await created(store, "r")
            async with owner_until_the_end(store, "w-dead"):
                await store.claim("r", "w-dead")
        server.stop()
        async with keeping(url, "capsule", broker, retry=SHORT):
            async with asyncio.timeout(LIMIT_S):
                while "runs are not kept going" not in caplog.text:
                    await asyncio.sleep(0.01)  # a poll: the log gives no signal
            with PrivateServer(tmp_path / "redis", port=port, aof=True):
                await broker.until(lambda: broker.sent)
                assert broker.sent == [("r", b"to r")]
                async with RunStore(url) as store:
                    assert await noted(store, "r") == "queued"
    warnings = [record for record in caplog.records if "not kept going" in record.getMessage()]
    assert len(warnings) == 1


async def test_each_of_many_keepers_sends_a_message_once_at_most(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker
) -> None:
    async with owner_until_the_end(store, "w-dead"):
        for number in range(20):
            await created(store, f"owned{number}")
            await store.claim(f"owned{number}", "w-dead")
    for number in range(20):
        await created(store, f"unsent{number}", is_sent=False)
    async with keeping(valkey_url, prefix, broker, count=8):
        await broker.until(lambda: len(set(broker.runs)) == 40)
        for run_id in set(broker.runs):
            assert await noted(store, run_id) == "queued"
    often = Counter(broker.runs)
    assert max(often.values()) <= 8, often


async def test_what_a_keeper_left_half_done_another_one_finishes(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 100)
    await created(store, "r")
    async with owner_until_the_end(store, "w-dead"):
        await store.claim("r", "w-dead")
    assert (await store.requeue("r", "w-dead")) is not None  # and dies before it sends the message
    async with keeping(valkey_url, prefix, broker):
        await broker.until(lambda: broker.sent)
        assert await noted(store, "r") == "queued"


async def test_a_run_without_a_message_is_left_to_whoever_made_it(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 1)
    await store.create("by-hand", "s", b"{}", schema="1", agent="a")
    await created(store, "r", is_sent=False)
    async with keeping(valkey_url, prefix, broker) as (keeper,):
        await broker.until(lambda: broker.sent)
        await keeper.look()
    assert broker.runs == ["r"]
    assert await status_of(store, "by-hand") == ("queued", True)


async def test_a_run_whose_execution_was_cancelled_is_cancelled_and_not_sent(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "SEND_AFTER_MS", 100)
    await created(store, "r")
    async with keeping(valkey_url, prefix, broker) as (keeper,):
        keeper.cancel("r", "celery")
        keeper.cancel("nobody-knows-it", "celery")
        async with asyncio.timeout(LIMIT_S):
            while (await status_of(store, "r")) != ("cancelled", False):
                await asyncio.sleep(0.01)  # a poll: Redis gives no signal
        keeper.cancel("r", "celery")
        await created(store, "last", is_sent=False)
        await broker.until(lambda: broker.sent)
    assert broker.runs == ["last"]
    assert (await store.read("r")).cancelled_by == "celery"


async def test_expired_runs_leave_the_index(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule_tasks.storage.runs.keeping.IDLE_MS", 0)
    settings = RunSettings(prefix=prefix, ended_ttl_s=1)
    async with RunStore(valkey_url, settings=settings) as short:
        await created(short, "r")
        await short.commit(await short.claim("r", "w1"), b"", turn=1, status="completed")
    client = redis.Redis.from_url(valkey_url)
    try:
        index = RunIndexKeys(prefix).order(None, "completed")
        assert client.zcard(index) == 1
        async with asyncio.timeout(LIMIT_S):
            while client.zcard(index):
                keeper = RunKeeper(RunStore(valkey_url, settings=settings), broker.send, ["a"])
                await keeper.look()
                await keeper.stop()
    finally:
        client.close()


async def test_refused_claims_leave_the_list_of_running_runs(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule_tasks.storage.runs.keeping.IDLE_MS", 0)
    for number in range(3):
        await created(store, f"r{number}")
    claim = await store.claim("r0", "w1")
    await store.claim("r1", "w1")
    await store.commit(claim, b"", turn=1, status="completed")
    with pytest.raises(RunEnded):
        await store.claim("r0", "w1")
    with redis.Redis.from_url(valkey_url) as client:
        index = RunIndexKeys(prefix).order(None, "running")
        assert client.zcard(index) == 2
        settings = RunSettings(prefix=prefix)
        keeper = RunKeeper(RunStore(valkey_url, settings=settings), broker.send, ["a"])
        await keeper.look()
        await keeper.stop()
        assert client.zcard(index) == 1


async def test_a_keeper_is_stopped_at_any_moment(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker
) -> None:
    settings = RunSettings(prefix=prefix)
    never_started = RunKeeper(RunStore(valkey_url, settings=settings), broker.send, ["a"])
    await never_started.stop()
    await never_started.start()
    for number in range(20):
        await created(store, f"r{number}", is_sent=False)
        keeper = RunKeeper(RunStore(valkey_url, settings=settings), broker.send, ["a"])
        await keeper.start()
        await keeper.start()
        for _ in range(number):
            await asyncio.sleep(0)
        await keeper.stop()
        await keeper.stop()
    assert {task.get_name() for task in asyncio.all_tasks()} == {
        asyncio.current_task().get_name()  # type: ignore[union-attr]
    }


async def test_the_end_of_a_run_that_no_worker_reported_is_sent_again(
    store: RunStore, valkey_url: str, prefix: str, broker: Broker
) -> None:
    for run_id in ("ended", "running"):
        await created(store, run_id)
    ended = await store.claim("ended", "w1")
    await store.claim("running", "w1")
    await store.commit(ended, b"", turn=1, status="completed", result=b"1")
    keeper = RunKeeper(RunStore(valkey_url, settings=RunSettings(prefix=prefix)), broker.send, [])
    await keeper.after_lost_attempt("capsule.run", "running")
    await keeper.after_lost_attempt("capsule.run", "of-a-canvas")
    await keeper.after_lost_attempt("another.task", "ended")
    assert broker.sent == []
    await keeper.after_lost_attempt("capsule.run", "ended")
    assert broker.sent == [("ended", b"to ended")]
    broker.is_away = True
    with pytest.raises(ConnectionError):  # the reaper comes again
        await keeper.after_lost_attempt("capsule.run", "ended")
    await keeper.stop()
