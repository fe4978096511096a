"""One worker's keys on a server, and its scripts called as they are."""

from __future__ import annotations

from typing import Any

import redis

from capsule_tasks.storage import leases
from capsule_tasks.storage.executions import holds
from capsule_tasks.storage.keys import WorkerKeys, worker_index
from capsule_tasks.storage.scripts import Script
from tests.servers import fresh_prefix

BY_NAME = {
    value.name: value
    for module in (holds, leases)
    for value in vars(module).values()
    if isinstance(value, Script)
}
LEASE_MS, KEEP_MS = 50_000, 100_000
MEMORY_MS = 600_000


class Bench:
    """One worker's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        prefix = fresh_prefix()
        self.worker = WorkerKeys("w", prefix).worker
        self.operations = WorkerKeys("w", prefix).operations
        self.held = WorkerKeys("w", prefix).held
        self.workers = worker_index(prefix)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a script and check that every key it left has an expiry; return the reply."""
        script = BY_NAME[name]
        keys = [getattr(self, key) for key in script.keys]
        reply: list[Any] = self.client.eval(script.source, len(keys), *keys, *args)
        for key in keys:
            assert self.client.pttl(key) != -1, key
        return reply

    def acquire(self, operation_id: str = "o", age_ms: int = 0) -> list[Any]:
        return self.call("workers/lease_acquire", operation_id, age_ms, LEASE_MS, KEEP_MS)

    def leased(self) -> str:
        token: bytes = self.acquire()[1]
        return token.decode()

    def lapse(self) -> None:
        self.client.hset(self.worker, "until", self.now_us() - 1)

    def lease(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(self.worker).items()}

    def members(self) -> set[str]:
        return {member.decode() for member in self.client.smembers(self.held)}

    def now_us(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1_000_000 + int(micros)

    def ttl(self, key: str) -> int:
        return int(self.client.pttl(key))

    def is_empty(self) -> bool:
        keys = (self.worker, self.operations, self.held, self.workers)
        return not self.client.exists(*keys)
