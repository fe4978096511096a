"""From where a history may be used, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from capsule_tasks import History, SyncHistory
from capsule_tasks.errors import (
    InvalidSetting,
    StorageClosed,
    StorageUnavailable,
)
from capsule_tasks.settings import ConnectionSettings, RetrySettings
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.testing.servers import PrivateServer
from tests.cutting_proxy import CuttingProxy
from tests.integration.histories import own_settings
from tests.servers import fresh_prefix

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    """A server that the test may break."""
    with PrivateServer(tmp_path / "own") as server:
        yield server


def connected(server: PrivateServer) -> int:
    """Clients of the server, without the one that asks."""
    with redis.Redis.from_url(server.url) as client:
        return sum(c["name"] == "history" for c in client.client_list())


async def until_left(server: PrivateServer) -> None:
    """The server notices a closed connection in its own time; a collected one closes itself."""
    async with asyncio.timeout(30):
        while connected(server):
            await asyncio.sleep(0)
    gc.collect()


# --- loops, threads, processes -------------------------------------------------------------------


def test_one_history_in_one_loop_after_another_leaves_no_connection(server: PrivateServer) -> None:
    history = History("s", f"{server.url}?client_name=history")

    async def add() -> int:
        await history.add_items([{"n": 1}])
        assert connected(server) == 1
        return len(await history.get_items())

    assert [asyncio.run(add()) for _ in range(3)] == [1, 2, 3]
    assert connected(server) == 0


def test_one_history_in_many_threads_with_loops_of_their_own(valkey_url: str) -> None:
    history = History("s", valkey_url, settings=own_settings())

    async def add(number: int) -> None:
        await asyncio.gather(*(history.add_items([{"t": number}]) for _ in range(20)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: asyncio.run(add(number)), range(6)))
    assert len(asyncio.run(history.get_items())) == 120


def test_a_blocking_history_is_shared_by_threads(valkey_url: str) -> None:
    with (
        SyncHistory("s", valkey_url, settings=own_settings()) as history,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda number: history.add_items([{"n": number}]), range(200)))
        found = sorted(item["n"] for item in history.get_items())
    assert found == list(range(200))


FORKING = """
import asyncio, os, sys
from capsule_tasks import History, SyncHistory
from capsule_tasks.settings import HistorySettings
url, prefix = sys.argv[1:]
settings = HistorySettings(prefix=prefix)
history = History("async", url, settings=settings)
blocking = SyncHistory("sync", url, settings=settings)

async def main():
    await history.add_items([{"from": "parent"}])
    blocking.add_items([{"from": "parent"}])
    pid = os.fork()
    if pid == 0:
        asyncio._set_running_loop(None)
        blocking.add_items([{"from": "child"}])
        asyncio.run(history.add_items([{"from": "child"}]))
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for _ in range(3):
        await history.add_items([{"from": "parent"}])
        blocking.add_items([{"from": "parent"}])
    print(len(await history.get_items()), len(blocking.get_items()))

asyncio.run(main())
"""


def test_both_sides_of_a_fork_go_on(valkey_url: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, valkey_url, fresh_prefix()],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.strip()) == (0, "5 5"), ended.stderr


def test_only_importing_history_loads_redis() -> None:
    code = (
        "import sys, capsule_tasks, capsule_tasks.child.main\n"
        "assert not {'redis', 'celery', 'capsule_tasks.storage'} & set(sys.modules)\n"
        "from capsule_tasks import History\n"
        "assert 'redis' in sys.modules and 'celery' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


# --- whose connections ---------------------------------------------------------------------------


@pytest.mark.parametrize("decode_responses", [False, True])
async def test_an_injected_client_is_used_as_it_is_and_stays_open(
    valkey_url: str, decode_responses: bool
) -> None:
    client = redis.asyncio.Redis.from_url(valkey_url, decode_responses=decode_responses)
    blocking = redis.Redis.from_url(valkey_url, decode_responses=decode_responses)
    settings = own_settings()
    async with History("s", client, settings=settings) as history:
        await history.add_items([{"n": "é"}])
        await client.rpush(history.core._keys.items, b"\xff")
    with SyncHistory("s", blocking, settings=settings) as history_:
        assert history_.get_items() == [{"n": "é"}]
        assert history_.pop_item() == {"n": "é"}
        assert history_.info().quarantined == 1
    assert await client.ping()
    assert blocking.ping()
    await client.aclose()
    blocking.close()


async def test_a_closed_owned_connection_raises_a_clear_error(server: PrivateServer) -> None:
    url = f"{server.url}?client_name=history"
    history, blocking = History("s", url), SyncHistory("s", url)
    await history.add_items([{}])
    blocking.add_items([{}])
    assert connected(server) == 2
    await history.close()
    await history.close()
    blocking.close()
    blocking.close()
    assert connected(server) == 0
    with pytest.raises(StorageClosed):
        await history.get_items()
    # Also where there is nothing to send.
    with pytest.raises(StorageClosed):
        await history.add_items([])
    with pytest.raises(StorageClosed):
        blocking.add_items([])
    with pytest.raises(StorageClosed):
        blocking.get_items()
    await History("never used", url).close()


@pytest.mark.parametrize("steps", range(8))
async def test_closing_in_the_middle_of_calls_leaves_no_connection(
    server: PrivateServer, steps: int
) -> None:
    """Calls wait for their turn, connect, or wait for a reply, when another task closes."""
    connections = AsyncConnections(
        f"{server.url}?client_name=history", ConnectionSettings(max_connections=2)
    )
    history = History("s", connections, settings=own_settings())
    calls = [asyncio.ensure_future(history.add_items([{"n": n}])) for n in range(6)]
    for _ in range(steps):
        await asyncio.sleep(0)
    await connections.close()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert outcome is None or isinstance(outcome, StorageClosed | StorageUnavailable)
    await until_left(server)


@pytest.mark.parametrize("steps", range(1, 8))
async def test_a_cancelled_close_leaves_no_connection(server: PrivateServer, steps: int) -> None:
    history = History("s", f"{server.url}?client_name=history", settings=own_settings())
    await asyncio.gather(*(history.add_items([{"n": n}]) for n in range(4)))
    closing = asyncio.ensure_future(history.close())
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    await until_left(server)


async def test_histories_share_given_connections(server: PrivateServer) -> None:
    connections = AsyncConnections(f"{server.url}?client_name=history")
    for number in range(10):
        async with History(f"s{number}", connections) as history:
            await history.add_items([{}])
    assert connected(server) == 1
    await connections.close()


async def test_many_calls_at_once_use_no_more_connections_than_allowed(
    server: PrivateServer,
) -> None:
    settings = ConnectionSettings(max_connections=3)
    connections = AsyncConnections(f"{server.url}?client_name=history", settings)
    history = History("s", connections)
    await asyncio.gather(*(history.add_items([{"n": n}]) for n in range(100)))
    assert connected(server) == 3
    assert len(await history.get_items()) == 100
    await connections.close()


@pytest.mark.parametrize("wrong", [None, 5, redis.Redis()], ids=lambda value: type(value).__name__)
def test_an_invalid_redis_target_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"redis\.asyncio"):
        History("s", wrong)


# --- scripts that the server lost ----------------------------------------------------------------


async def test_scripts_that_the_server_forgot_are_sent_again(server: PrivateServer) -> None:
    async with History("s", server.url) as history:
        for _ in range(3):
            await history.add_items([{"n": 1}])
            with redis.Redis.from_url(server.url) as client:
                client.script_flush()
        assert len(await history.get_items()) == 3


async def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    with PrivateServer(tmp_path, aof=True) as server:
        port = server.port
        async with History("s", server.url) as history:
            await history.add_items([{"n": 1}])
            server.stop()
            again = PrivateServer(tmp_path, aof=True, port=port)
            adding = asyncio.ensure_future(history.add_items([{"n": 2}]))
            await asyncio.to_thread(again.start)
            try:
                await adding
                assert await history.get_items() == [{"n": 1}, {"n": 2}]
            finally:
                again.stop()


# --- cancellation --------------------------------------------------------------------------------


async def test_a_cancelled_append_is_decided_before_the_caller_goes_on(valkey_url: str) -> None:
    """Cancelled at every possible await: whole or nothing, and nothing comes later."""
    connections = AsyncConnections(valkey_url, ConnectionSettings(max_connections=2))
    history = History("s", connections, settings=own_settings())
    outcomes = set()
    for steps in range(30):
        await history.clear_session()
        task = asyncio.ensure_future(history.add_items([{"n": 1}, {"n": 2}]))
        for _ in range(steps % 10):
            await asyncio.sleep(0)
        task.cancel()
        if steps % 3 == 0:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        left = await history.get_items()
        assert left in ([], [{"n": 1}, {"n": 2}])
        outcomes.add(len(left))
        assert await asyncio.wait_for(history.get_items(), 30) == left
    assert 0 in outcomes
    await asyncio.gather(*(history.get_items() for _ in range(10)))
    await connections.close()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_write_cancelled_before_it_was_done_can_be_repeated(
    valkey_url: str, times: int
) -> None:
    """As a task does that is cancelled, and delivered again with the operation of its turn."""
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    patient = RetrySettings(attempts=2, first_delay_s=60, max_delay_s=60)
    with CuttingProxy(port) as proxy:
        async with History("s", proxy.url, settings=own_settings(patient)) as history:
            await history.add_items([{"n": 1}, {"n": 2}])
            version = (await history.read()).version
            for call, left in (
                (lambda: history.add_items([{"n": 3}], operation_id="turn"), [1, 2, 3]),
                (lambda: history.replace(version, [{"n": 9}], operation_id="turn"), [9, 3]),
                (lambda: history.pop_suffix([{"n": 3}], operation_id="turn"), [9]),
                (lambda: history.pop_item(operation_id="turn"), []),
            ):
                for time in range(times):
                    seen = proxy.cuts
                    proxy.plan(["pass"] * time + ["before"])
                    task = asyncio.ensure_future(call())
                    while proxy.cuts == seen:
                        await asyncio.sleep(0.001)
                    task.cancel()
                    await asyncio.wait({task})
                    assert task.cancelled()
                before = await history.get_items()
                await call()
                assert before != await history.get_items()
                assert [item["n"] for item in await history.get_items()] == left
                await call()
                assert [item["n"] for item in await history.get_items()] == left


async def test_a_command_that_was_given_up_changes_nothing_later(server: PrivateServer) -> None:
    """The server is stopped while the command waits in its socket, and reads it much later."""
    async with History("s", server.url, settings=own_settings()) as history:
        await history.add_items([{"n": 1}])
        os.kill(server.pid, signal.SIGSTOP)
        task = asyncio.ensure_future(history.add_items([{"n": 2}]))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await history.get_items()
        assert found in ([{"n": 1}], [{"n": 1}, {"n": 2}])
        await history.add_items([{"n": 3}])
        assert await history.get_items() == [*found, {"n": 3}]


def test_an_interrupted_blocking_call_leaves_no_reply_behind(server: PrivateServer) -> None:
    with SyncHistory("s", server.url, settings=own_settings()) as history:
        history.add_items([{"n": 1}])
        os.kill(server.pid, signal.SIGSTOP)
        waker = threading.Timer(0.5, os.kill, (server.pid, signal.SIGCONT))
        previous = signal.signal(signal.SIGALRM, _interrupt)
        try:
            waker.start()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                history.add_items([{"n": 2}])
        finally:
            signal.signal(signal.SIGALRM, previous)
            waker.join()
        left = history.get_items()
        assert left in ([{"n": 1}], [{"n": 1}, {"n": 2}])
        history.add_items([{"n": 3}])
        assert history.get_items() == [*left, {"n": 3}]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def test_a_lost_connection_in_between_is_not_noticed(valkey_url: str) -> None:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    with CuttingProxy(port) as proxy:
        async with History("s", proxy.url, settings=own_settings()) as history:
            await history.add_items([{"n": 1}])
            proxy.plan(["after"])
            await history.add_items([{"n": 2}])
            assert proxy.cuts == 1
            assert await history.get_items() == [{"n": 1}, {"n": 2}]
