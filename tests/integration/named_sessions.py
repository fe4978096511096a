"""An owner of one named session, for tests of producers: real storage, and code run right here."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from celery import Celery

from capsule_tasks.client import NamedSession
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import ExecutionEnded
from capsule_tasks.protocol.calls import (
    SessionCall,
    SessionReply,
    SessionRequest,
    decode_call,
    decode_request,
    encode_reply,
)
from capsule_tasks.protocol.events import Ended, Outcome, encode_event
from capsule_tasks.settings import ExecutionSettings, NamedSessionSettings
from capsule_tasks.storage.connections.doorbells import Doorbells
from capsule_tasks.storage.executions.store import UNCLAIMED, ExecutionStore
from capsule_tasks.storage.executions.types import Claimed
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import BegunCall, RequestPage
from tests.attempts import append, claim
from tests.sessions import HANG_S

PROFILE = "sandbox"


class FakeOwner:
    """Holds a session, and begins and ends its calls one by one, as a worker does."""

    def __init__(self, app: Celery, session_id: str, incarnation: str = "w1") -> None:
        url, prefix = app.conf.capsule_redis_url, app.conf.capsule_prefix
        self.app = app
        self.session_id = session_id
        self.incarnation = incarnation
        self.store = NamedSessionStore(url, settings=NamedSessionSettings(prefix=prefix))
        self.executions = ExecutionStore(url, settings=ExecutionSettings(prefix=prefix))
        self.names: dict[str, Any] = {}
        self.ran: list[SessionCall] = []
        self.rang = asyncio.Event()
        self.asked = asyncio.Event()
        self._bells = Doorbells(url, timeout_s=5)

    async def __aenter__(self) -> Self:
        """Take the session, which need not exist."""
        taken = await self.store.take(self.session_id, self.incarnation, profile=PROFILE)
        self.token = taken.token
        await self._bells.listen(
            self.store.doorbell_of(self.incarnation), lambda _: self.rang.set()
        )
        await self._bells.listen(
            self.store.requests_doorbell_of(self.incarnation), lambda _: self.asked.set()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bells.close()
        await self.store.close()
        await self.executions.close()

    async def next_call(self) -> BegunCall:
        """Begin the next call; waits for the doorbell if there is none."""
        while True:
            self.rang.clear()
            begun = await self.store.begin(self.session_id, self.token)
            if begun is not None:
                return begun
            await self.rang.wait()

    async def claim(self, begun: BegunCall) -> Claimed:
        return await claim(
            self.executions,
            begun.call_id,
            owner=self.incarnation,
            claim=f"claim-{begun.call_id}",
            held_by=UNCLAIMED,
            task="capsule.execute",
            worker="fake@here",
        )

    async def run_next(self) -> Ended | None:
        """Run the next call to its end; None for one that was ended by others."""
        begun = await self.next_call()
        try:
            claimed = await self.claim(begun)
        except ExecutionEnded:
            await self.store.done(self.session_id, self.token, begun.seq)
            return None
        return await self.finish(begun, claimed)

    async def finish(self, begun: BegunCall, claimed: Claimed) -> Ended:
        call = decode_call(begun.payload)
        self.ran.append(call)
        try:
            value = eval(call.source, self.names)
        except Exception as error:  # noqa: BLE001
            value, ended = error, Ended(outcome=Outcome.FAILED, type=type(error).__name__)
        else:
            ended = Ended(outcome=Outcome.SUCCEEDED, result_text=repr(value))
        await append(
            self.executions,
            begun.call_id,
            claimed.attempt,
            2,
            [encode_event(ended)],
            state="ended",
            outcome=str(ended.outcome),
        )
        backend = self.app.backend
        if isinstance(value, Exception):
            await asyncio.to_thread(backend.mark_as_failure, begun.call_id, value)
        else:
            await asyncio.to_thread(backend.mark_as_done, begun.call_id, value)
        await self.store.done(self.session_id, self.token, begun.seq)
        return ended

    async def answer(self, reply: SessionReply) -> SessionRequest | None:
        """Answer the next request; waits for the doorbell if there is none."""
        while not (page := await self._requests()).requests:
            await self.asked.wait()
        (request,) = page.requests
        await self.store.reply(self.session_id, self.token, request, encode_reply(reply))
        return decode_request(request.payload)

    async def close_when_asked(self) -> None:
        while not (await self._requests()).is_closing:
            await self.asked.wait()
        assert await self.store.close_session(self.session_id, self.token)

    async def _requests(self) -> RequestPage:
        self.asked.clear()
        return await self.store.take_requests(self.session_id, self.token)


async def listed(app: Celery, session: NamedSession) -> None:
    """Return once the session is wanted."""
    store = (await watch_thread.watcher(app)).sessions
    async with asyncio.timeout(HANG_S):
        while not (await store.wanted_state(session.profile)).sessions:
            await asyncio.sleep(0)
