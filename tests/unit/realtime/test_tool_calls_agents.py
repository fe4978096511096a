"""Calls of agents that are used as tools, and of handoffs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from capsule_tasks.errors import (
    AgentReplaced,
    CallbackFailed,
    ModelFailed,
    RealtimeClosed,
    RealtimeRefused,
)
from capsule_tasks.realtime.model import ToolCalled
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.testing.models import ScriptedModel, calls, says
from tests.unit.realtime.tool_hosts import Shop, ToolHost

# --- agents used as tools ------------------------------------------------------------------------


class Bank:
    """A shop whose agent asks a bank, an agent with approvals of its own."""

    def __init__(self, *replies: Any, **options: Any) -> None:
        self.shop = Shop(needs_approval=True)
        self.model = ScriptedModel(replies)
        self.bank = Agent(name="Bank", tools=[self.shop.pay], model=self.model)
        tool = AgentTool(name="ask_bank", description="", agent=self.bank, **options)
        self.agent = Agent(name="Front", tools=[tool])

    @property
    def paid(self) -> list[int]:
        return self.shop.paid

    def use(self, shop: Shop) -> None:
        """Have the bank pay in another way."""
        self.shop, self.bank.tools = shop, [shop.pay]


ASK = '{"input": "Pay 5"}'
PAY = [calls("pay", {"euros": 5}, "t1")]
PAY_TWICE = [*PAY, calls("pay", {"euros": 9}, "t2")]


async def test_an_agent_is_a_tool_whose_calls_wait_for_people() -> None:
    bank = Bank(PAY, says("done"))
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        [asked] = host.seen("tool_approval_required")
        assert (asked.agent, asked.tool, asked.call_id) == (bank.bank, "pay", "t1")
        assert (bank.paid, host.outputs) == ([], {})
        host.calls.approve("t1")
        await host.settle()
    assert (bank.paid, host.sent) == ([5], [("c1", "done")])
    assert [each for each in host.kinds if each != "tool_update"] == [
        *("tool_start", "tool_approval_required", "tool_end")
    ]
    assert "tool_started" in {event.kind for event in host.seen("tool_update")}
    assert host.state.total_usage().requests == 2
    assert host.context.turn == 0  # that of the inner run is its own


async def test_each_of_several_inner_calls_is_decided_about_and_asked_about_once() -> None:
    bank = Bank(PAY_TWICE, says("done"))
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        host.calls.reject("t2")
        await host.settle()
        assert host.sent == []
        host.calls.approve("t1")
        await host.settle()
    assert (bank.paid, host.sent) == ([5], [("c1", "done")])
    asked = [event.call_id for event in host.seen("tool_approval_required")]
    assert asked == ["t1", "t2"]


async def test_a_decision_about_a_second_inner_call_while_the_first_runs_is_not_lost() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait(_context: ToolContext) -> None:
        begun.set()
        await release.wait()

    bank = Bank(PAY_TWICE, says("done"))
    bank.use(Shop(wait, needs_approval=True))
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        host.calls.approve("t1")
        await begun.wait()
        host.calls.approve("t2")
        release.set()
        await host.settle()
    assert (bank.paid, host.sent) == ([5, 9], [("c1", "done")])


async def test_an_agent_that_needs_an_approval_is_asked_about_before_it_runs() -> None:
    bank = Bank(PAY, says("done"), needs_approval=True)
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        assert bank.model.requests == []
        host.calls.approve("c1")
        await host.settle()
        host.calls.approve("t1")
        await host.settle()
    asked = [(each.agent.name, each.call_id) for each in host.seen("tool_approval_required")]
    assert asked == [("Front", "c1"), ("Bank", "t1")]
    assert host.sent == [("c1", "done")]


@pytest.mark.parametrize("approved_first", [True, False])
async def test_another_session_goes_on_with_an_inner_run(approved_first: bool) -> None:
    bank = Bank(PAY, says("done"))
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
    assert host.outputs == {}
    state = host.state.approve("t1") if approved_first else host.state
    async with ToolHost(bank.agent, state) as host:
        await host.settle()
        assert len(host.seen("tool_approval_required")) == (not approved_first)
        if not approved_first:
            host.calls.approve("t1")
            await host.settle()
    assert (bank.paid, host.sent) == ([5], [("c1", "done")])
    assert host.state.total_usage().requests == 2


async def test_an_inner_run_that_the_close_cancels_goes_on_where_it_was() -> None:
    begun = asyncio.Event()

    async def hang(_request: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    bank = Bank(PAY, hang, says("done"))
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        host.calls.approve("t1")
        await begun.wait()
    assert (bank.paid, host.outputs) == ([5], {})
    async with ToolHost(bank.agent, host.state) as host:
        await host.settle()
    assert (bank.paid, host.sent) == ([5], [("c1", "done")])


async def test_an_inner_run_can_be_abandoned() -> None:
    bank = Bank(PAY)
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
        [abandoned] = await host.close("abandon")
    assert abandoned.call_id == "t1"
    assert host.outputs == {"c1": UNCERTAIN}
    assert host.state.nested == {}


async def test_an_inner_run_whose_model_is_lost_ends_the_session_and_can_go_on_in_another() -> None:
    bank = Bank(PAY, ModelFailed("bank", "it is out of reach"), says("done"))
    bank.use(Shop())
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        await host.settle()
    assert isinstance(host.failed[0], ModelFailed)
    assert host.outputs == {}
    async with ToolHost(bank.agent, host.state) as host:
        await host.settle()
    assert (bank.paid, host.sent) == ([5], [("c1", "done")])


async def test_an_inner_run_whose_model_misbehaves_is_told() -> None:
    bank = Bank([{"type": "reasoning", "summary": []}])
    async with ToolHost(bank.agent) as host:
        host.call("ask_bank", ASK)
        host.call("ask_bank", "{}", "c2")
        await host.settle()
    assert "The agent 'Bank' failed: the model misbehaved" in host.outputs["c1"]
    assert "the arguments of ask_bank are wrong" in host.outputs["c2"]
    assert host.failed == []


# --- handoffs ------------------------------------------------------------------------------------


class Wish(msgspec.Struct):
    """The arguments of a handoff."""

    what: str


class Triage:
    """An agent with a handoff, and what its `on_handoff` was called with."""

    def __init__(self, **options: Any) -> None:
        self.told: list[Any] = []
        self.clerk = Agent(name="Clerk")
        self.handoff = Handoff(self.clerk, on_handoff=self._note, **options)
        self.agent = Agent(name="Triage", handoffs=[self.handoff])

    def _note(self, _context: Any, *about: Any) -> None:
        self.told.append(about)


async def test_a_handoff_is_told_to_the_program_and_answered_once_it_is_made() -> None:
    triage = Triage()
    async with ToolHost(triage.agent) as host:
        host.call("transfer_to_clerk")
        await host.settle()
        assert host.snapshot.agent is triage.clerk
    assert triage.told == [()]
    assert host.sent == [("c1", '{"assistant":"Clerk"}')]
    assert host.events == []  # the session shows the handoff, which is no tool


async def test_a_handoff_has_arguments() -> None:
    triage = Triage(input_type=Wish)
    async with ToolHost(triage.agent) as host:
        host.call("transfer_to_clerk", "{}", "c1")
        await host.settle()
        assert host.snapshot.agent is triage.agent
        assert triage.told == []
        host.call("transfer_to_clerk", '{"what": "tea"}', "c2")
        await host.settle()
    assert triage.told == [(Wish("tea"),)]
    assert "the arguments of transfer_to_clerk are wrong" in host.outputs["c1"]


async def test_a_refused_handoff_is_told_to_the_model_and_shown_as_an_error() -> None:
    def refuse() -> None:
        raise RealtimeRefused("the settings", "no such voice")

    triage = Triage()
    async with ToolHost(triage.agent) as host:
        host.handing_over = refuse
        host.call("transfer_to_clerk")
        await host.settle()
        assert host.snapshot.agent is triage.agent
    assert "not handed over to 'Clerk': the realtime model refused" in host.outputs["c1"]
    assert isinstance(host.seen("error")[0].error, RealtimeRefused)
    assert host.failed == []


async def test_of_two_handoffs_of_one_response_the_second_is_not_made() -> None:
    triage = Triage()
    triage.agent.handoffs = [triage.handoff, Agent(name="Other")]
    async with ToolHost(triage.agent) as host:
        before = host.snapshot
        host.call("transfer_to_clerk")
        await host.settle()
        host.calls.called(ToolCalled("transfer_to_other", "c2", "{}"), before)
        await host.settle()
        assert host.snapshot.agent is triage.clerk
    assert host.outputs["c2"] == "Not done: agent 'Clerk' has taken over since."


async def test_a_handoff_that_is_overtaken_while_it_is_made_is_told() -> None:
    def overtaken() -> None:
        raise AgentReplaced("Other")

    triage = Triage()
    async with ToolHost(triage.agent) as host:
        host.handing_over = overtaken
        host.call("transfer_to_clerk")
        await host.settle()
    assert host.outputs["c1"] == "Not done: agent 'Other' has taken over since."
    assert host.events == []


async def test_an_error_of_on_handoff_ends_the_session() -> None:
    def fail(_context: Any) -> None:
        raise ValueError("no clerk")

    agent = Agent(name="Triage", handoffs=[Handoff(Agent(name="Clerk"), on_handoff=fail)])
    async with ToolHost(agent) as host:
        host.call("transfer_to_clerk")
        await host.settle()
    assert isinstance(host.failed[0], CallbackFailed)
    assert host.outputs == {"c1": UNCERTAIN}


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_handoff_that_the_close_cuts_is_uncertain_if_the_program_was_told(
    is_told: bool,
) -> None:
    def close() -> None:
        raise RealtimeClosed("closing")

    triage = Triage()
    agent = triage.agent if is_told else Agent(name="Triage", handoffs=[triage.clerk])
    async with ToolHost(agent) as host:
        host.handing_over = close
        host.call("transfer_to_clerk")
        await host.settle()
    assert host.outputs == ({"c1": UNCERTAIN} if is_told else {})
    assert len(host.state.calls) == (not is_told)
    assert host.state.unresolved() == []
