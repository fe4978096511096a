"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule_tasks.sessions import Session
from tests.sessions import GilHold


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    """A session with the default settings."""
    async with Session() as session:
        yield session


@pytest.fixture
def gil_hold(tmp_path: Path) -> GilHold:
    """Code that holds the GIL until it is let go."""
    return GilHold(tmp_path)
