"""Fixtures of the tests of realtime sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from capsule_tasks.testing.realtime import RealtimeServer


@pytest.fixture
async def server() -> AsyncIterator[RealtimeServer]:
    """A server without a script: `server.add(…)` appends replies."""
    async with RealtimeServer() as server:
        yield server
