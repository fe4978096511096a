"""Check that services leave nothing behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import redis

HANG_S = 30


@contextlib.contextmanager
def nothing_left(url: str) -> Iterator[None]:
    """See that there are no more threads, descriptors, children or connections than before."""
    with redis.Redis.from_url(url) as client:
        client.ping()
        before = _all_there_is(client)
        yield
        deadline = time.monotonic() + HANG_S
        while more := _all_there_is(client) - before:
            # A server sees the end of a connection a little later, and a child may be ending.
            assert time.monotonic() < deadline, more


def _all_there_is(client: redis.Redis) -> Counter[str]:
    return Counter(
        [thread.name for thread in threading.enumerate()],
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        connections=len(client.client_list()),
        children=len(psutil.Process().children(recursive=True)),
    )
