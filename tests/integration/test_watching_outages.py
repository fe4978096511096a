"""Watchers while a server is away: the streams' own from the start, or the result backend."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from queue import Queue
from uuid import uuid4

import pytest
from celery import Celery

from capsule_tasks.client import Execution
from capsule_tasks.client import execution as execution_module
from capsule_tasks.client.watching.results import stored_end
from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.protocol.events import AttemptClaimed, Ended, Outcome
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.attempts import claim
from tests.sessions import HANG_S


async def test_listeners_are_notified_that_redis_stays_away() -> None:
    bells = Doorbells(f"redis://127.0.0.1:{free_port()}", timeout_s=0.3)
    try:
        with pytest.raises(StorageUnavailable, match=r"127\.0\.0\.1.*for 0\.3 s"):
            await bells.listen("channel", lambda _: None)
    finally:
        await bells.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the result backend has been asked."""
    asked = threading.Event()

    def noted(app: Celery, task_id: str) -> tuple[Ended | None, bool]:
        try:
            return stored_end(app, task_id)
        finally:
            asked.set()

    monkeypatch.setattr(execution_module, "stored_end", noted)
    return asked


def watched(url: str, backend_port: int) -> Execution:
    app = Celery(broker=url, backend=f"redis://127.0.0.1:{backend_port}")
    app.conf.capsule_redis_url = url
    return Execution(uuid4().hex, app=app)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes
def test_a_result_backend_that_is_away_is_asked_again(
    valkey_url: str, tmp_path: Path, asked: threading.Event
) -> None:
    port = free_port()
    execution = watched(valkey_url, port)
    found: Queue[object] = Queue()

    def watch() -> None:
        try:
            found.put([event.message for event in execution.events()])
        except BaseException as fault:  # noqa: BLE001 - reported to the test
            found.put(fault)

    threading.Thread(target=watch, daemon=True).start()
    assert asked.wait(HANG_S)
    with PrivateServer(tmp_path / "redis", port=port):
        execution.app.backend.store_result(execution.id, 5, "SUCCESS")
        events = found.get(timeout=HANG_S)
    assert isinstance(events, list), events
    [ended] = events
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.result_text) == (Outcome.SUCCEEDED, "5")


async def test_a_result_backend_that_is_away_holds_up_no_stream(
    valkey_url: str, asked: threading.Event
) -> None:
    execution = watched(valkey_url, free_port())
    async with ExecutionStore(valkey_url) as store:
        events = execution.aevents()
        first = asyncio.ensure_future(anext(events))
        assert await asyncio.to_thread(asked.wait, HANG_S)
        await claim(store, execution.id, owner="w", claim="c", worker="w@test")
        event = await asyncio.wait_for(first, HANG_S)
        await events.aclose()
    assert isinstance(event.message, AttemptClaimed)
