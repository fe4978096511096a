"""Agents of our own engine with effects, as the tests of durable runs drive them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.models import StatelessModel, calls, hands_over, reasons, says
from tests.integration.durable_agents import Effect, Runs

LOOK = calls("look", {"what": "door"}, "c1")


@function_tool
async def look(what: str) -> str:
    return f"saw {what}"


def office(effect: Effect, on_call: Callable[[], None] = lambda: None) -> Agent:
    """Two agents with a handoff; the second one asks a third, who needs an approval to pay."""

    @function_tool
    async def look(what: str) -> str:
        await asyncio.sleep(0)
        effect(f"look {what}")
        return f"saw {what}"

    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        effect(f"pay {euros}")
        return f"paid {euros}"

    @function_tool(needs_approval=True)
    def delete(path: str) -> None:
        effect(f"delete {path}")

    def model(*turns: Any) -> StatelessModel:
        return StatelessModel(turns, on_call=lambda _: on_call())

    clerk = Agent(
        name="clerk",
        model=model(calls("look", {"what": "bill"}, "c_bill"),
                    calls("pay", {"euros": 5}, "c_pay"),
                    "paid it"),
        tools=[look, pay],
    )  # fmt: skip
    desk = Agent(
        name="desk",
        model=model(calls("ask_clerk", {"input": "pay"}, "c_ask"),
                    [reasons("two at once"), calls("delete", {"path": "f"}, "c_del"),
                     calls("look", {"what": "shelf"}, "c_shelf")],
                    says("all done")),
        tools=[clerk.as_tool("ask_clerk", "Ask."), look, delete],
    )  # fmt: skip
    return Agent(
        name="front",
        model=model([calls("look", {"what": "door"}, "c_door"),
                     calls("look", {"what": "desk"}, "c_desk")],
                    hands_over(desk, call_id="c_hand")),
        tools=[look],
        handoffs=[desk],
    )  # fmt: skip


async def alone(
    store: RunStore, agent: Agent, given: Any = "go", *, session: str = "alone", **options: Any
) -> tuple[Any, list[Any]]:
    """The same run in this process: its final output and the items of its history."""
    history = Runs(store, AgentEngine(agent), "w1").history(session)
    result = await Runner.run(agent, given, session=history, **options)
    while result.interruptions:
        state = result.state
        for call in result.interruptions:
            state = state.approve(call.call_id)
        result = await Runner.run(agent, state, session=history, **options)
    return result.final_output, await history.get_items()


def one_agent(*replies: Any, tools: Any = (), **fields: Any) -> Agent:
    return Agent(name="a", model=StatelessModel(replies), tools=list(tools), **fields)


def runs_of(store: RunStore, agent: Agent, worker: str = "w1", **options: Any) -> Runs:
    return Runs(store, AgentEngine(agent, **options), worker)


def payer(done: list[int]) -> Any:
    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        done.append(euros)
        return f"paid {euros}"

    return pay
