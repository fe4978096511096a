"""Tool calls that wait for people, and those that are left when a session ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import pytest

from capsule_tasks.errors import (
    GuardrailFailed,
    GuardrailTripped,
    UnknownCall,
)
from capsule_tasks.realtime.call_table import ABANDONED
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.guardrails import ToolGuardrail, ToolVerdict
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from capsule_tasks.runs.engine.ports import UNCERTAIN
from tests.unit.realtime.tool_hosts import FIVE, Shop, ToolHost

# --- approvals and guardrails --------------------------------------------------------------------


async def test_a_call_waits_for_its_approval() -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        [asked] = host.seen("tool_approval_required")
        assert (asked.agent, asked.tool, asked.call_id) == (shop.agent, "pay", "c1")
        assert asked.arguments == FIVE
        assert (shop.paid, host.kinds) == ([], ["tool_approval_required"])
        host.call("pay", FIVE)  # again
        await host.settle()
        host.calls.approve("c1")
        with pytest.raises(UnknownCall):
            host.calls.approve("c1")
        await host.settle()
    assert shop.paid == [5]
    assert host.kinds == ["tool_approval_required", "tool_start", "tool_end"]


@pytest.mark.parametrize("message", [None, "too dear"])
async def test_a_rejected_call_is_told(message: str | None) -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        host.calls.reject("c1", message=message)
        await host.settle()
    assert (shop.paid, host.sent) == ([], [("c1", message or DEFAULT_REJECTION)])
    assert host.kinds == ["tool_approval_required", "tool_end"]


async def test_a_standing_decision_holds_for_all_calls_of_the_tool() -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent) as host:
        for each in ("c1", "c2"):
            host.call("pay", FIVE, each)
        await host.settle()
        host.calls.approve("c2", always=True)
        await host.settle()
        host.call("pay", FIVE, "c3")
        await host.settle()
    assert shop.paid == [5, 5, 5]
    assert len(host.seen("tool_approval_required")) == 2
    async with ToolHost(shop.agent, host.state) as host:
        host.call("pay", FIVE, "c4")
        await host.settle()
    assert len(shop.paid) == 4


@pytest.mark.parametrize("needed", [True, False])
async def test_a_function_says_whether_people_are_asked(needed: bool) -> None:
    shop = Shop(needs_approval=lambda context: needed and context.call_id == "c1")
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        assert len(host.seen("tool_approval_required")) == needed


async def test_nobody_is_asked_about_a_call_with_wrong_arguments() -> None:
    async with ToolHost(Shop(needs_approval=True).agent) as host:
        host.call("pay", "{}")
        await host.settle()
    assert "the arguments of pay are wrong" in host.outputs["c1"]
    assert host.kinds == ["tool_end"]


def verdict_of(*behaviors: Literal["allow", "reject", "raise"], **options: Any) -> ToolGuardrail:
    """A guardrail whose verdicts are these, one after another."""
    left = list(behaviors)
    return ToolGuardrail(lambda *_: ToolVerdict(left.pop(0), "not now"), "careful", **options)


@pytest.mark.parametrize("before_approval", [True, False])
async def test_guardrails_of_a_call_run_after_its_approval_and_if_they_say_so_before_it(
    before_approval: bool,
) -> None:
    verdicts = ("allow", "reject") if before_approval else ("reject",)
    guardrail = verdict_of(*verdicts, before_approval=before_approval)
    shop = Shop(needs_approval=True, input_guardrails=[guardrail])
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        host.calls.approve("c1")
        await host.settle()
    assert (shop.paid, host.sent) == ([], [("c1", "not now")])
    updates = ["tool_update"] * before_approval
    assert host.kinds == [*updates, "tool_approval_required", "tool_update", "tool_end"]
    assert host.seen("tool_update")[-1].kind == "guardrail"
    assert host.seen("tool_update")[-1].data["behavior"] == "reject"


async def test_nobody_is_asked_about_a_call_that_a_guardrail_rejects() -> None:
    guardrail = verdict_of("reject", before_approval=True)
    async with ToolHost(Shop(needs_approval=True, input_guardrails=[guardrail]).agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    assert host.kinds == ["tool_update", "tool_end"]


async def test_a_guardrail_of_the_output_puts_a_text_in_its_place() -> None:
    async with ToolHost(Shop(output_guardrails=[verdict_of("reject")]).agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    assert host.sent == [("c1", "not now")]


@pytest.mark.parametrize("kind", ["input_guardrails", "output_guardrails"])
async def test_a_guardrail_that_trips_ends_the_session_and_withholds_the_output(kind: str) -> None:
    shop = Shop(**{kind: [verdict_of("raise")]})
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    assert isinstance(host.failed[0], GuardrailTripped)
    assert shop.paid == ([5] if kind == "output_guardrails" else [])
    assert "the guardrail 'careful' tripped" in host.outputs["c1"]
    assert host.sent == []


async def test_a_call_whose_guardrail_fails_can_be_made_by_another_session() -> None:
    shop = Shop(input_guardrails=[verdict_of("allow")])
    shop.pay.input_guardrails.append(ToolGuardrail(lambda _: 1 / 0, "broken"))  # type: ignore[arg-type,return-value]
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    assert isinstance(host.failed[0], GuardrailFailed)
    assert host.outputs == {}
    [left] = host.state.calls
    assert not left.needs_approval


# --- the end -------------------------------------------------------------------------------------


async def test_a_call_that_the_close_cancels_is_uncertain() -> None:
    begun = asyncio.Event()

    async def hang(_context: ToolContext) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with ToolHost(Shop(hang).agent) as host:
        host.call("pay", FIVE)
        await begun.wait()
        assert host.state.calls == ()  # it has begun
        await host.close()
        assert host.calls.end("return") == ()
    assert host.outputs == {"c1": UNCERTAIN}
    assert host.sent == []


async def test_a_call_whose_function_goes_on_after_the_close_has_one_output() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def stubborn(_context: ToolContext) -> None:
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    async with ToolHost(Shop(stubborn).agent) as host:
        host.call("pay", FIVE)
        await begun.wait()
        host.is_open = False
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        host.calls.end("return")
        release.set()
        await host.settle()
    assert host.outputs == {"c1": UNCERTAIN}
    assert host.sent == []


async def test_no_function_is_called_once_the_session_closes() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def check(_context: ToolContext) -> ToolVerdict:
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return ToolVerdict()

    shop = Shop(input_guardrails=[ToolGuardrail(check, "slow")])
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await begun.wait()
        host.is_open = False
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        host.calls.end("return")
        release.set()
        await host.settle()
    assert shop.paid == []
    assert len(host.state.calls) == 1
    assert host.failed == []


async def test_a_waiting_call_is_in_the_state_of_a_session_that_ends() -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        assert await host.close() == ()
    assert host.outputs == {}
    async with ToolHost(shop.agent, host.state) as host:
        await host.settle()
        assert host.kinds == ["tool_approval_required"]
        host.calls.approve("c1")
        await host.settle()
    assert (shop.paid, host.sent) == ([5], [("c1", "paid 5")])
    assert host.state.calls == ()


async def test_a_waiting_call_can_be_abandoned() -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        [abandoned] = await host.close("abandon")
        assert abandoned.call_id == "c1"
        assert host.calls.end("abandon") == (abandoned,)
    assert host.outputs == {"c1": ABANDONED}
    assert host.state.calls == ()


# --- going on ------------------------------------------------------------------------------------


async def state_with_waiting_call(shop: Shop) -> Any:
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    return host.state


@pytest.mark.parametrize("approved", [True, False])
async def test_a_call_that_was_decided_about_meanwhile_is_made(approved: bool) -> None:
    shop = Shop(needs_approval=True)
    state = await state_with_waiting_call(shop)
    decided = state.approve("c1") if approved else state.reject("c1", message="no")
    async with ToolHost(shop.agent, decided) as host:
        await host.settle()
    assert shop.paid == ([5] if approved else [])
    assert host.sent == [("c1", "paid 5" if approved else "no")]
    assert host.seen("tool_approval_required") == []


async def test_a_call_of_the_state_can_be_decided_about_at_once() -> None:
    shop = Shop(needs_approval=True)
    async with ToolHost(shop.agent, await state_with_waiting_call(shop)) as host:
        host.calls.approve("c1")
        await host.settle()
    assert shop.paid == [5]


async def test_a_call_of_the_state_is_made_under_its_own_agent() -> None:
    shop, other = Shop(needs_approval=True), Shop()
    other.agent.name = "Other"
    shop.agent.handoffs, other.agent.handoffs = [other.agent], [shop.agent]
    state = (await state_with_waiting_call(shop)).approve("c1")
    async with ToolHost(other.agent, state) as host:
        await host.settle()
    assert (shop.paid, other.paid) == ([5], [])
    assert host.seen("tool_end")[0].agent is shop.agent


async def test_a_call_of_the_state_whose_tool_is_gone_is_told() -> None:
    shop = Shop(needs_approval=True)
    state = await state_with_waiting_call(shop)
    async with ToolHost(Agent(name="Shop"), state) as host:
        await host.settle()
    assert host.sent == [("c1", "There is no tool 'pay'. There are no tools.")]
    assert host.kinds == ["error"]


async def test_a_call_of_an_agent_outside_of_the_graph_is_told() -> None:
    state = await state_with_waiting_call(Shop(needs_approval=True))
    stranger = Shop()
    stranger.agent.name = "Stranger"
    async with ToolHost(stranger.agent, state) as host:
        await host.settle()
    assert host.sent == [("c1", "There is no tool 'pay' any more.")]
    assert (host.kinds, stranger.paid) == ([], [])
