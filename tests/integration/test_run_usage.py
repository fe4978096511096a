"""The usage of a run is that of all its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from capsule_tasks.durable import RunDriver, TurnEnd, TurnWork
from capsule_tasks.storage import ApprovalRequest, Claim, RunStore

SCHEMA = "counting/1"


class CountingEngine:
    """Tells of two requests a turn, and raises in its third."""

    readable: Sequence[str] = (SCHEMA,)

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        del given, context
        return b"0", SCHEMA, "a"

    async def turn(self, work: TurnWork) -> TurnEnd:
        number = int(work.claim.snapshot) + 1
        await asyncio.sleep(0.002)  # takes some time
        if number == 3:
            raise ValueError("oh")
        usage = {"requests": 2 * number, "input_tokens": 10 * number}
        return TurnEnd(b"%d" % number, SCHEMA, "a", usage=usage)

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        del claim
        return ()

    def encoded(self, output: Any) -> bytes:
        return str(output).encode()


async def test_usage_is_summed_also_of_a_run_that_fails(store: RunStore) -> None:
    engine = CountingEngine()
    snapshot, schema, agent = engine.first("go")
    await store.create("r", "r", snapshot, schema=schema, agent=agent)
    assert (await RunDriver(store, "w1").drive("r", engine)).status == "failed"
    usage = (await store.read("r")).usage
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (4, 20, 0)
    assert usage.time_ms >= 4
