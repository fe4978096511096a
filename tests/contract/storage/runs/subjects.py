"""Every store of runs, behind one asynchronous face for the suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from capsule_tasks import History, SyncHistory
from capsule_tasks.settings import HistorySettings, LeaseSettings, RetrySettings, RunSettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.storage.drivers import drive, drive_blocking
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.runs.store import Lease, RunStore, SyncLease, SyncRunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim
from capsule_tasks.storage.scripts import Call
from tests.servers import fresh_prefix

LIMIT_S = 60
PRINT = "0123456789abcdef"


class Awaited:
    """A blocking face whose methods can be awaited."""

    def __init__(self, face: Any) -> None:
        self.face = face

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.face, name)
        if name == "approvals":
            return Awaited(value)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return value(*args, **kwargs)

        return call


@dataclass
class Subject:
    """One implementation, with a session, a worker, and a run in it."""

    store: Any
    face: str
    prefix: str
    session_id: str = "user-42"
    _leases: list[Any] = field(default_factory=list)

    def runs(self, **changes: Any) -> Any:
        settings = RunSettings(prefix=self.prefix, **changes)
        if self.face == "async":
            return RunStore(self.store, settings=settings)
        return Awaited(SyncRunStore(self.store, settings=settings))

    async def worker(self, incarnation: str, lease_s: float = 600.0) -> Any:
        """A worker that is alive, as far as its lease goes."""
        settings = LeaseSettings(lease_s=lease_s)
        options: Any = {"settings": settings, "prefix": self.prefix}
        lease: Any
        if self.face == "async":
            lease = Lease(incarnation, self.store, **options)
        else:
            lease = Awaited(SyncLease(incarnation, self.store, **options))
        await lease.acquire()
        return lease

    async def claimed(self, runs: Any, run_id: str = "run-1", worker: str = "w1") -> Claim:
        """A run that was just made, in the hands of a worker."""
        await self.worker(worker)
        await runs.create(run_id, self.session_id, b"{}", schema="1.2", agent="triage")
        claim: Claim = await runs.claim(run_id, worker)
        return claim

    async def parked(
        self,
        runs: Any,
        *approval_requests: ApprovalRequest,
        run_id: str = "run-1",
        worker: str = "w1",
    ) -> Any:
        claim = await self.claimed(runs, run_id, worker)
        return await runs.commit(
            claim,
            b'{"parked": 1}',
            turn=1,
            status="interrupted",
            approval_requests=approval_requests,
        )

    async def drive(self, operation: Operation[Any]) -> Any:
        """An operation below those that the store offers."""
        if self.face == "async":
            return await drive(operation, self.store)
        return drive_blocking(operation, self.store)

    async def call(self, call: Call) -> Any:
        """One script, as if something had sent it."""
        return await self.drive(call_script(call, RetrySettings()))

    def history(self, session_id: str | None = None, codec: Any = None, **changes: Any) -> Any:
        """The history of the session, as its own face; not of those that are awaited."""
        settings = HistorySettings(prefix=self.prefix, **changes)
        kind: Any = History if self.face == "async" else SyncHistory
        return kind(session_id or self.session_id, self.store, settings=settings, codec=codec)

    async def items(self) -> list[Any]:
        found = self.history().get_items()
        items: list[Any] = await found if self.face == "async" else found
        return items


def ask(call_id: str = "call-1", tool: str = "bare:pay", **changes: Any) -> ApprovalRequest:
    options: dict[str, Any] = {
        "agent": "triage",
        "fingerprint": PRINT,
        "arguments": '{"to": "ann"}',
    }
    return ApprovalRequest(call_id=call_id, tool=tool, **{**options, **changes})


async def until(ask_again: Callable[[], Awaitable[Any]]) -> Any:
    """Poll for the first true answer: the passing of time gives no signal."""
    async with asyncio.timeout(LIMIT_S):
        while not (answer := await ask_again()):
            await asyncio.sleep(0.01)
        return answer


@asynccontextmanager
async def opened(url: str, face: str) -> AsyncIterator[Subject]:
    """The subject at a URL, with one of the two faces."""
    async with AsyncExitStack() as stack:
        store: Any
        if face == "async":
            store = AsyncConnections(url)
            stack.push_async_callback(store.close)
        else:
            store = SyncConnections(url)
            stack.callback(store.close_blocking)
        yield Subject(store, face, fresh_prefix())
