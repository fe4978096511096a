"""One named session's keys on a server, and its scripts called as they are."""

from __future__ import annotations

from typing import Any

import redis

from capsule_tasks.storage.keys import (
    HostKeys,
    NamedSessionKeys,
    SessionIndexKeys,
    TenantKeys,
    WantedKeys,
)
from capsule_tasks.storage.scripts import Script
from capsule_tasks.storage.sessions import scripts
from tests.servers import fresh_prefix

BY_NAME = {value.name: value for value in vars(scripts).values() if isinstance(value, Script)}
TTL_MS, KNOWN_MS, REQUEST_MS, TOKEN_MS = 100_000, 50_000, 30_000, 20_000


class Bench:
    """One session, its tenant and its owners, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.prefix = fresh_prefix()
        self.keys = NamedSessionKeys("s", self.prefix)
        self.wanted = WantedKeys("p", self.prefix)
        self.doorbell = f"{self.prefix}:doorbell:"
        self.subscription = client.pubsub(ignore_subscribe_messages=True)

    def owner_of(self, name: str) -> Any:
        kind = name.removeprefix("sessions/")
        if kind.startswith("index_"):
            return SessionIndexKeys(self.prefix)
        if kind.startswith("tenant_"):
            return TenantKeys("t", self.prefix)
        if kind in ("hold", "held"):
            return HostKeys("w", self.prefix)
        return self.wanted if "want" in kind else self.keys

    def call(self, kind: str, *args: Any, request: str = "r") -> list[Any]:
        """Call a script, check that every key it left expires, and return the reply."""
        script = BY_NAME[f"sessions/{kind}"]
        owner = self.owner_of(script.name)
        keys = [
            self.keys.reply(request) if key == "reply" else getattr(owner, key)
            for key in script.keys
        ]
        reply: list[Any] = self.client.eval(script.source, len(keys), *keys, *args)
        for key in keys:
            assert self.client.pttl(key) != -1, key
        return reply

    # --- the scripts with what most tests give them ----------------------------------------------

    def submit(self, call: str, **changes: Any) -> list[Any]:
        given = {
            "session_id": "s",
            "call": call,
            "payload": f"run {call}",
            "profile": "p",
            "tenant": "t",
            "may_wait": 1,
            "listed_under": self.record().get("token", "0"),
            "max_waiting": 9,
            "ttl_ms": TTL_MS,
            "doorbell_prefix": self.doorbell,
        }
        return self.call("submit", *{**given, **changes}.values())

    def take(self, incarnation: str = "w", operation: str = "o", **changes: Any) -> list[Any]:
        given = {"steal": 0, "expected": 0, "profile": "p", "ttl_ms": TTL_MS}
        return self.call("take", operation, 0, incarnation, *{**given, **changes}.values())

    def taken(self, incarnation: str = "w", operation: str = "o", **changes: Any) -> str:
        token: bytes = self.take(incarnation, operation, **changes)[1]
        return token.decode()

    def begin(self, token: str) -> list[Any]:
        return self.call("begin", token)

    def done(self, token: str, seq: int, cpu_ms: int = 0, has_run: int = 1) -> list[Any]:
        return self.call("done", token, seq, has_run, cpu_ms, KNOWN_MS, TTL_MS)

    def release(self, token: str, even_unfinished: int = 0) -> list[Any]:
        return self.call("release", token, even_unfinished, TOKEN_MS)

    # --- the whole state -------------------------------------------------------------------------

    def record(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(self.keys.session).items()}

    def log(self) -> list[tuple[bytes, bytes]]:
        """(id, call) of each entry."""
        return [(entry, fields[b"c"]) for entry, fields in self.client.xrange(self.keys.calls)]

    def known(self) -> dict[bytes, float]:
        return dict(self.client.zrange(self.keys.known, 0, -1, withscores=True))

    def state(self) -> dict[bytes, Any]:
        """Every key of this bench with its value as Redis dumps it."""
        found = sorted(self.client.scan_iter(match=f"{self.prefix}:*", count=1000))
        return {key: self.client.dump(key) for key in found}

    def listen(self, *channels: str) -> None:
        self.subscription.subscribe(*channels)
        while self.subscription.get_message(timeout=0.1) is not None:
            pass

    def rings(self) -> list[tuple[str, str]]:
        """(channel without its prefix, message) of what was published; all of it is here by now."""
        found = []
        self.client.publish(f"{self.prefix}:end", "")
        while message := self.subscription.get_message(timeout=0.1):
            channel = message["channel"].decode().removeprefix(f"{self.prefix}:")
            found.append((channel, message["data"].decode()))
        return found

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def ttl(self, key: str) -> int:
        return int(self.client.pttl(key))
