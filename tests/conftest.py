"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from capsule_tasks.sessions import Session


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    """A session with the default settings."""
    async with Session() as session:
        yield session
