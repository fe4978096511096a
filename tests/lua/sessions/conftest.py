"""Fixtures of the tests of scripts of named sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.lua.sessions.bench import Bench


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)
