"""Any run does the same in process and durably, however often it changes its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capsule_tasks import Agent, History, Runner, function_tool
from capsule_tasks.durable import RunFailure
from capsule_tasks.errors import RunStopped
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage import RunStore
from capsule_tasks.storage.runs.store import SyncLease
from capsule_tasks.testing.models import StatelessModel, calls, hands_over
from tests.integration.agents.runs import runs_of
from tests.integration.durable_agents import Runs
from tests.integration.killing import LASTING

TOOLS = ("look", "pay", "stumble", "break", "unknown")


@dataclass(frozen=True)
class Script:
    """The turns of an agent, the calls of each; people reject the calls whose number is here."""

    turns: list[list[str]]
    asks_clerk_in: int
    hands_over_in: int
    rejected: set[int]
    one_by_one: bool
    """People decide about one call at a time, and the run goes on after each."""
    changes_process: bool
    """Each turn is made by another engine."""

    def agent(self, done: list[str]) -> Agent:
        numbers = count()

        def call(tool: str) -> Any:
            number = next(numbers)
            return calls(tool, {"number": number}, f"c{number}")

        turns: list[Any] = [[call(tool) for tool in turn] for turn in self.turns]
        if self.asks_clerk_in < len(turns):
            turns[self.asks_clerk_in].append(calls("ask_clerk", {"input": "do"}, "c_ask"))
        clerk = self._agent("clerk", [[call("look"), call("pay")], "said"], done)
        agent = self._agent("first", [*turns, "done"], done)
        agent.tools.append(clerk.as_tool("ask_clerk", "Ask."))
        if self.hands_over_in >= len(turns):
            return agent
        at = self.hands_over_in
        front = self._agent("front", [*turns[:at], hands_over(agent, call_id="c_over")], done)
        front.tools.append(clerk.as_tool("ask_clerk", "Ask."))
        front.handoffs.append(agent)
        return front

    def _agent(self, name: str, replies: list[Any], done: list[str]) -> Agent:
        def tool(name: str, **options: Any) -> Any:
            async def work(number: int) -> str:
                done.append(f"{name} {number}")
                if name in ("stumble", "break"):
                    raise ValueError(f"{name} {number}")
                return f"{name} {number}"

            return function_tool(name=name, **options)(work)

        tools = [tool("look"), tool("pay", needs_approval=True), tool("stumble")]
        tools.append(tool("break", on_error="raise"))
        return Agent(name=name, model=StatelessModel(replies), tools=tools)

    def is_rejected(self, call_id: str) -> bool:
        return int(call_id[1:]) in self.rejected


scripts = st.builds(
    Script,
    turns=st.lists(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=3), max_size=4),
    asks_clerk_in=st.integers(0, 4),
    hands_over_in=st.integers(0, 4),
    rejected=st.sets(st.integers(0, 12)),
    one_by_one=st.booleans(),
    changes_process=st.booleans(),
)

Outcome = tuple[Any, list[Any], list[str]]


async def in_process(script: Script, history: History) -> Outcome:
    done: list[str] = []
    agent, given = script.agent(done), "go"
    try:
        result = await Runner.run(agent, given, session=history)
        while waiting := result.interruptions:
            state = result.state
            for call in waiting[: 1 if script.one_by_one else None]:
                if script.is_rejected(call.call_id):
                    state = state.reject(call.call_id, message="no")
                else:
                    state = state.approve(call.call_id)
            result = await Runner.run(agent, state, session=history)
        end = result.final_output
    except RunStopped as stopped:
        end = type(stopped).__name__
    return end, await history.get_items(), sorted(done)


async def durably(script: Script, store: RunStore, run_id: str) -> Outcome:
    done: list[str] = []
    runs = runs_of(store, script.agent(done), run_id)
    await runs.start(run_id=run_id)
    while (record := await store.read(run_id)).status in ("queued", "interrupted"):
        if record.status == "queued":
            await _driven(store, runs, run_id, leaves=script.changes_process)
            if script.changes_process:
                runs = runs_of(store, script.agent(done), run_id)
            continue
        for call in record.pending[: 1 if script.one_by_one else None]:
            if script.is_rejected(call.call_id):
                await store.approvals.reject(run_id, call.call_id, message="no")
            else:
                await store.approvals.approve(run_id, call.call_id)
    end = "done"
    if record.status == "failed":
        end = msgspec.json.decode(record.error, type=RunFailure).type
    return end, await runs.items(run_id), sorted(done)


async def _driven(store: RunStore, runs: Runs, run_id: str, *, leaves: bool) -> None:
    """Drive a run until it stops, or until it is handed back after a turn."""
    drive = asyncio.create_task(runs.drive(run_id))
    commit = store.commit

    async def commit_and_leave(*args: Any, **options: Any) -> Any:
        committed = await commit(*args, **options)
        drive.cancel()
        return committed

    if leaves:
        store.commit = commit_and_leave  # type: ignore[method-assign]
    try:
        await asyncio.wait({drive})
    finally:
        store.commit = commit  # type: ignore[method-assign]
    if not drive.cancelled():
        drive.result()


@given(script=scripts)
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_run_does_the_same_in_process_and_durably(
    valkey_url: str, prefix: str, script: Script
) -> None:
    run_id = uuid4().hex

    async def both() -> tuple[Outcome, Outcome]:
        kept = RunSettings(prefix=prefix)
        async with RunStore(valkey_url, settings=kept) as store:
            history = runs_of(store, script.agent([])).history(f"alone-{run_id}")
            return await in_process(script, history), await durably(script, store, run_id)

    with SyncLease(run_id, valkey_url, settings=LASTING, prefix=prefix) as lease:
        lease.acquire()
        expected, found = asyncio.run(both())
        lease.release()
    assert found == expected
