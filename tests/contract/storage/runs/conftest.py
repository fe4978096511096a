"""One suite for every store of runs: Redis 6.2, Valkey 9 and a cluster, both faces."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.storage.runs.subjects import Subject, opened

STORES = {
    "redis62": "redis62_url",
    "valkey": "valkey_url",
    "cluster": "cluster_url",
}


@pytest.fixture(params=[(store, face) for store in STORES for face in ("async", "sync")],
                ids="-".join)  # fmt: skip
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    store, face = request.param
    async with opened(request.getfixturevalue(STORES[store]), face) as subject:
        yield subject
