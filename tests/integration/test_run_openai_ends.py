"""How durable runs of openai-agents end: failures, guardrails, cancels, refusals."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    GuardrailFunctionOutput,
    InputGuardrail,
    OutputGuardrail,
    function_tool,
)
from agents.sandbox import SandboxAgent
from pydantic import BaseModel

from capsule_tasks.durable import RunFailure
from capsule_tasks.errors import InvalidRunState, InvalidSetting
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.runs.parking import Limits
from capsule_tasks.storage import RunStore
from tests.agents_script import ScriptedModel, StatelessModel, calls, says
from tests.integration.durable_agents import LOOK, Log, Runs, alone, brief, look, relay


async def failure_of(store: RunStore, agent: Agent[Any], **options: Any) -> RunFailure:
    runs = Runs(store, OpenAIEngine(agent, **options))
    await runs.start()
    failure = (await runs.drive()).failure
    assert failure is not None
    return failure


async def test_a_run_that_exceeds_its_turns_fails_and_keeps_its_history(store: RunStore) -> None:
    turns = [calls("look", '{"what": "x"}', f"c{number}") for number in range(5)]
    agent = Agent(name="a", model=ScriptedModel(*turns), tools=[look])
    runs = Runs(store, OpenAIEngine(agent, max_turns=2))
    await runs.start()
    failure = (await runs.drive()).failure
    assert failure == RunFailure("max_turns", "MaxTurnsExceeded", "Max turns (2) exceeded")
    assert len(await runs.items()) == 5


async def test_an_error_of_the_model_fails_the_run(store: RunStore) -> None:
    model = ScriptedModel(LOOK, ConnectionError("no route to the model"))
    agent = Agent(name="a", model=model, tools=[look])
    failure = await failure_of(store, agent)
    assert failure == RunFailure("model", "ConnectionError", "no route to the model")


async def test_text_that_utf_8_does_not_have_is_stored_with_escapes(store: RunStore) -> None:
    @function_tool
    async def listing() -> str:
        return "name \udcff"

    model = StatelessModel([calls("listing", "{}", "c1")], [says("done")])
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, tools=[listing])))
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert "name \\udcff" in [item[2] for item in brief(await runs.items())]


@pytest.mark.parametrize("is_sync", [True, False])
async def test_a_tool_that_exits_fails_and_not_the_process(store: RunStore, is_sync: bool) -> None:
    def leave() -> str:
        sys.exit(3)

    async def leave_later() -> str:
        sys.exit(3)

    tool = function_tool(leave if is_sync else leave_later, failure_error_function=None)
    model = ScriptedModel(calls(tool.name, "{}", "c1"))
    failure = await failure_of(store, Agent(name="a", model=model, tools=[tool]))
    assert failure.kind == "tool"
    assert "the tool raised SystemExit(3)" in failure.message


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_tool_that_raises_a_cancel_of_its_own_fails_the_run(
    store: RunStore, at_once: bool
) -> None:
    """Nobody cancels the run: it must not be queued again, to be cut by the same tool."""

    @function_tool(failure_error_function=None)
    async def cut() -> str:
        if at_once:
            raise asyncio.CancelledError("the tool gave up")
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task
        return "never"

    agent = Agent(name="a", model=ScriptedModel(calls("cut", "{}", "c1")), tools=[cut])
    failure = await failure_of(store, agent)
    assert failure.type == "CancelledError"
    assert (await store.read("r")).status == "failed"


async def test_an_error_of_a_tool_fails_the_run(store: RunStore) -> None:
    @function_tool(failure_error_function=None)
    async def broken() -> str:
        raise ValueError("out of order")

    agent = Agent(name="a", model=ScriptedModel(calls("broken", "{}", "c1")), tools=[broken])
    failure = await failure_of(store, agent)
    assert failure.kind == "tool"
    assert "out of order" in failure.message


async def test_a_timeout_of_a_tool_that_raises_fails_the_run(store: RunStore) -> None:
    @function_tool(timeout=0.01, timeout_behavior="raise_exception")
    async def slow() -> str:
        await asyncio.sleep(3600)
        return "never"

    agent = Agent(name="a", model=ScriptedModel(calls("slow", "{}", "c1")), tools=[slow])
    failure = await failure_of(store, agent)
    assert (failure.kind, failure.type) == ("timeout", "ToolTimeoutError")


def guardrail(is_tripped: bool) -> Any:
    async def check(*_: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=is_tripped)

    return check


@pytest.mark.parametrize("runs_in_parallel", [True, False])
async def test_a_tripped_input_guardrail_leaves_the_user_s_input(
    store: RunStore, runs_in_parallel: bool
) -> None:
    rail = InputGuardrail(guardrail(True), run_in_parallel=runs_in_parallel)
    agent = Agent(name="a", model=ScriptedModel(says("no")), input_guardrails=[rail])
    runs = Runs(store, OpenAIEngine(agent))
    await runs.start()
    failure = (await runs.drive()).failure
    assert failure is not None
    assert failure.kind == "guardrail"
    assert [item.get("role") for item in await runs.items()] == ["user"]


async def test_a_tripped_output_guardrail_keeps_calls_and_leaves_the_message_out(
    store: RunStore,
) -> None:
    rail = OutputGuardrail(guardrail(True))
    model = StatelessModel([LOOK], [says("secret")])
    agent = Agent(name="a", model=model, tools=[look], output_guardrails=[rail])
    runs = Runs(store, OpenAIEngine(agent))
    await runs.start()
    failure = (await runs.drive()).failure
    assert failure is not None
    assert failure.kind == "guardrail"
    assert "secret" not in json.dumps(await runs.items())
    kinds = [item[0] for item in brief(await runs.items())]
    assert kinds[:3] == ["user", "function_call", "function_call_output"]


async def test_guardrails_that_pass_change_nothing(store: RunStore) -> None:
    def agent() -> Agent[Any]:
        made = relay(Log())
        made.input_guardrails = [InputGuardrail(guardrail(False))]
        made.output_guardrails = [OutputGuardrail(guardrail(False))]
        return made

    runs = Runs(store, OpenAIEngine(agent()))
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert brief(await runs.items()) == (await alone(agent()))[1]


async def test_a_call_behind_an_output_guardrail_is_stored_once(store: RunStore) -> None:
    """The SDK holds the session write of a parked call back until its guardrails have passed."""

    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        return f"paid {euros}"

    def agent() -> Agent[Any]:
        model = StatelessModel([calls("pay", '{"euros": 1}', "p1")], [says("done")])
        rails = [OutputGuardrail(guardrail(False))]
        return Agent(name="a", model=model, tools=[pay], output_guardrails=rails)

    runs = Runs(store, OpenAIEngine(agent()))
    await runs.start()
    assert await runs.to_end() == "completed"
    assert brief(await runs.items()) == (await alone(agent()))[1]


async def test_a_typed_output_is_json(store: RunStore) -> None:
    class Answer(BaseModel):
        number: int

    agent = Agent(name="a", model=ScriptedModel(says('{"number": 7}')), output_type=Answer)
    runs = Runs(store, OpenAIEngine(agent))
    await runs.start()
    assert (await runs.drive()).result == b'{"number":7}'


# --- refusals ------------------------------------------------------------------------------------


def test_agents_in_a_sandbox_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="cleans a sandbox up after each call"):
        OpenAIEngine(SandboxAgent(name="boxed"))
    outer = Agent(name="outer", handoffs=[SandboxAgent(name="boxed")])
    with pytest.raises(InvalidSetting, match="SandboxAgent 'boxed'"):
        OpenAIEngine(outer)


def test_policies_that_limit_nothing_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="bare:refund"):
        OpenAIEngine(Agent(name="a"), on_uncertain={"refund": "park"})
    with pytest.raises(InvalidSetting, match="one of retry"):
        OpenAIEngine(Agent(name="a"), on_uncertain="ask")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="limits = 'refund'"):
        OpenAIEngine(Agent(name="a"), limits={"refund": Limits(expires_in_s=60)})
    with pytest.raises(InvalidSetting, match="not empty"):
        OpenAIEngine(Agent(name="a")).first("")


async def test_approvals_have_the_limits_of_their_tools(store: RunStore) -> None:
    @function_tool(needs_approval=True)
    async def pay() -> str:
        return "paid"

    @function_tool(needs_approval=True)
    async def mail() -> str:
        return "mailed"

    model = StatelessModel([calls("pay", "{}", "p"), calls("mail", "{}", "m")])
    agent = Agent(name="a", model=model, tools=[pay, mail])
    limits = {"bare:pay": Limits(expires_in_s=60, may_decide=("ops",))}
    runs = Runs(store, OpenAIEngine(agent, limits=limits))
    await runs.start()
    await runs.drive()
    waiting = {call.call_id: call for call in (await store.read("r")).pending}
    assert waiting["p"].may_decide == ("ops",)
    assert waiting["p"].expires_at is not None
    assert waiting["m"].may_decide is None
    assert waiting["m"].expires_at is None


async def test_a_run_of_an_agent_that_is_not_there_is_handed_back(store: RunStore) -> None:
    runs = Runs(store, OpenAIEngine(relay(Log())))
    await runs.start()
    claim = await store.claim("r", "w1")
    await store.release(claim)

    @function_tool(needs_approval=True)
    async def pay() -> str:
        return "paid"

    other = Agent(name="other", model=ScriptedModel(calls("pay", "{}", "p")), tools=[pay])
    runs = Runs(store, OpenAIEngine(other, limits=Limits(expires_in_s=60)))
    await runs.drive()
    await runs.approve_all()
    stranger = Runs(store, OpenAIEngine(Agent(name="stranger", model=ScriptedModel())))
    with pytest.raises(InvalidRunState, match="agent not found"):
        await stranger.drive()
    assert (await store.read("r")).status == "queued"


async def test_a_cancel_ends_a_run_with_a_coherent_history(store: RunStore) -> None:
    @function_tool
    async def slow() -> str:
        await store.cancel("r", by="ann")
        return "made"

    model = StatelessModel([LOOK], [calls("slow", "{}", "c2")], [calls("look", "{}", "c3")])
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, tools=[look, slow])))
    await runs.start()
    stop = await runs.drive()
    assert (stop.status, stop.cancelled_by) == ("cancelled", "ann")
    calls_made = [item[1] for item in brief(await runs.items()) if item[1]]
    assert calls_made == ["c1", "c1", "c2", "c2"]


async def test_a_drive_that_is_cancelled_leaves_no_task_behind(store: RunStore) -> None:
    is_called = asyncio.Event()

    @function_tool
    async def slow() -> str:
        is_called.set()
        await asyncio.sleep(3600)
        return "never"

    model = StatelessModel([calls("slow", "{}", "c1")])
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, tools=[slow])))
    await runs.start()
    before = asyncio.all_tasks()
    drive = asyncio.create_task(runs.drive())
    await is_called.wait()
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    assert asyncio.all_tasks() == before
    assert (await store.read("r")).status == "queued"


def test_the_package_needs_no_openai_agents() -> None:
    code = (
        "import sys, capsule_tasks.durable, capsule_tasks.client, capsule_tasks.runs.parking;"
        "assert 'agents' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_calls_that_nobody_could_decide_about_fail_the_run(store: RunStore) -> None:
    """Two agents as tools give the same id to calls that wait: a decision would count for both."""

    @function_tool(needs_approval=True)
    async def pay() -> str:
        return "paid"

    def asks(name: str) -> Any:
        model = StatelessModel([calls("pay", "{}", "p")], [says("done")])
        return Agent(name=name, model=model, tools=[pay]).as_tool(f"ask_{name}", "Ask.")

    both = [calls(f"ask_{name}", '{"input": "go"}', f"c_{name}") for name in "ab"]
    agent = Agent(name="outer", model=StatelessModel(both), tools=[asks("a"), asks("b")])
    failure = await failure_of(store, agent)
    assert failure.type == "InvalidRunState"
    assert "2 waiting calls have one id" in failure.message


def test_hooks_of_an_agent_are_no_hooks_of_a_run() -> None:
    with pytest.raises(InvalidSetting, match="must be RunHooks"):
        OpenAIEngine(Agent(name="a"), hooks=AgentHooks())  # type: ignore[arg-type]
