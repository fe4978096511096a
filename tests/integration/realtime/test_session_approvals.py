"""Calls that wait for people when a session closes: others go on with them, or nobody does."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks import Agent, Runner, function_tool
from capsule_tasks.errors import UnknownCall
from capsule_tasks.realtime import (
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
)
from capsule_tasks.runs import RunState
from capsule_tasks.testing.models import ScriptedModel, calls, says
from capsule_tasks.testing.realtime import RealtimeServer

QUIET = RealtimeConfig(raw_model_events=False)


class ItemList:
    """A history in memory."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        self.items += items

    @property
    def outputs(self) -> list[str]:
        return [item["output"] for item in self.items if "output" in item]


class Shop:
    """An agent whose tool people are asked about, itself or as a tool of another agent."""

    def __init__(self, server: RealtimeServer) -> None:
        self.paid: list[int] = []

        @function_tool(needs_approval=True)
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        self.agent = Agent(name="Clerk", tools=[pay])
        self.history = ItemList()
        self._server = server

    def session(
        self, state: RunState | None = None, config: RealtimeConfig = QUIET
    ) -> RealtimeSession:
        connection = RealtimeModelConfig(url=self._server.url, api_key="a key")
        runner = RealtimeRunner(self.agent, config=config)
        return runner.run(model_config=connection, history=self.history, state=state)

    async def asked(self, session: RealtimeSession) -> str:
        """The id of the call that people are asked about next."""
        async for event in session:
            if event.type == "tool_approval_required":
                call_id: str = event.call_id  # type: ignore[attr-defined]
                return call_id
        raise AssertionError("nobody was asked")

    async def left_open(self, config: RealtimeConfig = QUIET) -> RealtimeSession:
        """A session that was closed while people were asked about a call."""
        self._server.add([calls("pay", {"amount": 5}, "call_1")])
        async with self.session(config=config) as session:
            await session.send_message("Pay!")
            await self.asked(session)
        return session


async def until_ended(session: RealtimeSession, kind: str) -> None:
    async for event in session:
        if event.type == kind:
            return


async def test_another_session_asks_again_and_makes_the_call(server: RealtimeServer) -> None:
    shop = Shop(server)
    closed = await shop.left_open()
    assert [call.call_id for call in closed.state.calls] == ["call_1"]
    assert closed.abandoned == ()
    assert shop.history.outputs == []

    server.add("It is paid.")
    restored = RunState.from_string(closed.state.to_string())
    async with shop.session(restored) as session:
        call_id = await shop.asked(session)
        await session.approve_tool_call(call_id)
        await until_ended(session, "tool_end")
        await until_ended(session, "agent_end")
        with pytest.raises(UnknownCall):
            await session.approve_tool_call(call_id)
    assert (shop.paid, shop.history.outputs) == ([5], ["paid 5"])
    assert session.state.calls == ()
    assert session.usage.requests == 2


async def test_a_decision_that_was_taken_meanwhile_counts(server: RealtimeServer) -> None:
    shop = Shop(server)
    closed = await shop.left_open()
    server.add("I may not.")
    state = closed.state.reject("call_1", message="Too much.")
    async with shop.session(state) as session:
        await until_ended(session, "agent_end")
    assert (shop.paid, shop.history.outputs) == ([], ["Too much."])


async def test_a_run_makes_the_call(server: RealtimeServer) -> None:
    shop = Shop(server)
    closed = await shop.left_open()
    shop.agent.model = ScriptedModel([says("It is paid.")])
    state = closed.state.approve("call_1")
    result = await Runner.run(shop.agent, state, session=shop.history)
    assert result.final_output == "It is paid."
    assert (shop.paid, shop.history.outputs) == ([5], ["paid 5"])
    server.add("Anything else?")
    async with shop.session(result.state) as session:
        await session.send_message("Thank you!")
        await until_ended(session, "agent_end")
    assert [item["type"] for item in shop.history.items].count("function_call") == 1
    assert session.usage.requests == 3


async def test_calls_can_be_given_up_which_the_history_says(server: RealtimeServer) -> None:
    shop = Shop(server)
    config = RealtimeConfig(raw_model_events=False, open_approvals="abandon")
    closed = await shop.left_open(config)
    assert [call.call_id for call in closed.abandoned] == ["call_1"]
    assert closed.state.calls == ()
    assert shop.history.outputs == ["This call was not made: the session ended before."]


@pytest.mark.parametrize("open_approvals", ["return", "abandon"])
async def test_a_session_that_cannot_be_opened_loses_no_call(
    server: RealtimeServer, open_approvals: Any
) -> None:
    shop = Shop(server)
    state = (await shop.left_open()).state
    before = list(shop.history.items)
    server.refuse_handshakes(503)
    session = shop.session(state, RealtimeConfig(open_approvals=open_approvals))
    with pytest.raises(ConnectionError):
        await session.__aenter__()
    assert (session.state.calls, session.abandoned) == (state.calls, ())
    assert session.state == state
    assert shop.history.items == before
