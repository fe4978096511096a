"""Calls that wait for people: in a session, after it in another one or in a run, and abandoned."""

from __future__ import annotations

from typing import Literal

import pytest

from capsule_tasks.errors import RealtimeClosed, RealtimeLost, UnknownAgent, UnknownCall
from capsule_tasks.realtime import RealtimeConfig, RealtimeModelConfig, RealtimeRunner
from capsule_tasks.realtime.call_table import ABANDONED
from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.testing.models import ScriptedModel, calls, hands_over, says
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.openings import opened
from tests.unit.runs.engine.runs import MemorySession, spelled

PAY = calls("pay", {"euros": 5}, "c1")
PAY_MORE = calls("pay", {"euros": 9}, "c2")


class Shop:
    """An agent whose payments need an approval, what it has paid, and a history."""

    def __init__(self, name: str = "Shop") -> None:
        self.paid: list[int] = []
        self.history = MemorySession()

        @function_tool(needs_approval=True)
        async def pay(euros: int) -> str:
            """Pay."""
            self.paid.append(euros)
            return f"{name} paid {euros}"

        self.agent = Agent(name=name, tools=[pay], model=ScriptedModel(["done"]))

    @property
    def stored(self) -> list[str]:
        return spelled(self.history.items)

    async def closed_with_a_waiting_call(self, server: RealtimeServer) -> RunState:
        """The state of a session that was closed while a call waited, as another process has it."""
        server.add([PAY])
        async with opened(server, self.agent, history=self.history) as first:
            await first.until("tool_approval_required")
            await first.until("agent_end")
        assert self.stored == ["user hi", "call c1"]
        assert first.session.abandoned == ()
        return RunState.from_string(first.session.state.to_string())


# --- in a session --------------------------------------------------------------------------------


async def test_a_call_is_made_once_it_is_approved(server: RealtimeServer) -> None:
    shop = Shop()
    server.add([PAY], "bye")
    async with opened(server, shop.agent, history=shop.history) as talk:
        asked = await talk.until("tool_approval_required")
        assert (asked.agent, asked.tool, asked.call_id) == (shop.agent, "pay", "c1")
        with pytest.raises(UnknownCall):
            await talk.session.approve_tool_call("c2")
        await talk.session.approve_tool_call("c1")
        with pytest.raises(UnknownCall):
            await talk.session.reject_tool_call("c1")
        end = await talk.until("tool_end")
        assert end.output == "Shop paid 5"
        await talk.until("agent_end")
        assert await talk.output("c1") == "Shop paid 5"
    assert shop.paid == [5]
    assert shop.stored[:3] == ["user hi", "call c1", "output c1 Shop paid 5"]
    with pytest.raises(RealtimeClosed):
        await talk.session.approve_tool_call("c1")


async def test_calls_of_two_agents_are_made_under_their_own(server: RealtimeServer) -> None:
    first, second = Shop("First"), Shop("Second")
    first.agent.handoffs = [second.agent]
    server.add([PAY, hands_over(second.agent, call_id="h1")], [PAY_MORE], "bye", "bye", "bye")
    async with opened(server, first.agent) as talk:
        await talk.until("tool_approval_required")
        handoff = await talk.until("handoff")
        assert (handoff.from_agent, handoff.to_agent) == (first.agent, second.agent)
        asked = await talk.until("tool_approval_required")
        assert (asked.agent, asked.call_id) == (second.agent, "c2")
        await talk.session.approve_tool_call("c2")
        await talk.session.approve_tool_call("c1")
        assert await talk.output("c1") == "First paid 5"
        assert await talk.output("c2") == "Second paid 9"
    assert (first.paid, second.paid) == ([5], [9])


# --- after the session ---------------------------------------------------------------------------


async def test_another_session_asks_again_and_makes_the_call(server: RealtimeServer) -> None:
    shop = Shop()
    state = await shop.closed_with_a_waiting_call(server)
    server.add("bye")
    async with opened(server, shop.agent, says=None, history=shop.history, state=state) as second:
        asked = await second.until("tool_approval_required")
        assert (asked.agent, asked.call_id) == (shop.agent, "c1")
        await second.session.approve_tool_call("c1")
        await second.until("tool_end")
        await second.until("agent_end")
    told = [each["item"]["type"] for each in server.find("conversation.item.create")]
    # The second connection is told the history, and then the output of the call in it.
    assert told == ["message", *("message", "function_call", "function_call_output")]
    assert shop.paid == [5]
    assert shop.stored[1:3] == ["call c1", "output c1 Shop paid 5"]
    assert second.session.state.calls == ()
    assert second.session.state.run_id == state.run_id


@pytest.mark.parametrize("approved", [True, False])
async def test_another_session_goes_on_with_what_was_decided_meanwhile(
    server: RealtimeServer, approved: bool
) -> None:
    shop = Shop()
    state = await shop.closed_with_a_waiting_call(server)
    decided = state.approve("c1") if approved else state.reject("c1")
    server.add("bye")
    async with opened(server, shop.agent, says=None, history=shop.history, state=decided) as second:
        output = await second.output("c1")
        await second.until("agent_end")
    assert output == ("Shop paid 5" if approved else DEFAULT_REJECTION)
    assert shop.paid == ([5] if approved else [])
    assert second.of("tool_approval_required") == []
    assert shop.stored[2] == f"output c1 {output}"


async def test_a_run_goes_on_where_a_session_has_ended(server: RealtimeServer) -> None:
    shop = Shop()
    state = await shop.closed_with_a_waiting_call(server)
    result = await Runner.run(shop.agent, state.approve("c1"), session=shop.history)
    assert result.final_output == "done"
    assert shop.paid == [5]
    assert shop.stored == ["user hi", "call c1", "output c1 Shop paid 5", "says done"]
    server.add("bye")
    async with opened(server, shop.agent, history=shop.history, state=result.state) as second:
        await second.until("agent_end")
    assert shop.stored[4:] == ["user hi", "says bye"]
    assert second.session.usage.requests == 3


async def test_a_run_goes_on_with_the_call_of_an_agent_that_has_handed_over(
    server: RealtimeServer,
) -> None:
    first, second = Shop("First"), Shop("Second")
    first.agent.handoffs = [second.agent]
    server.add([PAY, hands_over(second.agent, call_id="h1")], "bye")
    async with opened(server, first.agent, history=first.history) as talk:
        await talk.until("tool_approval_required")
        await talk.until("handoff")
        for _ in range(2):
            await talk.until("agent_end")
    state = RunState.from_string(talk.session.state.approve("c1").to_string())
    assert state.agent.name == "Second"
    result = await Runner.run(first.agent, state, session=first.history)
    assert result.final_output == "done"
    assert (first.paid, second.paid) == ([5], [])


async def test_a_waiting_call_survives_a_lost_connection(server: RealtimeServer) -> None:
    shop = Shop()
    server.add([PAY], "bye")
    async with opened(server, shop.agent, history=shop.history) as first:
        await first.until("tool_approval_required")
        await first.until("agent_end")
        server.connection.abort()
        with pytest.raises(RealtimeLost):
            await first.rest()
    state = first.session.state
    async with opened(
        server, shop.agent, says=None, history=shop.history, state=state.approve("c1")
    ) as second:
        await second.until("tool_end")
    assert shop.paid == [5]


async def test_a_state_with_a_call_of_an_unknown_agent_opens_no_session(
    server: RealtimeServer,
) -> None:
    state = await Shop().closed_with_a_waiting_call(server)
    with pytest.raises(UnknownAgent):
        async with opened(server, Agent(name="Stranger"), state=state):
            pass
    await server.wait_for_open(0)


@pytest.mark.parametrize("open_approvals", ["return", "abandon"])
async def test_a_session_that_cannot_be_opened_loses_no_call(
    server: RealtimeServer, open_approvals: Literal["return", "abandon"]
) -> None:
    shop = Shop()
    state = await shop.closed_with_a_waiting_call(server)
    server.refuse_handshakes(503)
    config = RealtimeConfig(open_approvals=open_approvals)
    reach = RealtimeModelConfig(url=server.url, api_key="a key")
    runner = RealtimeRunner(shop.agent, config=config)
    session = runner.run(None, reach, history=shop.history, state=state)
    with pytest.raises(ConnectionError):
        await session.__aenter__()
    assert (session.state, session.abandoned) == (state, ())
    assert shop.stored == ["user hi", "call c1"]


async def test_waiting_calls_can_be_abandoned(server: RealtimeServer) -> None:
    shop = Shop()
    server.add([PAY])
    async with opened(server, shop.agent, history=shop.history, open_approvals="abandon") as talk:
        await talk.until("tool_approval_required")
        await talk.until("agent_end")
    assert [call.call_id for call in talk.session.abandoned] == ["c1"]
    assert shop.stored == ["user hi", "call c1", f"output c1 {ABANDONED}"]
    assert (shop.paid, talk.session.state.calls) == ([], ())
    assert talk.outputs() == []


# --- agents used as tools ------------------------------------------------------------------------


class Bank(Shop):
    """A shop that a front agent asks; its model makes one call, and ends."""

    def __init__(self) -> None:
        super().__init__("Bank")
        self.model = ScriptedModel([[calls("pay", {"euros": 5}, "t1")], says("all paid")])
        self.agent.model = self.model
        ask = AgentTool(name="ask_bank", description="", agent=self.agent)
        self.front = Agent(name="Front", tools=[ask], model=ScriptedModel(["done"]))


ASK = calls("ask_bank", {"input": "Pay 5"}, "c1")


async def test_calls_of_an_agent_used_as_a_tool_wait_for_people(server: RealtimeServer) -> None:
    bank = Bank()
    server.add([ASK], "bye")
    async with opened(server, bank.front, history=bank.history) as talk:
        asked = await talk.until("tool_approval_required")
        assert (asked.agent, asked.tool, asked.call_id) == (bank.agent, "pay", "t1")
        await talk.session.approve_tool_call("t1")
        end = await talk.until("tool_end")
        assert (end.call_id, end.output) == ("c1", "all paid")
        for _ in range(2):
            await talk.until("agent_end")
    assert bank.paid == [5]
    assert bank.stored[1:3] == ["call c1", "output c1 all paid"]
    assert "tool_started" in {event.kind for event in talk.of("tool_update")}
    assert talk.session.usage.requests == 4  # two of each model
    assert talk.session.state.total_usage() == talk.session.usage


async def closed_with_an_inner_call(bank: Bank, server: RealtimeServer) -> RunState:
    server.add([ASK])
    async with opened(server, bank.front, history=bank.history) as first:
        await first.until("tool_approval_required")
        await first.until("agent_end")
    assert bank.stored == ["user hi", "call c1"]
    return RunState.from_string(first.session.state.to_string()).approve("t1")


async def test_another_session_goes_on_with_such_an_agent(server: RealtimeServer) -> None:
    bank = Bank()
    state = await closed_with_an_inner_call(bank, server)
    server.add("bye")
    async with opened(server, bank.front, says=None, history=bank.history, state=state) as second:
        assert await second.output("c1") == "all paid"
    assert bank.paid == [5]


async def test_a_run_goes_on_with_such_an_agent(server: RealtimeServer) -> None:
    bank = Bank()
    state = await closed_with_an_inner_call(bank, server)
    result = await Runner.run(bank.front, state, session=bank.history)
    assert result.final_output == "done"
    assert bank.paid == [5]
    assert bank.stored == ["user hi", "call c1", "output c1 all paid", "says done"]


async def test_such_an_agent_can_be_abandoned(server: RealtimeServer) -> None:
    bank = Bank()
    server.add([ASK])
    async with opened(server, bank.front, history=bank.history, open_approvals="abandon") as talk:
        await talk.until("tool_approval_required")
        await talk.until("agent_end")
    assert [call.call_id for call in talk.session.abandoned] == ["t1"]
    assert bank.stored == ["user hi", "call c1", f"output c1 {UNCERTAIN}"]
