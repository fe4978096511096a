"""Redis in memory: the index of what waits, leases, and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Code
from capsule_tasks.testing.memory_runs import Args, Keys, Memory


class PlainScripts:
    """The scripts of the index of what waits, of leases, and of steps."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def table(self) -> dict[str, Callable[[Keys, Args], Reply]]:
        return {
            "approvals_add": self._add,
            "approvals_drop": self._drop,
            "approvals_list": self._list,
            "approvals_due": self._due,
            "approvals_postpone": self._postpone,
            "lease_acquire": self._acquire,
            "lease_renew": self._renew,
            "lease_read": self._lease,
            "step_begin": self._begin,
            "step_end": self._end,
        }

    def _add(self, keys: Keys, args: Args) -> Reply:
        now_us, parts = self._memory.now_us(), args["parts"]
        everything = self._zset(keys["all"])
        score = max(now_us, max(everything.values(), default=0) + 1)
        for member, details, due_in_ms in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            place = everything.get(member, score)
            for name in ("all", "agent", "tool", "both"):
                self._zset(keys[name])[member] = place
            if due_in_ms:
                self._zset(keys["due"]).setdefault(member, now_us // 1000 + due_in_ms)
            self._zset(keys["entries"])[member] = (details, now_us)
            score += 1
        for key in keys.values():
            self._memory.live(key, args["ttl_ms"])
        return [Code.DONE, now_us // 1000]

    def _drop(self, keys: Keys, args: Args) -> Reply:
        _, put_us = self._zset(keys["entries"]).get(args["member"], (b"", 0))
        if self._memory.now_us() - put_us < args["idle_ms"] * 1000:
            return [Code.DONE, 0]
        for key in keys.values():
            self._zset(key).pop(args["member"], None)
        return [Code.DONE, 1]

    def _list(self, keys: Keys, args: Args) -> Reply:
        entries, after = self._zset(keys["entries"]), int(args["after"])
        order = sorted((place, member) for member, place in self._zset(keys["order"]).items())
        found = [each for each in order if each[0] > after][: args["count"]]
        reply: Reply = [Code.DONE]
        for place, member in found:
            reply += [member, str(place).encode(), entries.get(member, (b"", 0))[0]]
        return reply

    def _due(self, keys: Keys, args: Args) -> Reply:
        now_ms, entries = self._memory.now_us() // 1000, self._zset(keys["entries"])
        order = sorted((at, member) for member, at in self._zset(keys["due"]).items())
        later = [at for at, _ in order if at > now_ms]
        reply: Reply = [Code.DONE, later[0] - now_ms if later else -1]
        for _, member in [each for each in order if each[0] <= now_ms][: args["count"]]:
            reply += [member, entries.get(member, (b"", 0))[0]]
        return reply

    def _postpone(self, keys: Keys, args: Args) -> Reply:
        now_ms, due = self._memory.now_us() // 1000, self._zset(keys["due"])
        later_ms = max(args["at_ms"], now_ms + args["least_ms"])
        if args["member"] in due:
            due[args["member"]] = later_ms
        return [Code.DONE, later_ms - now_ms]

    def _acquire(self, keys: Keys, args: Args) -> Reply:
        if early := self._memory.recalled(keys, args):
            return early[0] if early[0][0] else [Code.DONE, early[1]]
        now_us = self._memory.now_us()
        if (known := self._memory.values.get(keys["worker"])) is not None:
            return [Code.HELD, known[0]]
        token = str(now_us).encode()
        self._memory.values[keys["worker"]] = (token, now_us + args["lease_ms"] * 1000)
        self._memory.live(keys["worker"], args["lease_ms"] + args["keep_ms"])
        self._memory.remember(keys, args, token)
        return [Code.DONE, token]

    def _renew(self, keys: Keys, args: Args) -> Reply:
        now_us = self._memory.now_us()
        token, until_us = self._memory.values.get(keys["worker"], (b"", 0))
        if token != args["token"].encode() or until_us <= now_us:
            return [Code.LOST]
        self._memory.values[keys["worker"]] = (token, now_us + args["lease_ms"] * 1000)
        self._memory.live(keys["worker"], args["lease_ms"] + args["keep_ms"])
        return [Code.DONE]

    def _lease(self, keys: Keys, _: Args) -> Reply:
        if (known := self._memory.values.get(keys["worker"])) is None:
            return [Code.MISSING]
        _token, until_us = known
        return [Code.DONE, max(0, math.ceil((until_us - self._memory.now_us()) / 1000))]

    def _begin(self, keys: Keys, args: Args) -> Reply:
        early = self._memory.recalled(keys, args)
        if early and early[0][0]:
            return early[0]
        steps, name, operation = self._zset(keys["steps"]), args["step"], args["operation"]
        entry, output = steps.get(name, (None, None))
        if early:
            is_mine = entry is not None and entry["operation"] == operation
            return [Code.DONE if is_mine else Code.LOST]
        if entry is not None and entry["print"] != args["print"]:
            return [Code.CHANGED]
        if output is not None:
            return [Code.FINISHED, output]
        if entry is not None and not args["retry"]:
            return [Code.UNCERTAIN, entry["at"], entry.get("why", "").encode()]
        at = self._memory.now_us() // 1000
        steps[name] = ({"operation": operation, "print": args["print"], "at": at}, None)
        self._memory.live(keys["steps"], args["ttl_ms"])
        self._memory.remember(keys, args, "begun")
        return [Code.DONE]

    def _end(self, keys: Keys, args: Args) -> Reply:
        early = self._memory.recalled(keys, args)
        if early and early[0][0]:
            return early[0]
        steps, name = self._zset(keys["steps"]), args["step"]
        entry, output = steps.get(name, (None, None))
        if early or output is not None:
            return [Code.DONE, output or b""]
        is_mine = entry is not None and entry["operation"] == args["begun"]
        if args["outcome"] == "output":
            steps[name] = (entry, args["value"])
            self._memory.live(keys["steps"], args["ttl_ms"])
        elif args["outcome"] == "undone" and is_mine:
            del steps[name]
        elif args["outcome"] == "failed" and is_mine:
            entry["why"] = args["value"].decode()
        self._memory.remember(keys, args, "ended")
        return [Code.DONE, args["value"] if args["outcome"] == "output" else b""]

    def _zset(self, key: str) -> dict[Any, Any]:
        found: dict[Any, Any] = self._memory.values.setdefault(key, {})
        return found
