"""Tool calls of a session without a model: their events, and their outputs at the model."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Literal
from weakref import ref

import pytest

from capsule_tasks.errors import (
    CallChanged,
    ModelMisbehaved,
    RealtimeRefused,
    ToolFailed,
    ToolTimeout,
)
from capsule_tasks.realtime import tool_calls
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.records import CodeSession
from tests.unit.realtime.tool_hosts import FIVE, Shop, ToolHost

LOST = RealtimeRefused("the output", "try again")

# --- a call and its output -----------------------------------------------------------------------


async def test_a_tool_is_called_and_its_output_is_recorded_and_sent() -> None:
    shop = Shop()
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        [start], [end] = host.seen("tool_start"), host.seen("tool_end")
        assert host.kinds == ["tool_start", "tool_end"]
        assert (start.agent, start.tool, start.call_id) == (shop.agent, shop.pay, "c1")
        assert (end.tool, end.arguments, end.output) == (shop.pay, FIVE, "paid 5")
        assert host.outputs == {"c1": "paid 5"}
    assert host.sent == [("c1", "paid 5")]
    assert host.state.calls == ()


async def test_a_tool_publishes_while_it_runs_also_in_a_thread() -> None:
    @function_tool
    def look(context: ToolContext) -> str:
        assert context.publish is not None
        context.publish("tool_progress", {"done": 1})
        return "seen"

    async with ToolHost(Agent(name="Shop", tools=[look])) as host:
        host.call("look")
        await host.settle()
    assert host.kinds == ["tool_start", "tool_update", "tool_end"]
    [update] = host.seen("tool_update")
    assert (update.call_id, update.kind, update.data) == ("c1", "tool_progress", {"done": 1})


async def test_what_a_function_leaves_behind_publishes_nothing_after_its_end() -> None:
    left: list[Any] = []

    async def before(context: ToolContext) -> None:
        left.append(context.publish)

    shop = Shop(before)
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        await host.settle()
        left[0]("tool_progress", {})
    assert host.kinds == ["tool_start", "tool_end"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"euros": 5}, '{"euros":5}'),
        ([{"type": "input_text", "text": "five"}, {"type": "input_text", "text": "5"}], "five\n5"),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}],
            'a\n{"type":"input_image","image_url":"u"}',
        ),
    ],
)
async def test_an_output_is_text_whatever_the_tool_returns(value: Any, text: str) -> None:
    @function_tool
    async def look() -> Any:
        return value

    async with ToolHost(Agent(name="Shop", tools=[look])) as host:
        host.call("look")
        await host.settle()
    assert host.sent == [("c1", text)]
    assert host.outputs == {"c1": text}


async def test_an_unknown_tool_is_told_to_the_model_and_shown_as_an_error() -> None:
    shop = Shop()
    async with ToolHost(shop.agent) as host:
        host.call("refund")
        await host.settle()
    assert host.sent == [("c1", "There is no tool 'refund'. The tools are: pay.")]
    assert host.kinds == ["error"]
    assert isinstance(host.seen("error")[0].error, ModelMisbehaved)


async def test_a_call_without_an_id_is_an_error() -> None:
    async with ToolHost(Shop().agent) as host:
        host.call("pay", FIVE, "")
    assert isinstance(host.seen("error")[0].error, ModelMisbehaved)
    assert host.kinds == ["error"]


async def test_wrong_arguments_and_errors_of_a_tool_are_told() -> None:
    async def refuse(_context: ToolContext) -> None:
        raise ValueError("no money")

    async with ToolHost(Shop(refuse).agent) as host:
        host.call("pay", "[]", "c1")
        host.call("pay", FIVE, "c2")
        await host.settle()
    assert "the arguments of pay are wrong" in host.outputs["c1"]
    assert host.outputs["c2"] == "The tool failed: ValueError: no money"
    assert host.failed == []


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_generator_exit_that_a_tool_raises_is_told_as_an_error(kind: str) -> None:
    def leave() -> str:
        raise GeneratorExit

    async def leave_async() -> str:
        raise GeneratorExit

    tool = function_tool(name="leave")(leave if kind == "sync" else leave_async)
    async with ToolHost(Agent(name="Shop", tools=[tool])) as host:
        host.call("leave")
        await host.settle()
    assert host.sent == [("c1", "The tool failed: it raised GeneratorExit()")]
    assert host.kinds == ["tool_start", "tool_end"]


async def test_a_call_whose_coroutine_is_closed_has_no_output() -> None:
    reached = asyncio.Event()
    ends: list[type[BaseException]] = []

    async def wait(_context: ToolContext) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ends.append(type(error))
            raise

    async with ToolHost(Shop(wait).agent) as host:
        before = asyncio.all_tasks()
        host.call("pay", FIVE)
        [task] = asyncio.all_tasks() - before
        await reached.wait()
        coroutine: Any = task.get_coro()
        coroutine.close()
        assert (ends, host.outputs) == ([GeneratorExit], {})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_tool_that_raises_ends_the_session_and_the_history_says_why() -> None:
    async def refuse(_context: ToolContext) -> None:
        raise ValueError("no money")

    async with ToolHost(Shop(refuse, on_error="raise").agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    [error] = host.failed
    assert isinstance(error, ToolFailed)
    assert host.outputs == {"c1": "The tool failed: ValueError: no money"}
    assert host.sent == []


@pytest.mark.parametrize("policy", [None, "fail"])
async def test_a_call_that_takes_too_long_is_uncertain(policy: Literal["fail"] | None) -> None:
    async def hang(_context: ToolContext) -> None:
        await asyncio.Event().wait()

    async with ToolHost(Shop(hang, timeout_s=0.001, on_uncertain=policy).agent) as host:
        host.call("pay", FIVE)
        await host.settle()
    assert host.outputs == {"c1": UNCERTAIN}
    if policy is None:
        assert (host.sent, host.failed) == ([("c1", UNCERTAIN)], [])
    else:
        assert host.sent == []
        assert isinstance(host.failed[0], ToolTimeout)


async def test_calls_run_side_by_side_each_under_the_agent_that_made_it() -> None:
    release = asyncio.Event()

    async def wait(_context: ToolContext) -> None:
        await release.wait()

    first, second = Shop(wait), Shop()
    second.agent.name = "Second"
    first.agent.handoffs = [second.agent]
    async with ToolHost(first.agent) as host:
        host.call("pay", FIVE, "c1")
        host.snapshot = await host.snapshot_of(second.agent)
        host.call("pay", '{"euros": 9}', "c2")
        while not second.paid:
            await asyncio.sleep(0)
        release.set()
        await host.settle()
    assert (first.paid, second.paid) == ([5], [9])
    assert [event.agent for event in host.seen("tool_end")] == [second.agent, first.agent]


async def test_the_code_session_is_known_to_later_calls_and_is_in_the_state() -> None:
    code = CodeSession(session_id="code", last_call=1)
    seen: list[CodeSession | None] = []

    async def note(context: ToolContext) -> None:
        seen.append(context.code)
        context.note_code(code)

    async with ToolHost(Shop(note).agent) as host:
        host.call("pay", FIVE, "c1")
        await host.settle()
        host.call("pay", FIVE, "c2")
        await host.settle()
    assert seen == [None, code]
    assert host.state.code == code


async def test_nothing_but_the_fingerprint_of_a_call_is_kept() -> None:
    shop = Shop()
    async with ToolHost(shop.agent) as host:
        host.call("pay", FIVE)
        known = ref(host.calls._open["c1"])
        await host.settle()
        host.events.clear()
        gc.collect()
        assert known() is None


# --- calls that come again, and sends that fail --------------------------------------------------


async def test_a_call_that_comes_again_is_not_made_again() -> None:
    release = asyncio.Event()

    async def wait(_context: ToolContext) -> None:
        await release.wait()

    shop = Shop(wait)
    async with ToolHost(shop.agent) as host:
        for _ in range(2):
            host.call("pay", FIVE)
            await asyncio.sleep(0)
        release.set()
        await host.settle()
        host.call("pay", FIVE)
        host.call("pay", '{"euros": 6}')
        host.call("refund", FIVE)
        await host.settle()
    assert shop.paid == [5]
    assert host.sent == [("c1", "paid 5")]
    assert all(isinstance(each.error, CallChanged) for each in host.seen("error"))
    assert len(host.seen("error")) == 2


async def test_an_output_whose_sending_fails_is_sent_again_and_the_tool_is_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_calls, "_FIRST_RETRY_S", 0.0001)
    shop = Shop()
    async with ToolHost(shop.agent) as host:
        host.failures = [LOST, ValueError("another"), LOST]
        host.call("pay", FIVE)
        await host.settle()
    assert shop.paid == [5]
    assert host.sent == [("c1", "paid 5")]
    assert host.kinds == ["tool_start", "error", "tool_end"]  # the failure is reported once
    assert host.seen("error")[0].error is LOST


async def test_an_output_is_sent_at_once_if_the_model_makes_the_call_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_calls, "_FIRST_RETRY_S", 3600.0)
    shop = Shop()
    async with ToolHost(shop.agent) as host:
        host.failures = [LOST]
        host.call("pay", FIVE)
        while host.failures:
            await asyncio.sleep(0)
        host.call("pay", FIVE)
        await host.settle()
    assert shop.paid == [5]
    assert host.sent == [("c1", "paid 5")]


async def test_an_output_that_could_not_be_sent_is_in_the_history_and_nothing_is_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_calls, "_FIRST_RETRY_S", 0.0001)
    async with ToolHost(Shop().agent) as host:
        host.failures = [LOST] * 5
        host.call("pay", FIVE)
        while len(host.failures) > 2:
            await asyncio.sleep(0)
    assert host.outputs == {"c1": "paid 5"}
    assert (host.sent, host.seen("tool_end")) == ([], [])


async def test_the_times_between_sends_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def waited(awaitable: Any, delay_s: float) -> None:
        awaitable.close()
        delays.append(delay_s)
        raise TimeoutError

    monkeypatch.setattr(asyncio, "wait_for", waited)
    async with ToolHost(Shop().agent) as host:
        host.failures = [LOST] * 7
        host.call("pay", FIVE)
        await host.settle()
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
