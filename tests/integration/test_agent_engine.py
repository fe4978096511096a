"""Agents of our own engine as durable runs, compared with the same runs in process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from capsule_tasks import Handoff, RunConfig, ToolContext, function_tool
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage import RunStore
from capsule_tasks.testing.models import ScriptedModel, StatelessModel, calls, hands_over
from tests.integration.agents.runs import LOOK, alone, look, office, one_agent, payer, runs_of
from tests.integration.durable_agents import Runs, brief


async def test_a_run_does_what_the_agent_does_in_process(store: RunStore) -> None:
    done: list[str] = []
    done_alone: list[str] = []
    runs = runs_of(store, office(done.append))
    await runs.start()
    assert await runs.to_end() == "completed"
    output, items = await alone(store, office(done_alone.append))
    assert (await store.read("r")).result == json.dumps(output).encode()
    assert await runs.items() == items
    assert sorted(done) == sorted(done_alone)


async def test_each_turn_may_be_made_by_another_process(store: RunStore) -> None:
    """Nothing but the store is between two turns: neither the engine nor its agents."""
    done: list[str] = []
    await runs_of(store, office(done.append)).start()
    while (status := (await store.read("r")).status) != "completed":
        runs = runs_of(store, office(done.append))
        if status == "interrupted":
            await runs.approve_all()
        elif not await _one_turn(store, runs):
            break
    _, items = await alone(store, office(print))
    assert await runs.items() == items
    assert sorted(done) == [
        "delete f",
        "look bill",
        "look desk",
        "look door",
        "look shelf",
        "pay 5",
    ]


async def _one_turn(store: RunStore, runs: Runs) -> bool:
    """Drive a run until its first commit, and hand it back then; False once it has ended."""
    drive = asyncio.create_task(runs.drive())
    commit = store.commit

    async def commit_and_leave(*args: Any, **options: Any) -> Any:
        done = await commit(*args, **options)
        drive.cancel()
        return done

    store.commit = commit_and_leave  # type: ignore[method-assign]
    try:
        await asyncio.wait({drive})
    finally:
        store.commit = commit  # type: ignore[method-assign]
    return drive.cancelled() or (await store.read("r")).status == "interrupted"


# --- events --------------------------------------------------------------------------------------


async def test_events_are_those_of_the_run_in_process(store: RunStore) -> None:
    desk = one_agent([LOOK], "hello", tools=[look])
    desk.name = "desk"
    front = one_agent(hands_over(desk, call_id="h"), handoffs=[desk])
    runs = runs_of(store, front)
    await runs.start()
    await runs.drive()
    told = [(event.kind, event.agent) for event in runs.events]
    assert [each for each in told if each[0] == "agent"] == [("agent", "a"), ("agent", "desk")]
    items = [event.data for event in runs.events if event.kind == "item"]
    assert items == (await runs.items())[1:]
    kinds = [kind for kind, _ in told]
    assert kinds.index("run_claimed") == 0
    assert kinds.count("turn") == 3
    assert kinds.count("usage") == 3
    assert kinds.count("tool_started") == 1
    text = "".join(event.data["text"] for event in runs.events if event.kind == "text_delta")
    assert text == "hello"


async def test_tools_publish_events_of_their_own_from_any_thread(store: RunStore) -> None:
    @function_tool
    def work(ctx: ToolContext) -> str:
        assert ctx.publish is not None
        ctx.publish("half", {"of": ctx.call_id})
        ctx.publish("strange", object())
        return "done"

    runs = runs_of(store, one_agent(calls("work", {}, "c1"), "done", tools=[work]))
    await runs.start()
    await runs.drive()
    told = {event.kind: event.data for event in runs.events}
    assert told["half"] == {"of": "c1"}
    assert told["strange"].startswith("<object object")


# --- what a run is made of -----------------------------------------------------------------------


@dataclasses.dataclass
class Basket:
    count: int


async def test_the_context_is_kept_over_turns_and_processes(store: RunStore) -> None:
    @function_tool(needs_approval=True)
    async def count(ctx: ToolContext) -> str:
        ctx.context.count += 1
        return str(ctx.context.count)

    turns = [calls("count", {}, "c1"), calls("count", {}, "c2")]
    runs = runs_of(
        store,
        one_agent(*turns, "done", tools=[count]),
        context_serializer=dataclasses.asdict,
        context_deserializer=lambda data: Basket(**data),
    )
    with pytest.raises(InvalidSetting, match="context_serializer takes"):
        runs.engine.first("go", {"count": 40})
    await runs.start(context=Basket(40))
    assert await runs.to_end() == "completed"
    assert [item[2] for item in brief(await runs.items())] == [None, None, "41", None, "42", None]


async def test_a_context_without_serializer_is_a_mapping_without_secrets(
    store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    @function_tool
    async def note(ctx: ToolContext) -> str:
        seen.append(dict(ctx.context))
        ctx.context["noted"] = True
        return "noted"

    turns = [calls("note", {}, "c1"), calls("note", {}, "c2")]
    agent = one_agent(*turns, "done", tools=[note])
    runs = runs_of(store, agent)
    with pytest.raises(InvalidSetting, match="context = Basket"):
        runs.engine.first("go", Basket(1))
    await runs.start(context={"user": "ann", "api_key": "sk-123"})
    assert "without ('$.api_key',)" in caplog.text
    assert (await runs.drive()).status == "completed"
    assert seen == [{"user": "ann"}, {"user": "ann", "noted": True}]
    assert b"sk-123" not in (await store.read("r")).snapshot
    seen.clear()
    kept = runs_of(store, agent, keep_secrets=True)
    await kept.start(run_id="kept", context={"api_key": "sk-123"})
    await kept.drive("kept")
    assert seen[0] == {"api_key": "sk-123"}


async def test_a_context_that_cannot_be_stored_any_more_fails_the_run(store: RunStore) -> None:
    @function_tool
    async def spoil(ctx: ToolContext) -> str:
        ctx.context["handle"] = object()
        return "done"

    runs = runs_of(store, one_agent(calls("spoil", {}, "c1"), "done", tools=[spoil]))
    await runs.start(context={"user": "ann"})
    failure = (await runs.drive()).failure
    assert failure is not None
    assert failure.type == "ContextNotStorable"
    assert [item[0] for item in brief(await runs.items())] == [
        "user",
        "function_call",
        "function_call_output",
    ]


async def test_a_session_s_history_is_given_to_the_model(store: RunStore) -> None:
    model = ScriptedModel(["first", "second"])
    agent = one_agent()
    agent.model = model
    runs = runs_of(store, agent)
    for run_id in ("r1", "r2"):
        snapshot, schema, name = runs.engine.first(f"question {run_id}")
        await store.create(run_id, "r", snapshot, schema=schema, agent=name)
        await runs.drive(run_id)
    said = [str(item.get("content")) for item in model.requests[1].input]
    assert [text in line for text, line in zip(("r1", "first", "r2"), said, strict=True)] == [
        True,
        True,
        True,
    ]


async def test_what_others_append_meanwhile_is_kept_and_seen(store: RunStore) -> None:
    @function_tool(needs_approval=True)
    async def pay(euros: int) -> str:
        await runs.history("r").add_items([{"role": "user", "content": "during the turn"}])
        return f"paid {euros}"

    model = StatelessModel([calls("pay", {"euros": 1}, "p1"), "done"])
    agent = one_agent(tools=[pay])
    agent.model = model
    runs = runs_of(store, agent)
    await runs.start()
    assert (await runs.drive()).status == "interrupted"
    await runs.history("r").add_items([{"role": "user", "content": "while it waits"}])
    assert await runs.to_end() == "completed"
    found = [item.get("content") or item.get("type") for item in await runs.items()]
    assert found[:3] == ["go", "function_call", "while it waits"]
    assert "during the turn" in found
    assert "while it waits" in str(model.requests[-1].input)


async def test_a_handoff_s_filter_narrows_the_view_and_not_the_history(store: RunStore) -> None:
    """Also in the process that goes on after a call has waited."""
    done: list[int] = []
    model = StatelessModel([calls("pay", {"euros": 1}, "p1"), "done"])
    desk = one_agent(tools=[payer(done)])
    desk.name, desk.model = "desk", model
    narrow = Handoff(agent=desk, input_filter=lambda given: given.turn[-1:])
    front = one_agent([LOOK], hands_over(desk, call_id="h"), tools=[look], handoffs=[narrow])
    runs = runs_of(store, front)
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    assert (await runs_of(store, front).drive()).status == "completed"
    assert "door" in str(await runs.items())
    assert len(model.requests) == 2
    assert not any("door" in str(request.input) for request in model.requests)


async def test_a_callback_prepares_the_input_once(store: RunStore) -> None:
    asked: list[int] = []

    def callback(before: list[Any], new: list[Any]) -> list[Any]:
        asked.append(len(before))
        return [*before[-1:], *new]

    model = StatelessModel([calls("pay", {"euros": 1}, "p1"), "done"])
    agent = one_agent(tools=[payer([])])
    agent.model = model
    runs = runs_of(store, agent, run_config=RunConfig(session_input_callback=callback))
    await runs.history("r").add_items([{"role": "user", "content": f"old {n}"} for n in range(3)])
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    assert (await runs.drive()).status == "completed"
    assert asked == [3]
    for request in model.requests:
        assert [item.get("content") for item in request.input][:2] == ["old 2", "go"]


async def test_a_conversation_that_the_server_keeps_is_not_replayed(store: RunStore) -> None:
    # The model is sent new items only, so it cannot tell by them what it has said.
    model = ScriptedModel([calls("pay", {"euros": 1}, "p1"), "done"])
    agent = one_agent(tools=[payer([])])
    agent.model = model
    config = RunConfig(auto_previous_response_id=True)
    runs = runs_of(store, agent, run_config=config)
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    assert (await runs_of(store, agent, run_config=config).drive()).status == "completed"
    first, second = model.requests
    assert first.previous_response_id is None
    assert second.previous_response_id is not None
    assert [item["type"] for item in second.input] == ["function_call_output"]
    assert await runs.items() == []
    await runs.history("other").add_items([{"role": "user", "content": "old"}])
    await runs.start(run_id="other")
    failure = (await runs.drive("other")).failure
    assert failure is not None
    assert failure.type == "InvalidSetting"


async def test_many_runs_of_one_agent_share_a_process(store: RunStore) -> None:
    done: list[str] = []
    runs = runs_of(store, office(done.append))
    ids = [f"r{number}" for number in range(20)]
    for run_id in ids:
        await runs.start(run_id=run_id)
    assert set(await asyncio.gather(*map(runs.to_end, ids))) == {"completed"}
    assert {done.count(effect) for effect in done} == {20}
    histories = [await runs.items(run_id) for run_id in ids]
    assert all(history == histories[0] for history in histories)


async def test_snapshots_do_not_grow_with_the_turns(store: RunStore) -> None:
    turns = [calls("look", {"what": "door"}, f"c{number}") for number in range(30)]
    runs = runs_of(store, one_agent(*turns, "done", tools=[look]), max_turns=None)
    sizes: list[int] = []
    commit = store.commit

    async def measured(claim: Any, snapshot: bytes, **options: Any) -> Any:
        sizes.append(len(snapshot))
        return await commit(claim, snapshot, **options)

    store.commit = measured  # type: ignore[method-assign]
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert sizes[-2] <= sizes[0] * 1.05
    assert RunState.from_string((await store.read("r")).snapshot).turn == 31
