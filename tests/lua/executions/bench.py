"""One execution's keys on a server, and its scripts called as they are."""

from __future__ import annotations

from typing import Any

import msgspec
import redis

from capsule_tasks.storage.executions import forgetting, store
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.scripts import Script
from tests.servers import fresh_prefix

BY_NAME = {v.name: v for v in (vars(store) | vars(forgetting)).values() if isinstance(v, Script)}
AGE_MS, KEPT_MS, QUIET_MS, CONTROL_MS = 600_000, 60_000, 20_000, 300_000
MARK_BYTES = 100


def limits(live: int = 1000, kept: int = 400) -> str:
    return f"{MARK_BYTES} {live} {kept} {AGE_MS} {KEPT_MS} {QUIET_MS}"


class Bench:
    """One execution's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.prefix = fresh_prefix()
        self.keys: Any = ExecutionKeys("e", self.prefix)

    def call(self, name: str, *args: Any, keys: Any = None) -> list[Any]:
        """Call a script and check that every key it left has an expiry; return the reply."""
        script = BY_NAME[name]
        names = [getattr(keys or self.keys, key) for key in script.keys]
        reply: list[Any] = self.client.eval(script.source, len(names), *names, *args)
        for key in names:
            assert self.client.pttl(key) != -1, key
        return reply

    def claim(
        self,
        claim: str = "c1",
        owner: str = "w1",
        held_by: str = "",
        *events: str,
        state: str = "",
        outcome: str = "",
        loud: int = 0,
    ) -> list[Any]:
        about = msgspec.msgpack.encode(["late", "task", "worker", "g", "3", limits()])
        return self.call(
            "executions/claim",
            *(claim, owner, held_by, about, state, outcome, loud),
            *(self.keys.channel, "LOST", "BEGUN", *events),
        )

    def append(
        self,
        attempt: Any,
        first_seq: int,
        *events: str,
        state: str = "",
        outcome: str = "",
        loud: int = 0,
        live: int = 1000,
        kept: int = 400,
    ) -> list[Any]:
        return self.call(
            "executions/append",
            *(attempt, first_seq, state, outcome, loud, limits(live, kept)),
            *(self.keys.channel, *events),
        )

    def control(self, command: str = "k1", data: str = "CANCEL") -> list[Any]:
        bells = f"{self.prefix}:bell:"
        return self.call("executions/send_command", command, CONTROL_MS, bells, "e", data)

    def reap(self, owner: str, attempt: Any, outcome: str) -> list[Any]:
        return self.call(
            "executions/reap",
            *(owner, attempt, outcome, limits(), self.keys.channel, "REAPED"),
        )

    def read(self, after: str = "", count: int = 100) -> list[Any]:
        return self.call("executions/read", after, count)

    def said(self, after: str = "", count: int = 100) -> list[str]:
        return [data.decode() for data in self.read(after, count)[8::3]]

    def ids(self) -> list[str]:
        return [data.decode() for data in self.read()[6::3]]

    def meta(self) -> dict[str, str]:
        found = self.client.hgetall(self.keys.meta)
        return {k.decode(): v.decode() for k, v in found.items()}

    def kinds(self) -> dict[str, str]:
        """Every key of the execution with its type; each has a time to live."""
        found = {}
        for key in self.client.scan_iter(match=f"{self.prefix}:*"):
            assert self.client.pttl(key) > 0, key
            found[key.decode().rpartition("}:")[2]] = self.client.type(key).decode()
        return found
