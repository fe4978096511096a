"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from capsule_tasks.storage.runs.store import RunStore


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[RunStore]:
    """A store of runs, for whose runs the worker `w1` has a lease."""
    # Loaded here: `test_sandbox*.py` also run with a Python that cannot import redis.
    from capsule_tasks.settings import RunSettings
    from capsule_tasks.storage.runs.store import Lease, RunStore

    async with (
        Lease("w1", valkey_url, prefix=prefix) as lease,
        RunStore(valkey_url, settings=RunSettings(prefix=prefix)) as store,
    ):
        await lease.acquire()
        yield store
