"""One suite for every store of runs: Redis 6.2, Valkey 9, a cluster and memory, both faces."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.run_subjects import Subject, opened

STORES = {
    "redis62": "redis62_url",
    "valkey": "valkey_url",
    "cluster": "cluster_url",
    "memory": None,
}


@pytest.fixture(params=[(store, face) for store in STORES for face in ("async", "sync")],
                ids="-".join)  # fmt: skip
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    store, face = request.param
    fixture = STORES[store]
    async with opened(request.getfixturevalue(fixture) if fixture else None, face) as subject:
        yield subject
