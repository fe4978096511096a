"""Calls over redis-py's cluster client: its first ones, and those that it cuts off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.asyncio import RedisCluster

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.storage.connections.asynchronous import InjectedClient
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.drivers import AsyncStore
from capsule_tasks.storage.executions.store import execution_record
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.scripts import Code


def injected(url: str) -> InjectedClient:
    return InjectedClient(
        RedisCluster.from_url(url.replace("redis+cluster", "redis").split(",")[0])
    )


@pytest.mark.parametrize("connect", [AsyncConnections, PipelinedConnection, injected])
async def test_the_first_calls_go_to_the_nodes_that_have_their_keys(
    cluster_url: str, connect: Callable[[str], AsyncStore]
) -> None:
    """Without the nodes, the client chooses any of them, and after five mistakes it closes all."""
    before = mistakes(cluster_url)
    store = connect(cluster_url)
    calls = [execution_record.call(ExecutionKeys(f"id-{number}")) for number in range(16)]
    replies = await asyncio.gather(*(store.run(call) for call in calls))
    await store.close()
    if isinstance(store, InjectedClient):
        await store._client.aclose()
    assert [reply[0] for reply in replies] == [Code.MISSING] * 16
    assert mistakes(cluster_url) == before


def mistakes(url: str) -> list[Any]:
    """How many commands each node has answered with MOVED."""
    nodes = url.removeprefix("redis+cluster://").split(",")
    clients = [redis.Redis.from_url(f"redis://{node}") for node in nodes]
    counts = [client.info("errorstats").get("errorstat_MOVED") for client in clients]
    for client in clients:
        client.close()
    return counts


async def test_a_call_whose_connection_the_client_closes_was_lost() -> None:
    class Closing:
        connection_pool = redis.ConnectionPool()

        async def execute_command(self, *_: object, **__: object) -> None:
            writer: Any = None  # as a connection has it after `disconnect`
            writer.writelines([])

    with pytest.raises(StorageUnavailable, match="the connection was lost") as lost:
        await InjectedClient(Closing()).run(execution_record.call(ExecutionKeys("an-id")))
    assert lost.value.may_have_written
