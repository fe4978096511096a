"""Calls of tools of our own engine in durable runs: decided, uncertain, made again."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from capsule_tasks import Handoff, ToolContext, function_tool
from capsule_tasks.durable import settle
from capsule_tasks.runs.approvals import fingerprint_of
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.storage import PlannedCall, RunStore
from capsule_tasks.testing.models import StatelessModel, calls, hands_over
from tests.integration.agents.runs import LOOK, look, office, one_agent, payer, runs_of
from tests.integration.durable_agents import brief

# --- approvals -----------------------------------------------------------------------------------


async def test_people_see_what_will_be_executed(store: RunStore) -> None:
    runs = runs_of(store, office(print))
    await runs.start()
    assert (await runs.drive()).status == "interrupted"
    assert await runs.approve_all() == ['bare:pay {"euros": 5}']
    assert (await runs.drive()).status == "interrupted"
    assert await runs.approve_all() == ['bare:delete {"path": "f"}']


async def test_a_rejection_reaches_the_model(store: RunStore) -> None:
    done: list[str] = []
    runs = runs_of(store, office(done.append))
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    await runs.drive()
    await store.approvals.reject("r", "c_del", message="not today")
    assert (await runs.drive()).status == "completed"
    assert "delete f" not in done
    assert ("function_call_output", "c_del", "not today") in brief(await runs.items())


async def test_calls_that_need_no_approval_are_made_while_others_wait(store: RunStore) -> None:
    done: list[int] = []
    first = [calls("pay", {"euros": 1}, "p1"), LOOK, calls("pay", {"euros": 2}, "p2")]
    runs = runs_of(store, one_agent(first, "done", tools=[payer(done), look]))
    await runs.start()
    assert (await runs.drive()).status == "interrupted"
    assert ("function_call_output", "c1", "saw door") in brief(await runs.items())
    await store.approvals.approve("r", "p2")
    assert (await runs.drive()).status == "interrupted"
    assert done == [2]
    await store.approvals.reject("r", "p1")
    assert (await runs.drive()).status == "completed"
    assert done == [2]


async def test_a_standing_approval_holds_for_later_calls(store: RunStore) -> None:
    done: list[int] = []
    turns = [calls("pay", {"euros": number}, f"p{number}") for number in (1, 2)]
    runs = runs_of(store, one_agent(*turns, "done", tools=[payer(done)]))
    await runs.start()
    await runs.drive()
    await store.approvals.approve("r", "p1", always=True)
    assert (await runs.drive()).status == "completed"
    assert done == [1, 2]


async def test_a_call_of_a_tool_that_is_gone_is_not_made(store: RunStore) -> None:
    first = calls("pay", {"euros": 1}, "p1")
    runs = runs_of(store, one_agent(first, "done", tools=[payer([])]))
    await runs.start()
    await runs.drive()
    await runs.approve_all()
    later = runs_of(store, one_agent(first, "done", tools=[look]))
    assert (await later.drive()).status == "completed"
    assert "There is no tool 'pay' any more." in str(await runs.items())


# --- effects -------------------------------------------------------------------------------------


async def test_calls_of_one_id_in_agents_used_as_tools_are_apart(store: RunStore) -> None:
    paid: list[int] = []

    @function_tool
    async def pay(euros: int) -> str:
        paid.append(euros)
        return f"paid {euros}"

    clerk = one_agent(calls("pay", {"euros": 5}, "c1"), "paid it", tools=[pay])
    clerk.name = "clerk"
    ask = [calls("ask_clerk", {"input": "pay"}, call_id) for call_id in ("c1", "c2")]
    runs = runs_of(store, one_agent(ask, "done", tools=[clerk.as_tool("ask_clerk", "Ask.")]))
    await runs.start()
    assert (await runs.drive()).status == "completed"
    assert paid == [5, 5]


async def test_a_turn_makes_few_calls_of_the_store(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    run = store.store.run

    async def noted(call: Any) -> Any:
        names.append(call.script.name.rpartition("/")[2])
        return await run(call)

    both = [LOOK, calls("look", {"what": "desk"}, "c2")]
    runs = runs_of(store, one_agent(both, "done", tools=[look]))
    await runs.start()
    monkeypatch.setattr(store.store, "run", noted)
    assert (await runs.drive()).status == "completed"
    first, last = names.index("start_calls"), len(names) - names[::-1].index("commit")
    assert [name for name in names[first:last] if not name.startswith("index_")] == [
        *("start_calls", "finish_calls", "commit"),
        "commit",
    ]


async def begun(store: RunStore, tool: str = "bare:look", call: Any = LOOK) -> None:
    """Have a process start a call with the id c1, and be lost."""
    claim = await store.claim("r", "w1")
    fingerprint = fingerprint_of(tool, call["arguments"])
    await store.start_calls(claim, [PlannedCall("c1", fingerprint)])
    await store.release(claim)


@pytest.mark.parametrize("is_of_tool", [False, True])
async def test_the_model_is_told_of_an_uncertain_call(store: RunStore, is_of_tool: bool) -> None:
    tool = dataclasses.replace(look, on_uncertain="tell") if is_of_tool else look
    policies: Any = {} if is_of_tool else {"bare:look": "tell"}
    runs = runs_of(store, one_agent([LOOK], "done", tools=[tool]), on_uncertain=policies)
    await runs.start()
    await begun(store)
    assert (await runs.drive()).status == "completed"
    assert ("function_call_output", "c1", UNCERTAIN) in brief(await runs.items())


async def test_an_uncertain_call_fails_the_run_whose_policy_says_so(store: RunStore) -> None:
    both = [LOOK, calls("look", {"what": "desk"}, "c2")]
    runs = runs_of(store, one_agent(both, "done", tools=[look]), on_uncertain="fail")
    await runs.start()
    await begun(store)
    failure = (await runs.drive()).failure
    assert failure is not None
    assert failure.kind == "uncertain"
    assert brief(await runs.items()) == [("user", None, None)]


async def test_a_function_that_hears_of_a_handoff_is_not_called_again_unawares(
    store: RunStore,
) -> None:
    heard: list[str] = []
    desk = one_agent("done")
    desk.name = "desk"
    handoff = Handoff(agent=desk, on_handoff=lambda ctx: heard.append(ctx.run_id))
    call = hands_over(desk, call_id="c1")
    runs = runs_of(store, one_agent(call, handoffs=[handoff]))
    await runs.start()
    await begun(store, "bare:transfer_to_desk", call)
    assert (await runs.drive()).status == "interrupted"
    assert heard == []
    await settle(store, "r", "c1", made=False)
    assert (await runs.drive()).status == "completed"
    assert heard == ["r"]


async def test_people_settle_an_uncertain_call(store: RunStore) -> None:
    runs = runs_of(store, one_agent([LOOK], "done", tools=[look]))
    await runs.start()
    await begun(store)
    assert (await runs.drive()).status == "interrupted"
    runs.world = lambda: ["look door"]
    assert await runs.to_end() == "completed"
    assert ("function_call_output", "c1", "saw door") in brief(await runs.items())


async def test_a_tool_knows_that_it_is_called_again(store: RunStore) -> None:
    known: list[bool] = []

    @function_tool(on_uncertain="retry")
    async def look(ctx: ToolContext, what: str) -> str:
        known.append(ctx.is_repeat)
        return f"saw {what}"

    runs = runs_of(store, one_agent([LOOK], "done", tools=[look]))
    for run_id, is_repeat in (("first", False), ("r", True)):
        await runs.start(run_id=run_id)
        if is_repeat:
            await begun(store)
        assert (await runs.drive(run_id)).status == "completed"
    assert known == [False, True]


async def test_a_reply_to_another_input_is_discarded_and_reported(store: RunStore) -> None:
    started = asyncio.Event()
    asked: list[Any] = []

    @function_tool
    async def look(what: str) -> str:
        if not started.is_set():
            started.set()
            await asyncio.sleep(3600)
        return f"saw {what}"

    agent = one_agent(tools=[look])
    agent.model = StatelessModel([[LOOK], "done"], on_call=asked.append)
    runs = runs_of(store, agent, on_uncertain="retry")
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
