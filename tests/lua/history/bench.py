"""One session's keys on a server, and the scripts of its history called as they are."""

from __future__ import annotations

from typing import Any

import redis

from capsule_tasks.storage import operations
from capsule_tasks.storage.history import scripts
from capsule_tasks.storage.keys import SessionKeys
from capsule_tasks.storage.scripts import Call, Script
from tests.servers import fresh_prefix

TTL_MS = 60_000
BY_NAME = {
    value.name: value
    for module in (scripts, operations)
    for value in vars(module).values()
    if isinstance(value, Script)
}


class Bench:
    """One session's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = SessionKeys("s", fresh_prefix())

    def call(self, name: str, *args: Any, staging: str = "staging") -> list[Any]:
        script = BY_NAME[name]
        named = {"staging": self.keys.staging(staging)}
        if name == "history/pop":
            named["taken"] = self.keys.popped_by(args[0])
            named["corrupt"] = self.keys.popped_by(args[3])
        if name == "history/forget":
            named["taken..."] = args[0]
            args = ()
        keys = [named.get(key) or getattr(self.keys, key) for key in script.keys]
        call = Call(script, keys, list(args))
        reply: list[Any] = self.client.eval(script.source, len(call.keys), *call.keys, *call.args)
        return reply

    def append(self, operation_id: str, *records: bytes, age_ms: int = 0) -> list[Any]:
        return self.call("history/append", operation_id, age_ms, TTL_MS, 10, 100, *records)

    def items(self) -> list[bytes]:
        found: list[bytes] = self.client.lrange(self.keys.items, 0, -1)
        return found

    def history(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(self.keys.history)
        return found

    def everything(self) -> dict[str, Any]:
        """All keys of the session with their values, without their times to live."""
        found: dict[str, Any] = {}
        for key in self.client.scan_iter(match=f"{self.keys.items.partition('{')[0]}*"):
            name = key.decode().rpartition("}:")[2]
            match self.client.type(key):
                case b"hash":
                    found[name] = self.client.hgetall(key)
                case b"list":
                    found[name] = self.client.lrange(key, 0, -1)
                case b"zset":
                    found[name] = self.client.zrange(key, 0, -1)
                case b"string":
                    found[name] = self.client.get(key)
            assert 0 < self.client.pttl(key) <= 600_000, name
        return found


def replace(bench: Bench, *records: bytes, **changes: Any) -> list[Any]:
    values = {
        "operation_id": "r", "age_ms": 0, "ttl_ms": TTL_MS,
        "generation": bench.history().get(b"generation", b"0"), "start": 0, "stop": 3,
        "pruned": 0, "staged": 0, "staged_bytes": 0, "max_items": 10, "max_bytes": 100,
        "max_quarantined": 5, "corrupt": "",
    } | changes  # fmt: skip
    return bench.call("history/replace", *values.values(), *records)
