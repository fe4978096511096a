"""Hosts of named sessions without Celery: real Redis, real children, results in a mapping.

As a script, `python -m tests.integration.hosting URL PREFIX NAME LEASE_S` hosts sessions in a
process of its own, which can be killed.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, Self

import msgspec
import redis
import redis.asyncio as asyncio_redis

from capsule_tasks.executions.hosting.child import HostedProfile
from capsule_tasks.executions.hosting.host import SessionHost
from capsule_tasks.executions.hosting.hosted import HostedSession
from capsule_tasks.executions.hosting.outcomes import CallOutcome
from capsule_tasks.executions.hosting.plan import HostLimits, HostPlan
from capsule_tasks.executions.publishing.loss_counter import LossCounter
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.protocol.calls import (
    SessionCall,
    SessionReply,
    SessionRequest,
    decode_reply,
    encode_call,
    encode_request,
)
from capsule_tasks.protocol.events import Ended, EventMessage, UnknownEvent
from capsule_tasks.protocol.messages import InputRequest, Output
from capsule_tasks.sessions import SessionPool
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.settings import (
    ExecutionSettings,
    LeaseSettings,
    NamedSessionSettings,
    Profile,
    PublishSettings,
    SessionConfig,
    TenantSettings,
)
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore
from capsule_tasks.storage.sessions.store import NamedSessionStore
from tests.streaming import HANG_S, OutputLog

PROFILE = "sandbox"
Results = MutableMapping[str, CallOutcome]


class RedisResults(Results):
    """A result backend that processes share."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._key = f"{prefix}:results"

    def __getitem__(self, call_id: str) -> CallOutcome:
        found = self._client.hget(self._key, call_id)
        if found is None:
            raise KeyError(call_id)
        return msgspec.msgpack.decode(found, type=CallOutcome)

    def __setitem__(self, call_id: str, outcome: CallOutcome) -> None:
        self._client.hset(self._key, call_id, msgspec.msgpack.encode(outcome))

    def __delitem__(self, call_id: str) -> None:
        self._client.hdel(self._key, call_id)

    def __iter__(self) -> Iterator[str]:
        return (call_id.decode() for call_id in self._client.hkeys(self._key))

    def __len__(self) -> int:
        return self._client.hlen(self._key)


class HostWorker:
    """One worker that hosts named sessions and runs nothing else."""

    def __init__(
        self,
        url: str,
        prefix: str,
        results: Results,
        *,
        name: str = "w",
        lease_s: float = 15.0,
        silent_retention_s: float = 60.0,
        hold_ttl_s: float = 60.0,
        config: SessionConfig | None = None,
        tenants: dict[str, TenantSettings] | None = None,
        **limits: Any,
    ) -> None:
        self.results = results
        self.fault: Exception | None = None
        """Raised by the result backend."""
        self.publisher = Publisher(
            url,
            worker=name,
            settings=PublishSettings(),
            retention=ExecutionSettings(
                prefix=prefix, silent_retention_s=silent_retention_s, hold_ttl_s=hold_ttl_s
            ),
            sessions=NamedSessionSettings(prefix=prefix, hold_ttl_s=hold_ttl_s),
            lease=LeaseSettings(lease_s=lease_s),
            may_drop=False,
            ended_elsewhere=self._stored_end,
            fail_result=lambda *_: None,
            task_retention=lambda _: None,
        )
        self.supervisor = Supervisor(
            SessionPool({"blocking": Profile(), "async": Profile()}),
            async_limit=10,
            publisher=self.publisher,
            losses=LossCounter(5),
            output_log=OutputLog(),
        )
        self.spawner = TemplateSpawner(Profile(start="cold"))
        profile = HostedProfile(
            name=PROFILE,
            limits=HostLimits(**({"max_live": 10, "idle_timeout_s": 1000.0} | limits)),
            config=config or SessionConfig(),
            spawner=self.spawner,
        )
        self.checkpoints = CheckpointStore(
            self.publisher.connection, settings=self.publisher.sessions.settings
        )
        self.host = SessionHost(
            [profile],
            publisher=self.publisher,
            supervisor=self.supervisor,
            checkpoints=self.checkpoints,
            tenants=tenants or {},
            store_result=self._store_result,
            stored_end=self._stored_end,
        )

    @property
    def plan(self) -> HostPlan:
        return self.host.profiles[PROFILE].plan

    @property
    def hosted(self) -> dict[str, HostedSession]:
        return self.host.profiles[PROFILE].sessions

    def pid(self, session_id: str) -> int:
        """The process of a session that is here."""
        session = self.hosted[session_id].child
        assert session is not None
        assert session.pid is not None
        return session.pid

    async def start(self) -> None:
        await self.supervisor.start()
        await self.host.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.host.stop(grace_s)
        await self.supervisor.stop()
        await self.spawner.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _store_result(self, call_id: str, outcome: CallOutcome) -> None:
        if self.fault is not None:
            raise self.fault
        assert call_id not in self.results, f"call {call_id} has two results"
        self.results[call_id] = outcome

    def _stored_end(self, call_id: str) -> Ended | None:
        found = self.results.get(call_id)
        return Ended(outcome=found.outcome, type=found.type) if found is not None else None


class Caller:
    """Submits calls, and reads what becomes of them."""

    def __init__(self, url: str, prefix: str, hang_s: float = HANG_S) -> None:
        self.hang_s = hang_s
        self._url = url
        self._connection = PipelinedConnection(url)
        self.sessions = NamedSessionStore(
            self._connection, settings=NamedSessionSettings(prefix=prefix)
        )
        self.executions = ExecutionStore(
            self._connection, settings=ExecutionSettings(prefix=prefix)
        )
        self._ids: Iterator[int] = itertools.count(1)

    async def submit(self, session_id: str, source: str, **fields: Any) -> str:
        """The id of the call."""
        tenant = fields.pop("tenant", "")
        call_id = fields.pop("call_id", None) or f"{session_id}-{next(self._ids)}"
        payload = encode_call(SessionCall(source=source, **fields))
        await self.sessions.submit(session_id, call_id, payload, profile=PROFILE, tenant=tenant)
        return call_id

    async def events(self, call_id: str) -> list[EventMessage | UnknownEvent]:
        """All events of the call until now."""
        page = await self.executions.read(call_id)
        return [event.message for event in page.events] if page is not None else []

    async def ended(self, call_id: str) -> Ended:
        """The last event, once it is there."""
        async with asyncio.timeout(self.hang_s):
            while True:
                events = await self.events(call_id)
                if events and isinstance(events[-1], Ended):
                    return events[-1]
                await asyncio.sleep(0.005)

    async def printed(self, call_id: str) -> str:
        """What the call has written until now."""
        found = await self.events(call_id)
        return "".join(event.data for event in found if isinstance(event, Output))

    async def run(self, session_id: str, source: str, **fields: Any) -> Ended:
        return await self.ended(await self.submit(session_id, source, **fields))

    async def ask(self, session_id: str, request: SessionRequest) -> SessionReply:
        """The owner's reply to a request."""
        request_id = await self.sessions.request(session_id, encode_request(request))
        async with asyncio.timeout(self.hang_s):
            while (reply := await self.sessions.read_reply(session_id, request_id)) is None:
                await asyncio.sleep(0.005)
        return decode_reply(reply)

    async def asks(self, call_id: str) -> None:
        """Return once the call waits for input."""
        async with asyncio.timeout(self.hang_s):
            while not any(isinstance(e, InputRequest) for e in await self.events(call_id)):
                await asyncio.sleep(0.005)

    async def unfinished(self, session_id: str) -> int:
        return (await self.sessions.info(session_id)).unfinished

    async def settled(self, session_id: str) -> None:
        """Return once no call of the session is unfinished."""
        async with asyncio.timeout(self.hang_s):
            while await self.unfinished(session_id):
                await asyncio.sleep(0.005)

    async def delete(self, key: str) -> None:
        """Lose a key of Redis."""
        async with asyncio_redis.from_url(self._url) as client:
            assert await client.delete(key) == 1

    async def close(self) -> None:
        await self._connection.close()


class HostProcess:
    """A worker in a process of its own."""

    def __init__(self, url: str, prefix: str, name: str, lease_s: float) -> None:
        command = [sys.executable, "-m", "tests.integration.hosting", url, prefix, name]
        self.process = subprocess.Popen([*command, str(lease_s)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        """Wait for its end."""
        with self.process:
            self.process.wait()


async def main(url: str, prefix: str, name: str, lease_s: str) -> None:
    """Host sessions until SIGTERM."""
    results = RedisResults(url, prefix)
    async with HostWorker(url, prefix, results, name=name, lease_s=float(lease_s)):
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
