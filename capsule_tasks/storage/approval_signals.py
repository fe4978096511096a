"""Hearing of what is asked and decided, as it happens.

A signal says that there is something to look at. The store is the truth: one that was sent while
nobody listened is lost, so whoever listens lists what waits once the listening has begun.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry
from redis.sentinel import Sentinel as SyncSentinel

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import targets
from capsule_tasks.storage.async_connections import server_pool as async_server_pool
from capsule_tasks.storage.faults import FAULTS, told
from capsule_tasks.storage.keys import ApprovalKeys
from capsule_tasks.storage.run_types import Signal
from capsule_tasks.storage.sync_connections import server_pool

_decode = msgspec.msgpack.Decoder(Signal).decode


def _signal(data: bytes) -> Signal | None:
    """None for what this release does not know: a newer one may tell more, in the same channel."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@asynccontextmanager
async def listening(url: str, *, prefix: str = "capsule") -> AsyncIterator[AsyncIterator[Signal]]:
    """Signals from now on: what happens after the block was entered is heard.

    Raises StorageUnavailable when the connection is lost: begin again, and list what waits.
    """
    client = _client(url)
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    try:
        try:
            await pubsub.subscribe(ApprovalKeys(prefix).channel)
            await pubsub.parse_response()  # the server has confirmed it
        except FAULTS as error:
            raise told(error, was_sent=False) from error
        yield _heard(pubsub)
    finally:
        await pubsub.aclose()
        await client.aclose()


@contextmanager
def listening_blocking(url: str, *, prefix: str = "capsule") -> Iterator[Iterator[Signal]]:
    """As `listening`, for callers that block."""
    client = _sync_client(url)
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    try:
        try:
            pubsub.subscribe(ApprovalKeys(prefix).channel)
            pubsub.parse_response()  # the server has confirmed it
        except FAULTS as error:
            raise told(error, was_sent=False) from error
        yield _heard_blocking(pubsub)
    finally:
        pubsub.close()
        client.close()


async def _heard(pubsub: Any) -> AsyncIterator[Signal]:
    while True:
        try:
            message = await pubsub.get_message(timeout=None)
        except FAULTS as error:
            raise told(error, was_sent=False) from error
        if message is not None and (signal := _signal(message["data"])) is not None:
            yield signal


def _heard_blocking(pubsub: Any) -> Iterator[Signal]:
    while True:
        try:
            message = pubsub.get_message(timeout=None)
        except FAULTS as error:
            raise told(error, was_sent=False) from error
        if message is not None and (signal := _signal(message["data"])) is not None:
            yield signal


# Nobody retries here: a connection that comes back by itself would hide what it has missed.


def _client(url: str) -> Redis:
    target = targets.parsed(url, ConnectionSettings())
    match target.kind:
        case "server":
            return Redis.from_pool(async_server_pool(_patient(target)))
        case "sentinel":
            sentinel = Sentinel(list(target.addresses), sentinel_kwargs=target.sentinel_options)
            retry = Retry(NoBackoff(), 0)
            primary: Redis = sentinel.master_for(target.service, retry=retry, **_options(target))
            return primary
    host, port = target.addresses[0]
    # A cluster passes what is published to all of its nodes.
    return Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **_options(target))


def _sync_client(url: str) -> SyncRedis:
    target = targets.parsed(url, ConnectionSettings())
    match target.kind:
        case "server":
            return SyncRedis.from_pool(server_pool(_patient(target)))
        case "sentinel":
            sentinel = SyncSentinel(list(target.addresses), sentinel_kwargs=target.sentinel_options)
            retry = SyncRetry(NoBackoff(), 0)
            primary: SyncRedis = sentinel.master_for(
                target.service, retry=retry, **_options(target)
            )
            return primary
    host, port = target.addresses[0]
    return SyncRedis(host=host, port=port, retry=SyncRetry(NoBackoff(), 0), **_options(target))


def _patient(target: targets.Target) -> targets.Target:
    """A target whose silence is no fault: nobody may be asking for anything."""
    return replace(target, options={**target.options, "socket_timeout": None})


def _options(target: targets.Target) -> dict[str, Any]:
    options = {**_patient(target).options, "ssl": target.is_tls}
    if target.kind == "cluster":
        options.pop("db", None)
    return options
