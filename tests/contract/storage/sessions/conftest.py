"""One suite for every store of named sessions: Redis 6.2, Valkey 9 and a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from capsule_tasks.storage import AsyncConnections
from tests.contract.storage.sessions.subjects import Subject
from tests.servers import fresh_prefix

STORES = ["redis62_url", "valkey_url", "cluster_url"]


@pytest.fixture(params=STORES)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    store = AsyncConnections(request.getfixturevalue(request.param))
    yield Subject(store, fresh_prefix())
    await store.close()
