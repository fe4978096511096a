"""The app of the tests of durable runs on real workers: one agent that follows its input.

The input is a script of turns, parted by `|`; each turn is a list of words, parted by `;`:

- `tool pay`: a tool call, whose effect is recorded in `effects:<run>`;
- `die pay`: the same, but the first time its process is killed after the effect;
- `ask refund`: the turn waits until a person has approved the call `refund`;
- `mark here`: tell the test; `hold key`: wait for the test;
- `block 3`: block the event loop for so many seconds;
- `say hello`: publish an event; `print hello`: print; `fail why`: the run fails.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import redis
import redis.asyncio

from capsule_tasks import Capsule
from capsule_tasks.durable import (
    INPUT_SCHEMA,
    RunEvent,
    RunFailure,
    ToolCall,
    TurnEnd,
    TurnWork,
    first_snapshot,
    input_of,
)
from capsule_tasks.storage import ApprovalRequest, Claim
from tests.acceptance.app import REDIS_URL, app

SCHEMA = "script/1"
AGENT = "script"
_blocking = redis.Redis.from_url(REDIS_URL, decode_responses=True)


def _mark(name: str, value: object = "") -> None:
    _blocking.rpush(f"mark:{name}", str(value))


class ScriptEngine:
    """The snapshot is `<number of turns made>:<input>`; the history tells what was done."""

    readable = tuple(os.environ.get("TEST_SCHEMAS", f"{INPUT_SCHEMA} {SCHEMA}").split())

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        return first_snapshot(given, context), INPUT_SCHEMA, AGENT

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        del claim
        return ()

    def encoded(self, output: Any) -> bytes:
        return str(output).encode()

    async def turn(self, work: TurnWork) -> TurnEnd:
        number, script = _state_of(work.claim)
        turns = [turn.split(";") for turn in script.split("|")]
        approved = {each.call for each in work.claim.decisions.exact}
        did: list[str] = []
        for word in turns[number]:
            verb, _, about = word.strip().partition(" ")
            if verb == "ask" and about not in approved:
                return _end(number, script, "interrupted", approval_requests=(_asked(about),))
            if verb == "fail":
                failure = RunFailure("error", "Scripted", about)
                return _end(number, script, "failed", failure=failure)
            did.append(await _do(work, verb, about) or word.strip())
        items: list[Any] = [{"role": "assistant", "content": "; ".join(did)}]
        if number + 1 < len(turns):
            return _end(number + 1, script, "running", items=items)
        return _end(number + 1, script, "completed", items=items, output=did[-1])


def _state_of(claim: Claim) -> tuple[int, str]:
    if claim.schema == INPUT_SCHEMA:
        return 0, str(input_of(claim.snapshot).input)
    number, _, script = claim.snapshot.decode().partition(":")
    return int(number), script


def _end(number: int, script: str, status: Any, **others: Any) -> TurnEnd:
    return TurnEnd(f"{number}:{script}".encode(), SCHEMA, AGENT, status, **others)


def _asked(call_id: str) -> ApprovalRequest:
    return ApprovalRequest(
        call_id=call_id, tool="bare:refund", agent=AGENT, fingerprint="f", arguments="{}"
    )


async def _do(work: TurnWork, verb: str, about: str) -> str:
    match verb:
        case "tool" | "die":
            return await _call_tool(work, about, is_deadly=verb == "die")
        case "mark":
            _mark(about, os.getpid())
        case "hold":
            await _hold(about)
        case "block":
            time.sleep(float(about))  # noqa: ASYNC251 - as a tool might
        case "sleep":
            await asyncio.sleep(float(about))
        case "print":
            print(about)  # noqa: T201 - as a tool may
        case "say":
            assert work.publish is not None
            work.publish(RunEvent.of("said", AGENT, about))
            return about
    return ""


async def _hold(key: str) -> None:
    async with redis.asyncio.Redis.from_url(REDIS_URL, socket_timeout=None) as client:
        await client.blpop([f"go:{key}"])


async def _call_tool(work: TurnWork, name: str, *, is_deadly: bool = False) -> str:
    run_id = work.claim.run_id

    async def make() -> bytes:
        effects = _blocking.rpush(f"effects:{run_id}", name)
        if is_deadly and effects == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"made {name}".encode()

    call = ToolCall(f"{work.claim.turn}:{name}", f"bare:{name}", AGENT, "{}")
    return (await work.ledger.tool_call(call, make)).output.decode()


@app.task
def summed(parts: list[str]) -> str:
    return ", ".join(sorted(parts))


capsule = Capsule(app)
if not os.environ.get("TEST_NO_AGENT"):
    capsule.runs.register(AGENT, ScriptEngine())
