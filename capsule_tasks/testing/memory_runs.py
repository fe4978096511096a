"""Redis for runs, in memory: what the scripts of runs and their decisions do, in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Code

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode

ENDED = ("completed", "failed", "cancelled")
INDEX_VALID_MS = 30_000

Keys = dict[str, str]
Args = dict[str, Any]
Map = dict[str, Any]


class Memory(Protocol):
    """What a MemoryStore lends to its scripts; every call is made under its lock."""

    values: dict[str, Any]

    def now_us(self) -> int: ...
    def live(self, key: str, ttl_ms: int) -> None: ...
    def recalled(self, keys: Keys, args: Args) -> tuple[Reply, Any] | None: ...
    def remember(self, keys: Keys, args: Args, result: Any) -> None: ...
    def appended(self, keys: Keys, args: Args) -> Reply: ...


@dataclass
class _Run:
    schema: str
    agent: str
    snapshot: bytes
    created: int
    status: str = "queued"
    revision: int = 1
    turn: int = 0
    owner: str = ""
    token: int = 0
    cancel: str = ""
    pending: list[str] = field(default_factory=list)
    updated: int = 0


@dataclass
class _Ledger:
    asks: dict[str, Map] = field(default_factory=dict)
    decisions: dict[str, Map] = field(default_factory=dict)
    standing: list[Map] = field(default_factory=list)
    started: dict[str, Map] = field(default_factory=dict)
    outputs: dict[str, bytes] = field(default_factory=dict)

    def decision_on(self, ask: Map) -> Map | None:
        if ask["call"] in self.decisions:
            return self.decisions[ask["call"]]
        whom = (ask["tool"], ask["agent"])
        return next((each for each in self.standing if (each["tool"], each["agent"]) == whom), None)

    def is_changed(self, call: str, fingerprint: str) -> bool:
        known = (self.asks.get(call), self.decisions.get(call), self.started.get(call))
        return any(each is not None and each["print"] != fingerprint for each in known)

    def may_start(self, call: str) -> bool:
        if call in self.decisions:
            return bool(self.decisions[call]["approved"])
        decision = self.decision_on(self.asks[call]) if call in self.asks else None
        return call not in self.asks or bool(decision and decision["approved"])

    def decide(self, ask: Map, decision: Map, always: bool, now_us: int) -> None:
        taken = {**decision, "call": ask["call"], "tool": ask["tool"], "agent": ask["agent"]}
        taken |= {"print": ask["print"], "at": now_us // 1000}
        self.decisions[ask["call"]] = taken
        if always:
            whom = (ask["tool"], ask["agent"])
            kept = [each for each in self.standing if (each["tool"], each["agent"]) != whom]
            self.standing = [*kept, taken]


class RunScripts:
    """The scripts of runs and their decisions."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def table(self) -> dict[str, Callable[[Keys, Args], Reply]]:
        return {
            "run_place": self._place,
            "run_find": self._find,
            "run_create": self._create,
            "run_claim": self._claim,
            "run_commit": self._commit,
            "run_decide": self._decide,
            "run_expire": self._expire,
            "run_cancel": self._cancel,
            "run_release": self._release,
            "run_read": self._read,
            "run_start_calls": self._start_calls,
            "run_finish_calls": self._finish_calls,
        }

    def _place(self, keys: Keys, args: Args) -> Reply:
        known = self._memory.values.setdefault(keys["place"], args["session"].encode())
        if known != args["session"].encode():
            return [Code.CONFLICT, known]
        self._memory.live(keys["place"], args["ttl_ms"])
        return [Code.DONE]

    def _find(self, keys: Keys, args: Args) -> Reply:
        known = self._memory.values.get(keys["place"])
        if known is None:
            return [Code.MISSING]
        self._memory.live(keys["place"], args["ttl_ms"])
        return [Code.DONE, known]

    def _create(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        if (known := self._run(keys)) is not None:
            return [Code.CONFLICT, known.status.encode()]
        now_us, asks = self._memory.now_us(), unpack(args["asks"])
        if self._is_late(asks, args, now_us):
            return [Code.LATE]
        run = _Run(args["schema"], args["agent"], args["snapshot"], now_us)
        run.status = "interrupted" if asks else "queued"
        self._memory.values[keys["run"]] = run
        self._ask_for(keys, run, asks, now_us)
        self._save(keys, run, args)
        return self._done(keys, args, [run.updated, run.status])

    def _claim(self, keys: Keys, args: Args) -> Reply:
        early = self._memory.recalled(keys, args)
        if early and early[0][0]:
            return early[0]
        run = self._run(keys)
        if run is None:
            return [Code.MISSING]
        held = [Code.HELD, run.owner.encode(), str(run.token).encode()]
        if early:
            is_mine = early[1] == run.token and run.status == "running"
            return self._granted(keys, run) if is_mine else held
        if run.status in ENDED:
            return [Code.ENDED, run.status.encode()]
        if run.status == "interrupted":
            return [Code.WAITING, len(run.pending)]
        if run.status == "running" and run.token != args["steal"]:
            return held
        readable = unpack(args["readable"])
        if readable and run.schema not in readable:
            return [Code.UNREADABLE, run.schema.encode()]
        run.status, run.owner = "running", args["incarnation"]
        run.token = max(run.token + 1, self._memory.now_us())
        self._save(keys, run, args)
        self._memory.remember(keys, args, run.token)
        return self._granted(keys, run)

    def _granted(self, keys: Keys, run: _Run) -> Reply:
        ledger = self._ledger(keys)
        exact = [ledger.decisions[call] for call in run.pending if call in ledger.decisions]
        decisions = pack({"exact": exact, "standing": ledger.standing})
        numbers = (run.token, run.revision, run.turn)
        texts = (run.cancel.encode(), run.schema.encode(), run.agent.encode())
        return [Code.DONE, *numbers, *texts, run.snapshot, decisions, run.updated]

    def _commit(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        run = self._run(keys)
        if run is None:
            return [Code.MISSING]
        seen = (run.token, run.revision, run.turn, run.snapshot)
        is_same = run.status == args["status"] or (
            args["status"] in ("interrupted", "queued") and run.status != "running"
        )
        wanted = (args["token"], args["revision"] + 1, args["turn"], args["snapshot"])
        if is_same and seen == wanted:
            return self._committed(run)
        now_us, asks, ledger = self._memory.now_us(), unpack(args["asks"]), self._ledger(keys)
        if (refused := self._refused_commit(run, ledger, asks, args, now_us)) is not None:
            return refused
        if args["records"]:
            appended = self._memory.appended(keys, {**args, "ttl_ms": args["history_ttl_ms"]})
            if appended[0] != Code.DONE:
                return appended
        run.revision, run.turn, run.status = args["revision"] + 1, args["turn"], args["status"]
        run.schema, run.agent, run.snapshot = args["schema"], args["agent"], args["snapshot"]
        self._ask_for(keys, run, asks, now_us)
        if run.status == "interrupted" and any(map(ledger.decision_on, asks)):
            run.status = "queued"
        if run.cancel and run.status in ("interrupted", "queued"):
            run.status = "cancelled"
        self._save(keys, run, args)
        self._memory.remember(keys, args, self._committed(run))
        return self._committed(run)

    def _refused_commit(
        self, run: _Run, ledger: _Ledger, asks: list[Map], args: Args, now_us: int
    ) -> Reply | None:
        if run.token != args["token"] or run.status != "running":
            return [Code.STALE, run.status.encode(), str(run.token).encode()]
        if run.revision != args["revision"] or args["turn"] < run.turn:
            return [Code.CONFLICT, run.revision, run.turn]
        if self._is_late(asks, args, now_us):
            return [Code.LATE]
        changed = [ask for ask in asks if ledger.is_changed(ask["call"], ask["print"])]
        return [Code.CHANGED, changed[0]["call"].encode()] if changed else None

    def _committed(self, run: _Run) -> Reply:
        return [Code.DONE, run.revision, run.status.encode(), run.cancel.encode(), run.updated]

    def _decide(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        run, ledger, call = self._run(keys), self._ledger(keys), args["call"]
        if run is None:
            return [Code.MISSING]
        if call in ledger.decisions:
            return [Code.DECIDED, pack(ledger.decisions[call])]
        if run.status in ENDED:
            return [Code.ENDED, run.status.encode()]
        if call not in ledger.asks:
            return [Code.UNKNOWN]
        if call in ledger.started:
            return [Code.STARTED]
        ask, now_us = ledger.asks[call], self._memory.now_us()
        if ask.get("expires") is not None and ask["expires"] <= now_us // 1000:
            resume = self._expired(run, ledger, ask, now_us)
            self._save(keys, run, args)
            reply = [Code.EXPIRED, pack(ledger.decisions[call]), resume, run.updated]
        else:
            if "may" in ask and not set(unpack(args["roles"])) & set(ask["may"]):
                return [Code.DENIED, pack(ask["may"])]
            ledger.decide(ask, unpack(args["decision"]), bool(args["always"]), now_us)
            resume = self._wake(run)
            self._save(keys, run, args)
            about = (run.status.encode(), ask["tool"].encode(), ask["agent"].encode())
            reply = [Code.DONE, resume, *about, run.updated]
        self._memory.remember(keys, args, reply)
        return reply

    def _expire(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        run, ledger, now_us = self._run(keys), self._ledger(keys), self._memory.now_us()
        if run is None:
            return [Code.MISSING]
        resume, due = 0, []
        for call in run.pending:
            ask = ledger.asks[call]
            is_due = ask.get("expires") is not None and ask["expires"] <= now_us // 1000
            if is_due and not ledger.decision_on(ask) and run.status not in ENDED:
                resume = max(resume, self._expired(run, ledger, ask, now_us))
                due.append(call.encode())
        if not due:
            return [Code.DONE, 0, run.status.encode(), 0]
        if run.status in ENDED:
            resume = 0
        self._save(keys, run, args)
        return self._done(keys, args, [resume, run.status, run.updated, *due])

    def _expired(self, run: _Run, ledger: _Ledger, ask: Map, now_us: int) -> int:
        decision = {"approved": ask["on_expiry"] == "approve", "by": "expiry"}
        ledger.decide(ask, decision, False, now_us)
        if ask["on_expiry"] != "cancel":
            return self._wake(run)
        run.cancel = run.cancel or "expiry"
        if run.status != "running":
            run.status = "cancelled"
        return 0

    def _cancel(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        run = self._run(keys)
        if run is None:
            return [Code.MISSING]
        if run.status in ENDED:
            return [Code.ENDED, run.status.encode()]
        run.cancel = run.cancel or args["by"]
        gone: list[list[str]] = []
        if run.status != "running":
            run.status = "cancelled"
            asks = self._ledger(keys).asks
            gone = [[call, asks[call]["agent"], asks[call]["tool"]] for call in run.pending]
        self._save(keys, run, args)
        return self._done(keys, args, [run.status, run.owner, run.updated, pack(gone)])

    def _release(self, keys: Keys, args: Args) -> Reply:
        if (early := self._replay(keys, args)) is not None:
            return early
        run = self._run(keys)
        if run is None:
            return [Code.MISSING]
        if run.status != "running" or run.token != args["token"]:
            return [Code.STALE, run.status.encode(), str(run.token).encode()]
        run.status = "cancelled" if run.cancel else "queued"
        self._save(keys, run, args)
        return self._done(keys, args, [run.status, run.updated])

    def _read(self, keys: Keys, args: Args) -> Reply:
        run, ledger = self._run(keys), self._ledger(keys)
        if run is None:
            return [Code.MISSING]
        asks = [ledger.asks[call] for call in run.pending]
        asks = [ask for ask in asks if not ledger.decision_on(ask)]
        texts = (run.cancel.encode(), run.schema.encode(), run.agent.encode())
        head = (run.status.encode(), run.revision, run.turn, run.owner.encode(), run.token)
        snapshot = run.snapshot if args["with_snapshot"] else b""
        return [Code.DONE, *head, *texts, run.created, run.updated, snapshot, pack(asks)]

    def _start_calls(self, keys: Keys, args: Args) -> Reply:
        early = self._memory.recalled(keys, args)
        if early and early[0][0]:
            return early[0]
        run, ledger, calls = self._run(keys), self._ledger(keys), unpack(args["calls"])
        if run is None:
            return [Code.MISSING]
        if run.status != "running" or run.token != args["token"]:
            return [Code.STALE, run.status.encode(), str(run.token).encode()]
        for call, fingerprint, _ in calls:
            if ledger.is_changed(call, fingerprint):
                return [Code.CHANGED, call.encode()]
            if not ledger.may_start(call):
                return [Code.WAITING, call.encode()]
        outcomes = [self._outcome(ledger, args, *call) for call in calls]
        if not early:
            self._memory.remember(keys, args, "started")
        return [Code.DONE, run.cancel.encode(), *outcomes]

    def _outcome(
        self, ledger: _Ledger, args: Args, call: str, fingerprint: str, retry: bool
    ) -> Reply:
        if call in ledger.outputs:
            return [Code.FINISHED, ledger.outputs[call]]
        known, operation = ledger.started.get(call), args["operation"]
        if known is not None and known["operation"] == operation:
            return [Code.DONE]
        if known is not None and not retry:
            return [Code.UNCERTAIN, known["at"]]
        at = self._memory.now_us() // 1000
        entry = {"print": fingerprint, "by": args["token"], "at": at, "operation": operation}
        ledger.started[call] = entry
        return [Code.DONE]

    def _finish_calls(self, keys: Keys, args: Args) -> Reply:
        if early := self._memory.recalled(keys, args):
            return early[0]
        run, ledger, parts = self._run(keys), self._ledger(keys), args["parts"]
        if run is None:
            return [Code.MISSING]
        is_owner = run.status == "running" and run.token == args["token"]
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        for call, output in pairs:
            if call not in ledger.started:
                return [Code.UNKNOWN, call.encode()]
            if ledger.outputs.get(call, output) != output:
                return [Code.FINISHED, call.encode()]
            is_mine = is_owner or ledger.started[call]["by"] == args["token"]
            if call not in ledger.outputs and not is_mine:
                return [Code.STALE, run.status.encode(), str(run.token).encode()]
        ledger.outputs.update(pairs)
        self._memory.remember(keys, args, "finished")
        return [Code.DONE]

    def _replay(self, keys: Keys, args: Args) -> Reply | None:
        """The reply to a repeat, or to an operation that must not be done."""
        early = self._memory.recalled(keys, args)
        if early is None:
            return None
        reply: Reply = early[0] if early[0][0] else early[1]
        return reply

    def _run(self, keys: Keys) -> _Run | None:
        found: _Run | None = self._memory.values.get(keys["run"])
        return found

    def _ledger(self, keys: Keys) -> _Ledger:
        found: _Ledger = self._memory.values.setdefault(keys["ledger"], _Ledger())
        return found

    def _save(self, keys: Keys, run: _Run, args: Args) -> None:
        run.updated = max(run.updated + 1, self._memory.now_us())
        if run.status != "running":
            run.owner = ""
        if run.status in ENDED:
            run.pending = []
        self._ledger(keys)
        for name in ("run", "ledger"):
            self._memory.live(keys[name], args["ttl_ms"])

    def _done(self, keys: Keys, args: Args, parts: list[Any]) -> Reply:
        texts = [part.encode() if isinstance(part, str) else part for part in parts]
        self._memory.remember(keys, args, [Code.DONE, *texts])
        return [Code.DONE, *texts]

    def _is_late(self, asks: list[Map], args: Args, now_us: int) -> bool:
        return bool(asks) and now_us // 1000 - args["indexed_ms"] > INDEX_VALID_MS

    def _ask_for(self, keys: Keys, run: _Run, asks: list[Map], now_us: int) -> None:
        ledger = self._ledger(keys)
        wanted = [ask["call"] for ask in asks]
        for call in run.pending:
            if call not in wanted:
                del ledger.asks[call]
        run.pending = wanted
        for ask in asks:
            if ask["call"] not in ledger.asks:
                ask["at"] = now_us // 1000
                if (left_ms := ask.pop("expires_in", None)) is not None:
                    ask["expires"] = ask["at"] + left_ms
                ledger.asks[ask["call"]] = ask

    def _wake(self, run: _Run) -> int:
        if run.status != "interrupted":
            return 0
        run.status = "queued"
        return 1
