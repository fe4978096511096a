"""Agents of openai-agents as durable runs, one turn at a time, compared with the SDK alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from agents import (
    Agent,
    Computer,
    ComputerTool,
    FunctionTool,
    GuardrailFunctionOutput,
    LocalShellTool,
    ModelProvider,
    OutputGuardrail,
    RunConfig,
    function_tool,
)
from agents.mcp import MCPServer
from agents.memory import SessionSettings
from mcp.types import CallToolResult, TextContent, Tool
from openai.types.responses import ResponseComputerToolCall
from openai.types.responses.response_output_item import LocalShellCall

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.openai_agents.current import UNCERTAIN
from capsule_tasks.openai_agents.session import BufferedSession
from capsule_tasks.runs.approvals import fingerprint_of
from capsule_tasks.storage import PlannedCall, RunStore
from tests.agents_script import ScriptedModel, StatelessModel, calls, says
from tests.integration.durable_agents import LOOK, Log, Runs, alone, brief, look, office, relay


async def test_a_run_does_what_the_agent_alone_does(store: RunStore) -> None:
    done: list[str] = []
    done_alone: list[str] = []
    runs = Runs(store, OpenAIEngine(office(done.append)))
    await runs.start()
    assert await runs.to_end() == "completed"
    output, items = await alone(office(done_alone.append))
    assert (await store.read("r")).result == json.dumps(output).encode()
    assert sorted(brief(await runs.items()), key=str) == sorted(items, key=str)
    assert sorted(done) == sorted(done_alone)


async def test_people_see_what_will_be_executed(store: RunStore) -> None:
    runs = Runs(store, OpenAIEngine(office(print)))
    await runs.start()
    assert (await runs.drive()).status == "interrupted"
    assert await runs.approve_all() == ['bare:pay {"euros": 5}']
    assert (await runs.drive()).status == "interrupted"
    assert sorted(await runs.approve_all()) == [
        'apply_patch:apply_patch {"path": "f", "type": "delete_file"}',
        "custom:query x",
        'shell:shell {"commands": ["ls"]}',
    ]


async def test_a_rejection_reaches_the_model(store: RunStore) -> None:
    done: list[str] = []
    runs = Runs(store, OpenAIEngine(office(done.append)))
    await runs.start()
    await runs.drive()
    await store.approvals.reject("r", "c_pay", message="not today")
    await runs.drive()
    assert "pay 5" not in done
    assert (await store.read("r")).status == "interrupted"  # the clerk said something all the same


async def test_a_standing_approval_holds_for_later_calls(store: RunStore) -> None:
    done: list[int] = []

    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        done.append(euros)
        return "paid"

    model = StatelessModel(
        [calls("pay", '{"euros": 1}', "p1")], [calls("pay", '{"euros": 2}', "p2")], [says("done")]
    )
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, tools=[pay])))
    await runs.start()
    await runs.drive()
    await store.approvals.approve("r", "p1", always=True)
    assert (await runs.drive()).status == "completed"
    assert done == [1, 2]


async def test_hooks_and_events_tell_of_each_agent_once(store: RunStore) -> None:
    log, log_alone = Log(), Log()
    runs = Runs(store, OpenAIEngine(relay(log), hooks=log))
    await runs.start()
    await runs.drive()
    await alone(relay(log_alone), hooks=log_alone)
    assert sorted(log.lines) == sorted(log_alone.lines)
    updates = [e.agent for e in runs.events if e.kind == "agent_updated_stream_event"]
    assert updates == ["first", "second"]


async def test_events_of_the_model_are_streamed(store: RunStore) -> None:
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=ScriptedModel(says("hello")))))
    await runs.start()
    await runs.drive()
    raw = [e.data["type"] for e in runs.events if e.kind == "raw_response_event"]
    assert raw == ["response.created", "response.output_item.done", "response.completed"]
    items = [e.data["name"] for e in runs.events if e.kind == "run_item_stream_event"]
    assert items == ["message_output_created"]
    assert runs.events[-1].data["usage"].keys() == {"requests", "input_tokens", "output_tokens"}


# --- what a run is made of -----------------------------------------------------------------------


async def test_the_context_is_kept_over_turns_and_processes(store: RunStore) -> None:
    @dataclasses.dataclass
    class Basket:
        count: int

    async def count(ctx: Any, _: str) -> str:
        ctx.context.count += 1
        return str(ctx.context.count)

    tool = FunctionTool(
        name="count", description="Count.", params_json_schema={}, on_invoke_tool=count,
        strict_json_schema=False, needs_approval=True,
    )  # fmt: skip
    model = StatelessModel(
        [calls("count", "{}", "c1")], [calls("count", "{}", "c2")], [says("done")]
    )
    engine = OpenAIEngine(
        Agent(name="a", model=model, tools=[tool]),
        context_serializer=dataclasses.asdict,
        context_deserializer=lambda data: Basket(**data),
    )
    with pytest.raises(InvalidSetting, match="context_serializer takes; it raised TypeError"):
        engine.first("go", {"count": 40})
    runs = Runs(store, engine)
    await runs.start(context=Basket(40))
    assert await runs.to_end() == "completed"
    assert [item[2] for item in brief(await runs.items())] == [None, None, "41", None, "42", None]


async def test_a_session_s_history_is_given_to_the_model(store: RunStore) -> None:
    model = ScriptedModel(says("first"), says("second"))
    engine = OpenAIEngine(Agent(name="a", model=model))
    runs = Runs(store, engine)
    for run_id in ("r1", "r2"):
        snapshot, schema, agent = engine.first(f"question {run_id}")
        await store.create(run_id, "r", snapshot, schema=schema, agent=agent)
        await runs.drive(run_id)
    said = [str(item.get("content")) for item in model.asked[1]]
    assert [text in line for text, line in zip(("r1", "first", "r2"), said, strict=True)] == [
        True,
        True,
        True,
    ]


async def test_tools_of_mcp_servers_go_through_the_ledger(store: RunStore) -> None:
    done: list[Any] = []

    class Server(MCPServer):
        name = "shop"

        async def connect(self) -> None: ...

        async def cleanup(self) -> None: ...

        async def list_tools(self, *_: Any) -> list[Tool]:
            return [Tool(name="buy", inputSchema={"type": "object", "properties": {}})]

        async def call_tool(self, tool_name: str, arguments: Any, *_: Any) -> CallToolResult:
            done.append(tool_name)
            return CallToolResult(content=[TextContent(type="text", text="bought")])

        async def list_prompts(self) -> Any: ...

        async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...

    model = StatelessModel([calls("buy", "{}", "c1")], [says("done")])
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model, mcp_servers=[Server()])))
    await runs.start()
    starts: list[str] = []
    start_calls = store.start_calls

    async def watched(claim: Any, planned: Any, **replies: Any) -> Any:
        starts.extend(call.call_id for call in planned)
        return await start_calls(claim, planned, **replies)

    store.start_calls = watched  # type: ignore[method-assign]
    assert (await runs.drive()).status == "completed"
    assert (done, starts) == (["buy"], ["c1"])
    assert "bought" in json.dumps(await runs.items())


async def test_calls_of_one_id_in_agents_used_as_tools_are_apart(store: RunStore) -> None:
    paid: list[int] = []

    @function_tool
    async def pay(euros: int) -> str:
        paid.append(euros)
        return f"paid {euros}"

    clerk = Agent(
        name="clerk",
        model=StatelessModel([calls("pay", '{"euros": 5}', "c1")], [says("paid it")]),
        tools=[pay],
    )
    ask = [calls("ask_clerk", '{"input": "pay"}', call_id) for call_id in ("c1", "c2")]
    desk = Agent(
        name="desk",
        model=StatelessModel(ask, [says("done")]),
        tools=[clerk.as_tool("ask_clerk", "Ask.")],
    )
    runs = Runs(store, OpenAIEngine(desk))
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert paid == [5, 5]


async def test_the_model_is_told_of_an_uncertain_call(store: RunStore) -> None:
    model = StatelessModel([LOOK], [says("done")])
    agent = Agent(name="a", model=model, tools=[look])
    runs = Runs(store, OpenAIEngine(agent, on_uncertain={"bare:look": "tell"}))
    await runs.start()
    claim = await store.claim("r", "w1")
    fingerprint = fingerprint_of("bare:look", LOOK.arguments)
    await store.start_calls(claim, [PlannedCall("c1", fingerprint)])
    await store.release(claim)
    assert (await runs.drive()).status == "completed"
    assert ("function_call_output", "c1", UNCERTAIN) in brief(await runs.items())


async def test_a_reply_to_another_input_is_discarded_and_reported(store: RunStore) -> None:
    started = asyncio.Event()
    asked: list[None] = []

    @function_tool
    async def look(what: str) -> str:
        if not started.is_set():
            started.set()
            await asyncio.sleep(3600)
        return f"saw {what}"

    model = StatelessModel([LOOK], [says("done")], on_call=lambda: asked.append(None))
    agent = Agent(name="a", model=model, tools=[look])
    runs = Runs(store, OpenAIEngine(agent, on_uncertain="retry"))
    await runs.start()
    drive = asyncio.create_task(runs.drive())
    await started.wait()
    drive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drive
    await runs.history("r").add_items([{"role": "user", "content": "and be quick"}])
    assert (await runs.drive()).status == "completed"
    assert len(asked) == 3
    assert [event.kind for event in runs.events].count("replies_discarded") == 1


async def test_shells_and_computers_go_through_the_ledger(store: RunStore) -> None:
    done: list[str] = []

    class Screen(Computer):
        def screenshot(self) -> str:
            return "cGljdHVyZQ=="

        def click(self, x: int, y: int, button: str) -> None:
            done.append(f"click {x} {y}")

    Screen.__abstractmethods__ = frozenset()  # the others are not asked for

    async def execute(request: Any) -> str:
        done.append(" ".join(request.data.action.command))
        return "ran"

    action = {"type": "exec", "command": ["ls"], "env": {}}
    shell = LocalShellCall.model_validate(
        {"type": "local_shell_call", "id": "s", "call_id": "c1", "status": "completed",
         "action": action}
    )  # fmt: skip
    click = ResponseComputerToolCall.model_validate(
        {"type": "computer_call", "id": "k", "call_id": "c2", "status": "completed",
         "pending_safety_checks": [],
         "action": {"type": "click", "x": 1, "y": 2, "button": "left"}}
    )  # fmt: skip
    agent = Agent(
        name="a",
        model=StatelessModel([shell], [click], [says("done")]),
        tools=[LocalShellTool(executor=execute), ComputerTool(computer=Screen())],  # type: ignore[abstract]
    )
    runs = Runs(store, OpenAIEngine(agent))
    await runs.start()
    starts: list[str] = []
    start_calls = store.start_calls

    async def watched(claim: Any, planned: Any, **replies: Any) -> Any:
        starts.extend(call.call_id for call in planned)
        return await start_calls(claim, planned, **replies)

    store.start_calls = watched  # type: ignore[method-assign]
    stop = await runs.drive()
    assert stop.status == "completed", stop
    assert (done, starts) == (["ls", "click 1 2"], ["c1", "c2"])


async def test_one_provider_outlives_the_turns(store: RunStore) -> None:
    class Provider(ModelProvider):
        closed = 0

        def __init__(self) -> None:
            self.model = StatelessModel([LOOK], [says("done")])

        def get_model(self, model_name: str | None) -> Any:
            return self.model

        async def aclose(self) -> None:
            self.closed += 1

    provider = Provider()
    config = RunConfig(model_provider=provider)
    engine = OpenAIEngine(Agent(name="a", model="any", tools=[look]), run_config=config)
    runs = Runs(store, engine)
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert provider.closed == 0
    await engine.aclose()
    assert provider.closed == 1


async def test_a_prepared_agent_does_what_it_did_outside_of_runs() -> None:
    done: list[str] = []
    agent = office(done.append)
    OpenAIEngine(agent)
    OpenAIEngine(agent)  # prepared twice
    output, items = await alone(agent)
    assert output == "all done"
    assert len(done) == 7
    assert sorted(items, key=str) == sorted((await alone(office(print)))[1], key=str)


async def test_what_others_append_meanwhile_is_kept_and_harms_no_turn(store: RunStore) -> None:
    """Also behind an output guardrail, where the SDK compares the session before and after."""

    async def append(what: str) -> None:
        await runs.history("r").add_items([{"role": "user", "content": what}])

    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        await append("during the turn")
        return f"paid {euros}"

    async def passes(*_: Any) -> GuardrailFunctionOutput:
        await append("during the check")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    model = StatelessModel([calls("pay", '{"euros": 1}', "p1")], [says("done")])
    rails: list[Any] = [OutputGuardrail(passes)]
    agent = Agent(name="a", model=model, tools=[pay], output_guardrails=rails)
    runs = Runs(store, OpenAIEngine(agent))
    await runs.start()
    assert (await runs.drive()).status == "interrupted"
    await append("while it waits")
    assert await runs.to_end() == "completed"
    found = [item.get("content") or item.get("type") for item in await runs.items()]
    texts = ["go", "while it waits", "during the turn", "during the check"]
    assert sorted(each for each in found if each in texts) == sorted(texts)
    kinds = [item[0] for item in brief(await runs.items()) if item[0] != "user"]
    assert kinds == ["function_call", "function_call_output", "message"]


async def test_a_turn_sees_the_history_as_it_was_at_first(store: RunStore) -> None:
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=ScriptedModel())))
    history = runs.history("r")
    await history.add_items([{"n": number} for number in range(5)])
    session = BufferedSession(history)
    assert [item["n"] for item in await session.get_items(2)] == [3, 4]
    await history.add_items([{"n": 5}, {"n": 6}])
    await session.add_items([{"n": "new"}])
    assert [item["n"] for item in await session.get_items(3)] == [3, 4, "new"]
    assert [item["n"] for item in await session.get_items()] == [0, 1, 2, 3, 4, "new"]
    assert await session.get_items(0) == []
    assert await session.pop_item() == {"n": "new"}
    assert await session.pop_item() is None
    await history.clear_session()
    assert await session.get_items() == []
    with pytest.raises(NotImplementedError, match=r"History\.clear_session"):
        await session.clear_session()


async def test_many_runs_of_one_agent_share_a_process(store: RunStore) -> None:
    done: list[str] = []
    runs = Runs(store, OpenAIEngine(office(done.append)))
    ids = [f"r{number}" for number in range(20)]
    for run_id in ids:
        await runs.start(run_id=run_id)
    assert set(await asyncio.gather(*map(runs.to_end, ids))) == {"completed"}
    assert {done.count(effect) for effect in done} == {20}
    histories = [sorted(brief(await runs.items(run_id)), key=str) for run_id in ids]
    assert all(history == histories[0] for history in histories)


async def test_a_limit_of_the_session_narrows_what_the_model_is_given(store: RunStore) -> None:
    model = ScriptedModel(says("done"))
    config = RunConfig(session_settings=SessionSettings(limit=1))
    runs = Runs(store, OpenAIEngine(Agent(name="a", model=model), run_config=config))
    await runs.history("r").add_items([{"role": "user", "content": f"old {n}"} for n in range(3)])
    await runs.start("new")
    await runs.drive()
    assert [item["content"] for item in model.asked[0]] == ["old 2", "new"]
    assert len(await runs.items()) == 5
