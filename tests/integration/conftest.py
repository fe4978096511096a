"""Fixtures of the integration tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from capsule_tasks.settings import LimitSettings
from tests.sandboxes import (
    PACKAGES,
    Sandbox,
    SentSandbox,
    StartSandbox,
    profile_name,
    started,
)

if TYPE_CHECKING:
    from capsule_tasks import Capsule
    from capsule_tasks.storage.runs.store import RunStore
    from tests.acceptance.workers import Worker
    from tests.integration.hosting import Caller, Results
    from tests.integration.http_models import Clients


@pytest.fixture(scope="session")
def code_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Capsule]]:
    """A worker with each profile of `SentSandbox`, and a producer."""
    from capsule_tasks import Capsule
    from capsule_tasks.testing.servers import PrivateServer
    from tests.acceptance.workers import Worker, close, producer
    from tests.sandboxes import sent_profiles

    directory = tmp_path_factory.mktemp("code")
    # Values keep the types that sessions give them.
    conf: dict[str, Any] = {"result_serializer": "pickle", "result_accept_content": ["pickle"]}
    of_worker = json.dumps({"capsule_code_profiles": sent_profiles(), **conf})
    with PrivateServer(directory / "redis") as server:
        app = "tests.acceptance.others.code_app"
        with Worker(server.url, directory, app=app, TEST_CONF=of_worker) as worker:
            sender = producer(server.url, worker.queue, **conf)
            yield worker, Capsule(sender)
            close(sender)


@pytest.fixture(params=["session", "worker"])
def start_sandbox(request: pytest.FixtureRequest) -> StartSandbox:
    """Starts sandboxes: sessions of this process, or of a worker that is sent the code."""
    if request.param == "session":
        return started
    if PACKAGES:
        pytest.skip("as another user only the sessions themselves are tested")
    worker, capsule = request.getfixturevalue("code_worker")

    @asynccontextmanager
    async def sent(
        limits: LimitSettings | None = None, **sandbox: object
    ) -> AsyncIterator[SentSandbox]:
        yield SentSandbox(capsule, profile_name(limits, sandbox), worker.pid)

    return sent


@pytest.fixture
async def sandbox(start_sandbox: StartSandbox) -> AsyncIterator[Sandbox]:
    async with start_sandbox() as sandbox:
        yield sandbox


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[RunStore]:
    """A store of runs, for whose runs the worker `w1` has a lease."""
    # Loaded here: `test_sandbox*.py` also run with a Python that cannot import redis.
    from capsule_tasks.settings import LeaseSettings, RunSettings
    from capsule_tasks.storage.runs.store import Lease, RunStore

    async with (
        Lease("w1", valkey_url, settings=LeaseSettings(lease_s=600), prefix=prefix) as lease,
        RunStore(valkey_url, settings=RunSettings(prefix=prefix)) as store,
    ):
        await lease.acquire()
        yield store


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    """The official client of model servers, for engines of durable runs."""
    from tests.integration.http_models import Clients  # as above

    clients = Clients()
    yield clients
    await clients.close()


@pytest.fixture
def results() -> Results:
    """The result backend of a worker that hosts named sessions."""
    return {}


@pytest.fixture
async def caller(valkey_url: str, prefix: str) -> AsyncIterator[Caller]:
    """A producer of calls of named sessions."""
    from tests.integration.hosting import Caller  # as above

    caller = Caller(valkey_url, prefix)
    yield caller
    await caller.close()
