"""Fixtures of the tests of realtime sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from capsule_tasks.realtime.openai.websocket import OpenAIRealtime
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.listeners import Heard


@pytest.fixture
async def server() -> AsyncIterator[RealtimeServer]:
    """A server without a script: `server.add(…)` appends replies."""
    async with RealtimeServer() as server:
        yield server


@pytest.fixture
async def model() -> AsyncIterator[OpenAIRealtime]:
    """A model, of which nothing is left after the test."""
    before = asyncio.all_tasks()
    model = OpenAIRealtime(answer_timeout_s=5, close_timeout_s=5)
    yield model
    await model.close()
    names = [f"{task.get_name()} {task.get_coro()!r}" for task in asyncio.all_tasks() - before]
    assert [name for name in names if "realtime " in name or "keepalive" in name] == []


@pytest.fixture
def heard(model: OpenAIRealtime) -> Heard:
    heard = Heard()
    model.add_listener(heard)
    return heard
