"""Time that a test sets: how old keys are, and what the scripts take for the time."""

from __future__ import annotations

from typing import Any

import redis

from capsule_tasks.storage.connections.targets import Location
from capsule_tasks.storage.scripts import Call

_TIME = "redis.call('TIME')"
_KEY = "test:clock"


def elapse(client: redis.Redis, prefix: str, seconds: float) -> None:
    """Let keys lapse as if that time went by."""
    for key in client.scan_iter(match=f"{prefix}:*"):
        left_ms = int(client.pttl(key))
        if left_ms >= 0:
            client.pexpire(key, left_ms - int(seconds * 1000))


class ClockedStore:
    """A store on a real server whose scripts take the time from `now_us`; times to live go on."""

    is_closed = False

    def __init__(self, client: redis.Redis, now_us: int) -> None:
        self._client = client
        self.location = Location("server", frozenset({f"{id(client):x}"}))
        self.now_us = now_us

    def run_blocking(self, call: Call) -> Any:
        source = call.script.source.replace(_TIME, f"redis.call('LRANGE', '{_KEY}', 0, 1)")
        assert "'TIME'" not in source, "another way to ask for the time"
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(_KEY)
            pipeline.rpush(_KEY, *divmod(self.now_us, 1_000_000))
            pipeline.eval(source, len(call.keys), *call.keys, *call.args)
            return pipeline.execute()[-1]
