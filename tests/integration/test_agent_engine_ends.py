"""How durable runs of our own engine end: failures, guardrails, cancels, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from capsule_tasks import Agent, RunConfig, Verdict, function_tool, input_guardrail
from capsule_tasks.durable import RunDriver, RunFailure, ToolOutcome
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.durable.ledger import TurnLedger
from capsule_tasks.errors import InvalidRunState, InvalidSetting, ModelFailed, UnknownAgent
from capsule_tasks.runs import output_guardrail
from capsule_tasks.runs.parking import Limits
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.models import ScriptedModel, calls
from tests.integration.agents.runs import LOOK, look, office, one_agent, runs_of
from tests.integration.durable_agents import brief

KINDS = ("user", "function_call", "function_call_output", "message")


async def failed(store: RunStore, agent: Agent, **options: Any) -> tuple[RunFailure, list[str]]:
    """Why a run failed, and the kinds of items in its history."""
    runs = runs_of(store, agent, **options)
    await runs.start()
    stop = await runs.drive()
    assert stop.failure is not None, stop
    assert (await store.read("r")).status == "failed"
    return stop.failure, [item[0] for item in brief(await runs.items())]


async def test_a_run_that_exceeds_its_turns_fails_and_keeps_its_history(store: RunStore) -> None:
    turns = [calls("look", {"what": "x"}, f"c{number}") for number in range(5)]
    failure, items = await failed(store, one_agent(*turns, tools=[look]), max_turns=2)
    assert (failure.kind, failure.type) == ("max_turns", "MaxTurnsExceeded")
    assert items == [*KINDS[:3], *KINDS[1:3]]


async def test_an_error_of_the_model_fails_the_run_and_keeps_the_input(store: RunStore) -> None:
    agent = one_agent()
    agent.model = ScriptedModel([ModelFailed("m", "out of tokens")])
    failure, items = await failed(store, agent)
    assert (failure.kind, failure.type) == ("model", "ModelFailed")
    assert items == ["user"]


async def test_an_error_of_a_tool_that_raises_fails_the_run(store: RunStore) -> None:
    @function_tool(on_error="raise")
    async def broken() -> str:
        raise ValueError("out of order")

    both = [LOOK, calls("broken", {}, "c2")]
    failure, items = await failed(store, one_agent(both, tools=[look, broken]))
    assert failure.kind == "tool"
    assert "out of order" in failure.message
    assert items == ["user", *KINDS[1:2] * 2, *KINDS[2:3] * 2]


@pytest.mark.parametrize("policy", ["fail", "tell", "park", "retry"])
async def test_a_call_that_took_too_long_is_uncertain(store: RunStore, policy: Any) -> None:
    calls_made: list[bool] = []

    @function_tool(timeout_s=0.02)
    async def slow() -> str:
        calls_made.append(True)
        await asyncio.sleep(3600)
        return "never"

    agent = one_agent(calls("slow", {}, "c1"), "done", tools=[slow])
    runs = runs_of(store, agent, on_uncertain=policy)
    await runs.start()
    stop = await runs.drive()
    assert len(calls_made) == (2 if policy == "retry" else 1)
    if policy == "tell":
        assert stop.status == "completed"
    elif policy == "park":
        [waiting] = (await store.read("r")).pending
        assert waiting.tool == "settle:bare:slow"
    else:
        assert stop.failure is not None
        assert (stop.failure.kind, stop.failure.type) == ("timeout", "ToolTimeout")


async def test_a_turn_that_took_too_long_keeps_what_it_has_done(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_recorded = asyncio.Event()
    limits: list[asyncio.Timeout] = []
    limited, turn_s = asyncio.timeout, 600.0

    def noted(limit_s: float | None) -> asyncio.Timeout:
        limit = limited(limit_s)
        if limit_s == turn_s:
            limits.append(limit)
        return limit

    async def recorded(ledger: TurnLedger, *about: Any) -> ToolOutcome:
        outcome = await made(ledger, *about)
        is_recorded.set()
        return outcome

    made = TurnLedger.tool_call
    monkeypatch.setattr(asyncio, "timeout", noted)
    monkeypatch.setattr(TurnLedger, "tool_call", recorded)

    @function_tool
    async def slow() -> str:
        await is_recorded.wait()
        [limit] = limits
        limit.reschedule(asyncio.get_running_loop().time())  # the time of the turn is over
        await asyncio.sleep(3600)
        return "never"

    @function_tool
    async def fast() -> str:
        return "made"

    both = [calls("fast", {}, "c1"), calls("slow", {}, "c2")]
    runs = runs_of(store, one_agent(both, tools=[fast, slow]))
    await runs.start()
    stop = await RunDriver(store, "w1", turn_timeout_s=turn_s).drive("r", runs.engine)
    assert stop.failure is not None
    assert (stop.failure.kind, stop.failure.type) == ("timeout", "TimeoutError")
    kinds, ids, outputs = zip(*brief(await runs.items()), strict=True)
    assert kinds == ("user", *KINDS[1:2] * 2, *KINDS[2:3] * 2)
    assert ids == (None, "c1", "c2", "c1", "c2")
    assert outputs[3] == "made"


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_tripped_input_guardrail_leaves_the_user_s_input(
    store: RunStore, parallel: bool
) -> None:
    @input_guardrail(parallel=parallel)
    async def trips(*_: Any) -> Verdict:
        return Verdict(tripped=True)

    agent = one_agent([LOOK], tools=[look], input_guardrails=[trips])
    failure, items = await failed(store, agent)
    assert (failure.kind, failure.type) == ("guardrail", "GuardrailTripped")
    assert items == ["user"]


async def test_a_tripped_output_guardrail_keeps_calls_and_leaves_the_message_out(
    store: RunStore,
) -> None:
    @output_guardrail
    async def trips(*_: Any) -> Verdict:
        return Verdict(tripped=True)

    agent = one_agent([LOOK], "done", tools=[look], output_guardrails=[trips])
    failure, items = await failed(store, agent)
    assert failure.kind == "guardrail"
    assert items == [*KINDS[:3]]


async def test_a_guardrail_that_raises_drops_no_work(store: RunStore) -> None:
    @output_guardrail
    async def raises(*_: Any) -> Verdict:
        raise ValueError("no verdict")

    agent = one_agent([LOOK], "done", tools=[look], output_guardrails=[raises])
    failure, items = await failed(store, agent)
    assert (failure.kind, failure.type) == ("guardrail", "GuardrailFailed")
    assert items == [*KINDS[:3]]


async def test_an_error_of_the_program_fails_the_run_and_keeps_the_input(store: RunStore) -> None:
    agent = one_agent()
    agent.model = "a name"
    config = RunConfig(model_provider=lambda name: 1 / 0)  # type: ignore[arg-type,return-value]
    failure, items = await failed(store, agent, run_config=config)
    assert failure.kind == "error"
    assert items == ["user"]


async def test_a_typed_output_is_json(store: RunStore) -> None:
    @dataclasses.dataclass
    class Answer:
        number: int

    runs = runs_of(store, one_agent('{"number": 42}', output_type=Answer))
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert (await store.read("r")).result == b'{"number":42}'


async def test_a_cancel_ends_a_run_with_a_coherent_history(store: RunStore) -> None:
    @function_tool
    async def slow() -> str:
        await store.cancel("r", by="ann")
        return "made"

    turns = [LOOK], calls("slow", {}, "c2"), calls("look", {"what": "x"}, "c3")
    runs = runs_of(store, one_agent(*turns, tools=[look, slow]))
    await runs.start()
    stop = await runs.drive()
    assert (stop.status, stop.cancelled_by) == ("cancelled", "ann")
    assert [item[1] for item in brief(await runs.items()) if item[1]] == ["c1", "c1", "c2", "c2"]


async def test_a_drive_that_is_cancelled_leaves_no_task_behind(store: RunStore) -> None:
    is_called = asyncio.Event()

    @function_tool
    async def slow() -> str:
        is_called.set()
        await asyncio.sleep(3600)
        return "never"

    runs = runs_of(store, one_agent([LOOK, calls("slow", {}, "c2")], tools=[look, slow]))
    await runs.start()
    before = asyncio.all_tasks()
    drive = asyncio.create_task(runs.drive())
    await is_called.wait()
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    assert asyncio.all_tasks() == before
    assert (await store.read("r")).status == "queued"


# --- snapshots that cannot be read here ----------------------------------------------------------


async def test_a_run_of_an_agent_that_is_not_there_is_handed_back(store: RunStore) -> None:
    runs = runs_of(store, office(print))
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    with pytest.raises(UnknownAgent, match="'front'"):
        await runs_of(store, one_agent("hello")).drive()
    assert (await store.read("r")).status == "queued"


async def test_a_snapshot_that_cannot_be_read_is_handed_back(store: RunStore) -> None:
    runs = runs_of(store, one_agent("hello"))
    version = runs.engine.readable[-1]
    await store.create("r", "r", b'{"$schemaVersion":"', schema=version, agent="a")
    with pytest.raises(InvalidRunState):
        await runs.drive()
    assert (await store.read("r")).status == "queued"


# --- bad input -----------------------------------------------------------------------------------


def test_what_limits_nothing_is_refused() -> None:
    agent = one_agent("hello")
    for options, why in (
        ({"on_uncertain": {"refund": "park"}}, "bare:refund"),
        ({"on_uncertain": "ask"}, "one of retry"),
        ({"limits": {"refund": Limits(expires_in_s=60)}}, "limits = 'refund'"),
        ({"max_turns": 0}, "max_turns = 0"),
        ({"run_config": {}}, "a RunConfig"),
    ):
        given: dict[str, Any] = dict(options)
        with pytest.raises(InvalidSetting, match=why):
            AgentEngine(agent, **given)
    with pytest.raises(InvalidSetting, match="an Agent of capsule_tasks"):
        AgentEngine("agent")  # type: ignore[arg-type]
    for strange in ("", 5, [], ["text"]):
        with pytest.raises(InvalidSetting, match="input"):
            AgentEngine(agent).first(strange)


async def test_approvals_have_the_limits_of_their_tools(store: RunStore) -> None:
    def tool(name: str, limits: Limits | None = None) -> Any:
        async def work() -> str:
            return "done"

        return function_tool(name=name, needs_approval=True, limits=limits)(work)

    own = Limits(may_decide=("ann",))
    tools = [tool("pay", own), tool("mail"), tool("call", own)]
    agent = one_agent([calls(each.name, {}, each.name) for each in tools], tools=tools)
    limits = {"bare:pay": Limits(expires_in_s=60, may_decide=("ops",))}
    runs = runs_of(store, agent, limits=limits)
    await runs.start()
    await runs.drive()
    waiting = {call.call_id: call for call in (await store.read("r")).pending}
    assert waiting["pay"].may_decide == ("ops",)
    assert waiting["pay"].expires_at is not None
    assert waiting["mail"].may_decide is None
    assert waiting["call"].may_decide == ("ann",)


async def test_two_calls_of_one_id_that_wait_fail_the_run(store: RunStore) -> None:
    """A decision names a call by its id alone, and would count for both of them."""

    def clerk(name: str) -> Any:
        @function_tool(needs_approval=True)
        async def pay(euros: int) -> str:
            return f"paid {euros}"

        agent = one_agent(calls("pay", {"euros": 5}, "c_in"), "paid it", tools=[pay])
        agent.name = name
        return agent.as_tool(f"ask_{name}", "Ask.")

    ask = [calls(f"ask_{name}", {"input": "pay"}, f"c_{name}") for name in "ab"]
    failure, items = await failed(store, one_agent(ask, tools=[clerk("a"), clerk("b")]))
    assert failure.type == "InvalidRunState"
    assert "'c_in'" in failure.message
    assert items[0] == "user"
