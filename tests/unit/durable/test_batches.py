"""Writes that go together, with callers that come, are cancelled and meet faults at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.durable.batches import Batches


@dataclass
class Caller:
    """Asks after so many iterations of the loop, and is cancelled so many iterations later."""

    name: str
    asks_after: int
    cancelled_after: int | None
    answer: asyncio.Task[str] = field(init=False)


@dataclass
class Writes:
    """Takes some iterations for each write; some of them fail."""

    takes: list[int]
    fails: list[bool]
    begun: list[list[str]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    is_writing: bool = False

    async def write(self, values: Mapping[str, str]) -> Mapping[str, str]:
        assert values, "a write of nothing"
        assert not self.is_writing, "two writes at a time"
        self.is_writing = True
        number = len(self.begun)
        self.begun.append([*values])
        try:
            await _passed(self.takes[number % len(self.takes)])
            if self.fails[number % len(self.fails)]:
                raise OSError(f"write {number}")
        finally:
            self.is_writing = False
        self.done += values
        return {name: f"{value} written" for name, value in values.items()}


CALLERS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.none() | st.integers(0, 8)),
    min_size=1,
    max_size=8,
)


@given(
    callers=CALLERS,
    takes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    fails=st.lists(st.booleans(), min_size=1, max_size=4),
    outlives_callers=st.booleans(),
)
def test_every_caller_is_answered_whoever_else_is_cancelled(
    callers: list[tuple[str, int, int | None]],
    takes: list[int],
    fails: list[bool],
    outlives_callers: bool,
) -> None:
    writes = Writes(takes, fails)
    asking = [Caller(*each) for each in callers]
    asyncio.run(_asked(asking, Batches(writes.write, outlives_callers=outlives_callers)))
    for caller in asking:
        if caller.answer.cancelled():
            assert caller.cancelled_after is not None
        elif caller.answer.exception() is None:
            assert caller.answer.result() == f"{caller.name} written"
            assert caller.name in writes.done
    for name in "abcd":
        asked = [each for each in asking if each.name == name]
        lasting = [each for each in asked if each.cancelled_after is None]
        begun = sum(batch.count(name) for batch in writes.begun)
        # A single write that is cut is made again.
        at_most = 2 * len(asked) if outlives_callers else len(asked)
        assert len(lasting) <= begun <= at_most


async def _asked(asking: list[Caller], batches: Batches[str, str]) -> None:
    """Let all callers ask and be cancelled; nobody waits for ever, and nothing is left."""

    async def ask(caller: Caller) -> str:
        await _passed(caller.asks_after)
        return await batches.ask(caller.name, caller.name)

    async def cancel(caller: Caller, after: int) -> None:
        await _passed(caller.asks_after + after)
        caller.answer.cancel()

    for caller in asking:
        caller.answer = asyncio.create_task(ask(caller))
    cancelling = [
        asyncio.create_task(cancel(each, each.cancelled_after))
        for each in asking
        if each.cancelled_after is not None
    ]
    _, waiting = await asyncio.wait({*(each.answer for each in asking), *cancelling}, timeout=5)
    assert not waiting
    await asyncio.wait_for(batches.drained(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _passed(iterations: int) -> None:
    for _ in range(iterations):
        await asyncio.sleep(0)
