"""An engine that follows a script, for runs that a test drives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from capsule_tasks import History
from capsule_tasks.durable import (
    OnUncertain,
    RunDriver,
    RunFailure,
    ToolCall,
    TurnEnd,
    TurnStopped,
    TurnWork,
)
from capsule_tasks.errors import InvalidRunState
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import ApprovalRequest, Claim, RunStore

ASK = ApprovalRequest(call_id="ask", tool="bare:pay", agent="a", fingerprint="f")


@dataclass
class ScriptedEngine:
    """Makes turns that are lists of words: `model`, `tool <name>`, `ask`, `fail`, and others.

    `held` is a model whose reply is held; `tools <name> <name>…` are tools side by side.

    The snapshot is the number of turns that were made; a turn's item says what it did.
    """

    turns: Sequence[Sequence[str]]
    effects: list[str] = field(default_factory=list)
    on_uncertain: OnUncertain = "tell"
    readable: Sequence[str] = ("script/1",)
    asked: int = 0
    redis: Any = None
    effects_key: str = ""

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        del given, context
        return b"0", "script/1", "a"

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        del claim
        return ()

    def encoded(self, output: Any) -> bytes:
        return str(output).encode()

    async def turn(self, work: TurnWork) -> TurnEnd:
        number = int(work.claim.snapshot)
        did: list[str] = []
        end: dict[str, Any] = {}
        for word in self.turns[number]:
            verb, _, name = word.partition(" ")
            if verb == "ask" and not work.claim.decisions.exact:
                requests = (ASK,)
                return TurnEnd(b"%d" % number, "script/1", "a", "interrupted", [], requests)
            if verb == "fail":
                failure = RunFailure("max_turns", "MaxTurns", "too many")
                end = {"status": "failed", "failure": failure}
            elif verb != "ask":
                did.append(await self._do(work, verb, name))
        if not end and number == len(self.turns) - 1:
            end = {"status": "completed", "output": did}
        items = [{"turn": number, "did": did}]
        return TurnEnd(b"%d" % (number + 1), "script/1", "a", items=items, **end)

    async def _do(self, work: TurnWork, verb: str, name: str) -> str:
        match verb:
            case "model":
                return await self._ask_model(work, work.claim.snapshot.decode())
            case "held":
                return await self._ask_model(work, work.claim.snapshot.decode(), is_held=True)
            case "tool":
                return await self.call_tool(work, name)
            case "tools":
                return " ".join(
                    await asyncio.gather(*(self.call_tool(work, each) for each in name.split()))
                )
            case "swallow":
                return await self._swallow(work, name)
            case "raise":
                raise ValueError(name)
            case "unreadable":
                raise InvalidRunState("$", "another graph")
            case "sleep":
                await asyncio.sleep(3600)
        return "x" * int(name)

    async def _ask_model(self, work: TurnWork, question: str, *, is_held: bool = False) -> str:
        call = work.ledger.model_call("", question)
        if call.reply is not None:
            return call.reply.decode()
        await asyncio.sleep(0)
        self.asked += 1
        if self.redis is not None:
            self.redis.rpush(self.effects_key + ":asked", question)
        reply = f"reply {question}".encode()
        if is_held:
            call.hold(reply)
        else:
            await call.record(reply)
        return f"reply {question}"

    def tool(self, name: str) -> ToolCall:
        return ToolCall(name, f"bare:{name}", "a", "{}", self.on_uncertain)

    async def call_tool(self, work: TurnWork, name: str) -> str:
        async def make() -> bytes:
            await asyncio.sleep(0)
            self.effects.append(name)
            if self.redis is not None:
                self.redis.rpush(self.effects_key, name)
            await asyncio.sleep(0)
            return name.encode()

        outcome = await work.ledger.tool_call(self.tool(name), make)
        return outcome.output.decode() if outcome.is_known else "told"

    async def _swallow(self, work: TurnWork, name: str) -> str:
        try:
            return await self.call_tool(work, name)
        except TurnStopped:
            return "an error as text for the model"


async def started(store: RunStore, engine: ScriptedEngine) -> RunDriver:
    snapshot, schema, agent = engine.first("go")
    await store.create("r", "user-42", snapshot, schema=schema, agent=agent)
    return RunDriver(store, "w1")


async def items_of(store: RunStore) -> list[Any]:
    settings = HistorySettings(prefix=store.core.settings.prefix)
    return await History("user-42", store.store, settings=settings).get_items()
