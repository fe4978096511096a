"""Redis in memory: the same answers to the same scripts, for tests without a server.

`History("user-42", MemoryStore())` is a History in everything but where its items are. What the
scripts do in Lua is done here in Python; one suite of tests holds both to one contract.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capsule_tasks.errors import InternalError
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call, Code
from capsule_tasks.storage.targets import Location
from capsule_tasks.testing.memory_index import PlainScripts
from capsule_tasks.testing.memory_runs import RunScripts

_MEMORY_MS = 600_000
_GIVEN_UP = b"!"

Record = bytes


@dataclass
class _Meta:
    generation: int = 0
    created: int = 0
    updated: int = 0


class MemoryStore:
    """Holds histories for as long as it lives; give one to all histories that share.

    `clock` tells seconds. Safe for threads and event loops; closing it changes nothing.
    """

    is_closed = False

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.location = Location("memory", frozenset({f"{id(self):x}"}))
        self._clock = clock
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self._ends_ms: dict[str, float] = {}
        self._scripts: dict[str, Callable[[dict[str, str], dict[str, Any]], Reply]] = {
            "history_append": self._append,
            "history_read": self._read,
            "history_pop": self._pop,
            "history_pop_suffix": self._pop_suffix,
            "history_stage": self._stage,
            "history_replace": self._replace,
            "history_clear": self._clear,
            "history_forget": lambda *_: [Code.DONE],
            "history_info": self._info,
            "settle": self._settle,
        }
        lent = _Lent(self)
        self._scripts |= RunScripts(lent).table() | PlainScripts(lent).table()

    async def run(self, call: Call) -> Reply:
        return self.run_blocking(call)

    async def close(self) -> None:
        """Nothing: a store is given, so whoever gave it keeps it."""

    def close_blocking(self) -> None:
        """Nothing, as `close`."""

    def run_blocking(self, call: Call) -> Reply:
        """The reply that Redis would give."""
        implementation = self._scripts.get(call.script.name)
        if implementation is None:
            raise InternalError(f"MemoryStore does not know the script {call.script.name!r}")
        keys = dict(zip(call.script.keys, call.keys, strict=False))
        args: dict[str, Any] = dict(zip(call.script.args, call.args, strict=False))
        if "record..." in call.script.args:
            args["records"] = list(call.args[call.script.args.index("record...") :])
        if "guard..." in call.script.args:
            args["guard"] = tuple(call.args[call.script.args.index("guard...") :])
        if "part..." in call.script.args:
            args["parts"] = list(call.args[call.script.args.index("part...") :])
        with self._lock:
            self._expire()
            return implementation(keys, args)

    def seed(self, key: str, record: Record) -> None:
        """Push a raw record, as another program could: for tests of what is corrupt."""
        with self._lock:
            self._list(key).append(record)

    def raw(self, key: str) -> list[Record]:
        """The records under a key as they are."""
        with self._lock:
            self._expire()
            return list(self._values.get(key, []))

    # --- the scripts -----------------------------------------------------------------------------

    def _append(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            return early[0]
        reply = self._appended(keys, args)
        if reply[0] == Code.DONE:
            self._remember(keys, args, b"")
        return reply

    def _appended(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        items, records = self._list(keys["items"]), args["records"]
        size = _size(items)
        length = len(items) + len(records)
        if length > args["max_items"] or size + _size(records) > args["max_bytes"]:
            return [Code.FULL, len(items), size]
        items.extend(records)
        self._save(keys, args, has_removed=False)
        return [Code.DONE]

    def _read(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        items: list[Record] = self._values.get(keys["items"], [])
        current = str(self._meta(keys).generation)
        wanted, before = args["generation"], args["before"]
        if wanted and (wanted != current or before > len(items)):
            return [Code.CONFLICT, current.encode()]
        before = len(items) if before < 0 else before
        count = args["count"]
        if items:
            count = min(count, max(1, args["max_bytes"] * len(items) // max(1, _size(items))))
        start = max(0, before - count)
        piece = items[start:before]
        if args["renew_ms"]:
            for key in keys.values():
                self._live(key, args["renew_ms"])
        packed = [_packed_text(record) for record in piece]
        array = b"\xdd" + len(packed).to_bytes(4, "big") + b"".join(packed)
        return [Code.DONE, current.encode(), before, start, array]

    def _pop(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            taken = early[1].startswith((b"+", b"-"))
            return [Code.DONE, early[1][1:]] if taken else early[0]
        memory = self._memory(keys)
        _, known = memory.get(args["corrupt"], (0.0, b""))
        if known.startswith(b"+"):
            self._quarantine(keys, args, [known[1:]])
            memory[args["corrupt"]] = (self._now_ms(), b"-")
        items = self._list(keys["items"])
        if not items:
            return [Code.DONE]
        sealed, *own = args["guard"] or (b"", b"")
        if items[-1].startswith(sealed) and not items[-1].startswith(tuple(own)):
            return [Code.CONFLICT, items[-1]]
        record = items.pop()
        self._save(keys, args, has_removed=True)
        self._remember(keys, args, b"+" + record)
        return [Code.DONE, record]

    def _pop_suffix(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            return early[0]
        items, expected = self._list(keys["items"]), args["records"]
        found = items[-len(expected) :]
        if found != expected:
            return [Code.CONFLICT, *found]
        del items[-len(expected) :]
        self._save(keys, args, has_removed=True)
        self._remember(keys, args, b"")
        return [Code.DONE]

    def _stage(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        stage, records, offset = self._list(keys["stage"]), args["records"], args["offset"]
        if offset and len(stage) == offset + len(records):
            return [Code.DONE]
        if offset and len(stage) != offset:
            return [Code.CONFLICT, len(stage)]
        if not offset:
            stage.clear()
        stage.extend(records)
        self._live(keys["stage"], args["ttl_ms"])
        return [Code.DONE]

    def _replace(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        reply = self._replaced(keys, args)
        if reply[0] != Code.LOST:
            self._values.pop(keys["stage"], None)
        return reply

    def _replaced(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            return early[0] if early[0][0] else [Code.DONE, early[1]]
        items, meta = self._list(keys["items"]), self._meta(keys)
        start, stop = args["start"], args["stop"]
        is_of_nothing = args["generation"] == "0" and stop == 0
        is_same = is_of_nothing or args["generation"] == str(meta.generation)
        if not is_same or stop > len(items):
            return [Code.CONFLICT, str(meta.generation).encode()]
        stage: list[Record] = self._values.get(keys["stage"], [])
        if len(stage) != args["staged"]:
            return [Code.LOST, len(stage)]
        replaced = [*items[args["pruned"] : start], *stage, *args["records"], *items[stop:]]
        if len(replaced) > args["max_items"] or _size(replaced) > args["max_bytes"]:
            return [Code.FULL, len(items), _size(items)]
        corrupt = [items[int(at)] for at in args["corrupt"].split(",") if at]
        self._quarantine(keys, args, corrupt)
        items[:] = replaced
        meta = self._save(keys, args, has_removed=True)
        self._remember(keys, args, str(meta.generation).encode())
        return [Code.DONE, str(meta.generation).encode()]

    def _clear(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            return early[0]
        for name in ("items", "history", "bad"):
            self._values.pop(keys[name], None)
            self._ends_ms.pop(keys[name], None)
        memory = self._memory(keys)
        for operation, (done_ms, result) in memory.items():
            if isinstance(result, bytes) and result.startswith(b"+"):
                memory[operation] = (done_ms, b"")
        self._remember(keys, args, b"")
        return [Code.DONE]

    def _info(self, keys: dict[str, str], _: dict[str, Any]) -> Reply:
        items: list[Record] = self._values.get(keys["items"], [])
        meta = self._meta(keys)
        end_ms = self._ends_ms.get(keys["history"])
        ttl_ms = -2 if end_ms is None else int(end_ms - self._now_ms())
        bad = len(self._values.get(keys["bad"], []))
        return [Code.DONE, len(items), _size(items), meta.created, meta.updated, ttl_ms, bad]

    def _settle(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        if early := self._recalled(keys, args):
            if early[0][0] == Code.FORGOTTEN:
                return early[0]
            return [Code.DONE, int(early[0][0] == Code.DONE)]
        self._remember(keys, args, _GIVEN_UP)
        return [Code.DONE, 0]

    # --- what they share -------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self._clock() * 1000

    def _expire(self) -> None:
        now_ms = self._now_ms()
        for key in [key for key, end_ms in self._ends_ms.items() if end_ms <= now_ms]:
            del self._ends_ms[key]
            self._values.pop(key, None)

    def _live(self, key: str, ttl_ms: int) -> None:
        if key in self._values:
            self._ends_ms[key] = self._now_ms() + ttl_ms

    def _list(self, key: str) -> list[Record]:
        found: list[Record] = self._values.setdefault(key, [])
        return found

    def _meta(self, keys: dict[str, str]) -> _Meta:
        meta: _Meta = self._values.get(keys["history"], _Meta())
        return meta

    def _save(self, keys: dict[str, str], args: dict[str, Any], *, has_removed: bool) -> _Meta:
        now_us = int(self._clock() * 1e6)
        meta = self._meta(keys)
        if has_removed or not meta.generation:
            meta.generation = max(meta.generation + 1, now_us)
        meta.created = meta.created or now_us
        meta.updated = max(meta.updated + 1, now_us)
        self._values[keys["history"]] = meta
        for name in ("history", "items"):
            self._live(keys[name], args["ttl_ms"])
        return meta

    def _quarantine(
        self, keys: dict[str, str], args: dict[str, Any], records: list[Record]
    ) -> None:
        if records:
            bad = self._list(keys["bad"])
            bad.extend(records)
            del bad[: -args["keep_bad"]]
            self._live(keys["bad"], args["ttl_ms"])

    def _memory(self, keys: dict[str, str]) -> dict[str, tuple[float, Any]]:
        memory: dict[str, tuple[float, Any]] = self._values.setdefault(keys["batches"], {})
        return memory

    def _recalled(self, keys: dict[str, str], args: dict[str, Any]) -> tuple[Reply, Any] | None:
        """What is to be answered at once, and the result that is remembered."""
        known = self._memory(keys).get(args["operation"])
        if known is not None:
            return ([Code.GIVEN_UP], b"") if known[1] == _GIVEN_UP else ([Code.DONE], known[1])
        if args["age_ms"] >= _MEMORY_MS:
            return [Code.FORGOTTEN], b""
        return None

    def _remember(self, keys: dict[str, str], args: dict[str, Any], result: Any) -> None:
        self._memory(keys)[args["operation"]] = (self._now_ms(), result)
        self._live(keys["batches"], _MEMORY_MS)


def _packed_text(record: Record) -> bytes:
    """A text of MessagePack, whose bytes may be anything, as Redis packs them."""
    return b"\xdb" + len(record).to_bytes(4, "big") + record


class _Lent:
    """A store as its scripts of runs see it."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.values = store._values  # noqa: SLF001  it is a part of the store

    def now_us(self) -> int:
        return int(self._store._clock() * 1e6)  # noqa: SLF001  as above

    def live(self, key: str, ttl_ms: int) -> None:
        self._store._live(key, ttl_ms)  # noqa: SLF001  as above

    def recalled(self, keys: dict[str, str], args: dict[str, Any]) -> tuple[Reply, Any] | None:
        return self._store._recalled(keys, args)  # noqa: SLF001  as above

    def remember(self, keys: dict[str, str], args: dict[str, Any], result: Any) -> None:
        self._store._remember(keys, args, result)  # noqa: SLF001  as above

    def appended(self, keys: dict[str, str], args: dict[str, Any]) -> Reply:
        return self._store._appended(keys, args)  # noqa: SLF001  as above


def _size(records: list[Record]) -> int:
    return sum(map(len, records))
