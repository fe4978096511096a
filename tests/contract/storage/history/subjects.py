"""Every implementation of a history, behind one asynchronous face for the suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import redis
from redis.asyncio import Redis

from capsule_tasks import History, SyncHistory
from capsule_tasks.settings import ConnectionSettings, HistorySettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.keys import SessionKeys
from tests.servers import fresh_prefix

METHODS = (
    "get_items", "read", "add_items", "pop_item", "pop_suffix", "replace", "clear_session", "info",
    "close",
)  # fmt: skip


class AwaitedSyncHistory:
    """A SyncHistory whose methods can be awaited."""

    def __init__(self, history: SyncHistory) -> None:
        self.history = history

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.history, name)
        if name not in METHODS:
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            return value(*args, **kwargs)

        return call


class Subject:
    """One implementation: histories by id, and a way around them to the raw records."""

    def __init__(self, open_history: Callable[..., Any], raw: Any, prefix: str) -> None:
        self._open = open_history
        self._raw = raw
        self._settings = HistorySettings(prefix=prefix)

    def history(self, session_id: str = "user-42", **changes: Any) -> Any:
        session_settings = changes.pop("session_settings", None)
        settings = msgspec.structs.replace(self._settings, **changes)
        return self._open(session_id, settings=settings, session_settings=session_settings)

    def keys(self, session_id: str = "user-42") -> SessionKeys:
        return SessionKeys(session_id, self._settings.prefix)

    def seed(self, record: bytes, session_id: str = "user-42") -> None:
        """Push a record behind the history's back."""
        self._raw.rpush(self.keys(session_id).items, record)

    def holds(self, text: bytes) -> bool:
        """Whether this text is anywhere in what is stored under the subject's keys."""
        dump = self._raw.dump
        keys = self._raw.scan_iter(match=f"{self._settings.prefix}:*")
        return any(text in dump(key) for key in keys)

    def records(self, key: str) -> list[bytes]:
        found: list[bytes] = self._raw.lrange(key, 0, -1)
        return found


@asynccontextmanager
async def opened(url: str, face: str) -> AsyncIterator[Subject]:
    """The subject at a URL, with one of the two faces."""
    async with AsyncExitStack() as stack:
        store: Any = AsyncConnections(url) if face == "async" else SyncConnections(url)
        raw = raw_client(url)
        stack.callback(raw.close)
        if face == "async":
            stack.push_async_callback(store.close)
        else:
            stack.callback(store.close_blocking)

        def open_history(session_id: str, **options: Any) -> Any:
            if face == "async":
                return History(session_id, store, **options)
            return AwaitedSyncHistory(SyncHistory(session_id, store, **options))

        yield Subject(open_history, raw, fresh_prefix())


def raw_client(url: str) -> Any:
    target = targets.parsed(url, ConnectionSettings())
    if target.kind == "cluster":
        host, port = target.addresses[0]
        return redis.RedisCluster(host=host, port=port)
    return redis.Redis.from_url(url)


def async_client(url: str, **options: Any) -> Redis:
    client: Redis = Redis.from_url(url, **options)
    return client
