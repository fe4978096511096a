"""Calls that do not wait for a busy session, submitted as the call before ends."""

from __future__ import annotations

import asyncio
from typing import Any, Self
from uuid import uuid4

import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client import NamedSession
from capsule_tasks.client.sessions import named_session
from capsule_tasks.errors import NamedSessionBusy
from tests.integration.named_sessions import FakeOwner
from tests.sessions import HANG_S

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # which Celery makes


@pytest.fixture
def app(valkey_url: str, prefix: str) -> Celery:
    app = Celery(broker=valkey_url, backend=valkey_url)
    app.conf.update(capsule_redis_url=valkey_url, capsule_prefix=prefix)
    return app


@pytest.fixture
def session(app: Celery) -> NamedSession:
    return Capsule(app).session(uuid4().hex)


class LateOwner(FakeOwner):
    """Notes the end of a call when it is told to, long after it has stored the result."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.may_note = asyncio.Event()
        done = self.store.done

        async def done_later(*args: Any) -> None:
            await self.may_note.wait()
            await done(*args)

        self.store.done = done_later  # type: ignore[method-assign, assignment]
        return self


async def test_a_session_whose_call_has_a_result_is_not_busy(
    app: Celery, session: NamedSession
) -> None:
    async with LateOwner(app, session.id) as owner:
        first = await session.aexecute("1", busy="error")
        running = asyncio.create_task(owner.run_next())
        assert await first.aget(HANG_S) == 1
        again = asyncio.create_task(session.aexecute("2", busy="error"))
        await asyncio.wait({again}, timeout=0.1)
        assert not again.done()
        owner.may_note.set()
        await running
        await asyncio.gather(again, owner.run_next())
        assert await again.result().aget(HANG_S) == 2


async def test_a_session_whose_owner_never_notes_the_end_is_busy(
    app: Celery, session: NamedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_session, "_NOTED_WITHIN_S", 0.05)
    async with LateOwner(app, session.id) as owner:
        first = await session.aexecute("1")
        running = asyncio.create_task(owner.run_next())
        assert await first.aget(HANG_S) == 1
        with pytest.raises(NamedSessionBusy):
            await session.aexecute("2", busy="error")
        owner.may_note.set()
        await running


async def test_a_session_is_busy_with_a_call_that_runs_and_with_one_that_waits(
    app: Celery, session: NamedSession
) -> None:
    async with FakeOwner(app, session.id) as owner:
        await session.aexecute("1")
        begun = await owner.next_call()
        claimed = await owner.claim(begun)
        with pytest.raises(NamedSessionBusy, match="1 of its calls are unfinished"):
            await session.aexecute("2", busy="error")
        await session.aexecute("2")
        with pytest.raises(NamedSessionBusy, match="2 of its calls are unfinished"):
            await session.aexecute("3", busy="error")
        await owner.finish(begun, claimed)
