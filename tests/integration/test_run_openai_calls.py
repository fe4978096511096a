"""Decisions on calls of openai-agents: people see what will run, and decide about nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner, RunState
from openai.types.responses import ResponseCustomToolCall

from capsule_tasks import runs
from capsule_tasks.errors import CallChanged, InvalidRunState
from capsule_tasks.runs import AgentId, PendingCall, ToolKey
from capsule_tasks.runs.parking import (
    Parked,
    parked,
    parked_openai,
    readable_versions,
    resumed,
    resumed_openai,
)
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, PlannedCall
from tests.agents_script import ScriptedModel, calls, says
from tests.integration.openai_tools import (
    Worker,
    agent_of,
    custom_call,
    mcp_request,
    outer_agent,
    patch_call,
    shell_call,
)

WORKER = Path(__file__).with_name("openai_worker.py")


async def asked(*first_turn: Any) -> Parked:
    """A run that waits after its first turn, as it is stored."""
    result = await Runner.run(agent_of(ScriptedModel(list(first_turn)), []), "go")
    return parked_openai(result.to_state().to_string())


def worker_with(store: RunStore, done: list[Any], *turns: Any) -> Worker:
    model = ScriptedModel(*turns)
    return Worker(store, lambda: agent_of(model, done))


# --- what people see -----------------------------------------------------------------------------


async def test_people_see_the_effects_of_shells_patches_and_custom_tools(store: RunStore) -> None:
    done: list[Any] = []
    first = [
        calls("pay", '{"euros":1}', "c_pay"),
        shell_call("c_shell", "rm -rf /data", "echo é"),
        patch_call("c_patch", "notes.txt"),
        custom_call("c_custom", "DROP TABLE orders"),
    ]
    worker = worker_with(store, done, first, says("done"))
    await worker.start()
    listed = {each.call_id: each for each in (await store.approvals.pending()).calls}
    assert {call_id: (each.tool, each.arguments) for call_id, each in listed.items()} == {
        "c_pay": ("bare:pay", '{"euros":1}'),
        "c_shell": ("shell:shell", '{"commands": ["rm -rf /data", "echo é"]}'),
        "c_patch": ("apply_patch:apply_patch", '{"path": "notes.txt", "type": "delete_file"}'),
        "c_custom": ("custom:query", "DROP TABLE orders"),
    }
    for call_id in listed:
        await store.approvals.approve("r", call_id)
    assert await worker.go_on() == "completed"
    assert sorted(done) == [
        ("delete", "notes.txt"),
        ("pay", 1),
        ("query", "DROP TABLE orders"),
        ("shell", "rm -rf /data", "echo é"),
    ]


async def test_people_see_a_patch_that_the_model_sends_as_a_custom_call(store: RunStore) -> None:
    """The SDK makes a patch of it, so its decision is one on patches."""
    done: list[Any] = []
    patch = {"operations": [{"type": "delete_file", "path": path} for path in ("a", "b")]}
    sent = ResponseCustomToolCall(
        type="custom_tool_call", name="apply_patch", call_id="c1", input=json.dumps(patch)
    )
    worker = worker_with(store, done, [sent], says("done"))
    await worker.start()
    (ask,) = (await store.approvals.pending()).calls
    assert ask.tool == "apply_patch:apply_patch"
    assert json.loads(ask.arguments) == patch["operations"]
    await store.approvals.approve("r", "c1")
    assert await worker.go_on() == "completed"
    assert done == [("delete", "a"), ("delete", "b")]


@pytest.mark.parametrize("make", [shell_call, patch_call, custom_call])
async def test_another_call_under_an_approved_id_is_never_started(
    store: RunStore, make: Callable[[str, str], Any]
) -> None:
    """`rm -rf /data` had the fingerprint of `ls`."""
    harmless, harmful = (await asked(make("c1", "ls"))), (await asked(make("c1", "rm -rf /data")))
    await store.create("r", "user-42", harmless.snapshot, **harmless.header)
    await store.approvals.approve("r", "c1")
    claim = await store.claim("r", "w1")
    with pytest.raises(CallChanged):
        await store.start_calls(
            claim, [PlannedCall("c1", harmful.approval_requests[0].fingerprint)]
        )
    planned = PlannedCall("c1", harmless.approval_requests[0].fingerprint)
    assert (await store.start_calls(claim, [planned])).calls[0].state == "go"


async def test_an_approval_that_was_given_blind_counts_for_nothing(store: RunStore) -> None:
    """As an earlier build stored the ask: with neither the kind of tool nor what it would do."""
    parts = await asked(shell_call("c1", "rm -rf /data"))
    blind = ApprovalRequest(
        call_id="c1", tool="bare:shell", agent="triage", fingerprint="f", arguments="null"
    )
    header = {**parts.header, "approval_requests": [blind]}
    await store.create("r", "user-42", parts.snapshot, **header)
    await store.approvals.approve("r", "c1")
    claim = await store.claim("r", "w1")
    agent = agent_of(ScriptedModel(), [])
    state = await RunState.from_string(agent, claim.snapshot.decode())
    with pytest.raises(CallChanged, match="bare:shell of agent triage"):
        resumed_openai(claim, state)


async def test_calls_of_functions_keep_the_fingerprint_that_stores_hold() -> None:
    """As the first release of this code wrote it."""
    parts = await asked(calls("pay", '{"euros":1}', "c1"))
    assert parts.approval_requests[0].fingerprint == "fe6404673f0e2a39bf9e6091636f0d45"


WAITING_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "function_call": ("arguments", {"name": "pay"}),
    "custom_tool_call": ("input", {"name": "query"}),
    "shell_call": ("action", {}),
    "local_shell_call": ("action", {}),
    "apply_patch_call": ("operation", {}),
    "computer_call": ("action", {}),
    "mcp_approval_request": ("arguments", {"name": "pay", "server_label": "shop"}),
}


def snapshot_with(raw: dict[str, Any], **item: Any) -> str:
    waiting = {"type": "tool_approval_item", "raw_item": raw, "tool_name": "the_tool", **item}
    return json.dumps(
        {
            "$schemaVersion": "1.21",
            "current_agent": {"name": "triage"},
            "current_step": {"data": {"interruptions": [waiting]}},
        }
    )


@pytest.mark.parametrize("kind", WAITING_CALLS)
def test_a_call_without_a_description_is_not_parked(kind: str) -> None:
    field, rest = WAITING_CALLS[kind]
    raw = {"type": kind, "id": "call_7", "call_id": "call_7", **rest}
    other = "input" if field != "input" else "arguments"
    for broken in (raw, {**raw, field: None}, {**raw, other: "of another kind of call"}):
        with pytest.raises(InvalidRunState) as caught:
            parked_openai(snapshot_with(broken))
        for part in ("'call_7'", "'the_tool'", f"`{field}`"):
            assert part in str(caught.value)


@pytest.mark.parametrize("kind", WAITING_CALLS)
def test_nothing_and_an_empty_object_are_arguments(kind: str) -> None:
    field, rest = WAITING_CALLS[kind]
    raw = {"type": kind, "id": "call_7", "call_id": "call_7", **rest}
    shown = [
        parked_openai(snapshot_with({**raw, field: given})).approval_requests[0].arguments
        for given in ("", {}, "{}")
    ]
    assert shown == ["", "{}", "{}"]


def test_a_call_of_an_unknown_type_is_not_parked() -> None:
    """Its identity could be that of a function tool, and what it does is unknown."""
    with pytest.raises(
        InvalidRunState, match=r"call 'c1' of tool 'the_tool' is of type 'new_call'"
    ):
        parked_openai(snapshot_with({"type": "new_call", "call_id": "c1", "arguments": "{}"}))


# --- which tool is meant -------------------------------------------------------------------------


async def test_always_for_one_server_covers_no_other_and_no_function(store: RunStore) -> None:
    done: list[Any] = []
    second = [mcp_request("m2", "shop"), mcp_request("m3", "bank"), calls("pay", "{}", "c4")]
    worker = worker_with(store, done, [mcp_request("m1", "shop")], second, says("done"))
    await worker.start()
    assert await worker.waiting() == [("m1", "hosted_mcp:shop/pay")]
    await store.approvals.approve("r", "m1", always=True)
    assert await worker.go_on() == "interrupted"
    assert set(await worker.waiting()) == {("m3", "hosted_mcp:bank/pay"), ("c4", "bare:pay")}
    assert done == []
    await store.approvals.reject("r", "m3")
    await store.approvals.approve("r", "c4")
    assert await worker.go_on() == "completed"
    assert done == [("pay", 0)]


async def test_always_for_a_function_covers_no_server(store: RunStore) -> None:
    done: list[Any] = []
    second = [mcp_request("m2", "shop"), calls("pay", '{"euros":2}', "c3")]
    worker = worker_with(store, done, [calls("pay", "{}", "c1")], second)
    await worker.start()
    await store.approvals.approve("r", "c1", always=True)
    assert await worker.go_on() == "interrupted"
    assert await worker.waiting() == [("m2", "hosted_mcp:shop/pay")]
    assert done == [("pay", 0), ("pay", 2)]


async def test_always_for_a_function_named_shell_is_not_for_the_shell(store: RunStore) -> None:
    function = parked_openai(
        snapshot_with({"type": "function_call", "call_id": "c1", "arguments": "{}"},
                      tool_name="shell")
    )  # fmt: skip
    await store.create("r", "user-42", function.snapshot, **function.header)
    await store.approvals.approve("r", "c1", always=True)
    shell = await asked(shell_call("c2", "rm -rf /data"))
    claim = await store.claim("r", "w1")
    done = await store.commit(claim, shell.snapshot, turn=1, status="interrupted", **shell.header)
    assert done.status == "interrupted"


def test_a_hosted_call_that_carries_its_request_is_of_its_server() -> None:
    request = {"type": "mcp_approval_request", "id": "m1", "server_label": "shop",
               "arguments": '{"euros":1}'}  # fmt: skip
    raw = {"type": "hosted_tool_call", "name": "pay", "call_id": "c1", "provider_data": request}
    (ask,) = parked_openai(snapshot_with(raw, tool_name=None)).approval_requests
    assert (ask.call_id, ask.tool, ask.arguments) == ("m1", "hosted_mcp:shop/pay", '{"euros":1}')


def test_a_request_without_its_server_is_not_parked() -> None:
    raw = {"type": "mcp_approval_request", "id": "m1", "name": "pay", "arguments": "{}"}
    with pytest.raises(InvalidRunState, match="`server_label`"):
        parked_openai(snapshot_with(raw))


async def test_standing_decisions_come_back_for_tools_of_every_kind(store: RunStore) -> None:
    """A store has only the text of a tool's key."""
    keys = [
        ToolKey("pay"),
        ToolKey.namespaced("c/rm", "pay"),
        ToolKey.deferred("pay"),
        ToolKey.hosted_mcp("s/hop", "p:ay"),
        ToolKey("pay", "custom"),
        ToolKey("shell", "shell"),
    ]
    agent = AgentId("triage")
    waiting = [
        PendingCall(call_id=f"c{n}", tool=key, agent=agent, arguments="{}")
        for n, key in enumerate(keys)
    ]
    state = runs.RunState(run_id="r", start_agent=agent, agent=agent).with_calls(waiting)
    parts = parked(state)
    await store.create("r", "user-42", parts.snapshot, **parts.header)
    for call in waiting:
        await store.approvals.approve("r", call.call_id, always=True)
    back = resumed(await store.claim("r", "w1", readable=readable_versions()))
    assert [decision.tool for decision in back.approvals.standing] == keys
    assert runs.RunState.from_string(back.to_string()) == back


# --- decisions that stand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda call_id: calls("pay", '{"euros":1}', call_id),
        lambda call_id: shell_call(call_id, "ls"),
        lambda call_id: custom_call(call_id, "SELECT 1"),
        lambda call_id: mcp_request(call_id, "shop"),
    ],
    ids=["function", "shell", "custom", "mcp"],
)
async def test_a_run_with_a_standing_approval_goes_on_to_its_end(
    store: RunStore, call: Callable[[str], Any]
) -> None:
    """Only the first call has a decision of its own; the loop parked the others for ever."""
    done: list[Any] = []
    turns = [[call("c1")], [call("c2")], [call("c3"), call("c4")], says("done")]
    worker = worker_with(store, done, *turns)
    await worker.start()
    await store.approvals.approve("r", "c1", always=True)
    assert await worker.go_on() == "completed"
    assert (await store.read("r")).status == "completed"


async def test_a_standing_rejection_tells_the_model_why(store: RunStore) -> None:
    done: list[Any] = []
    model = ScriptedModel([shell_call("c1", "ls")], [shell_call("c2", "ls")], says("done"))
    worker = Worker(store, lambda: agent_of(model, done))
    await worker.start()
    await store.approvals.reject("r", "c1", always=True, message="no shell on Sundays")
    assert await worker.go_on() == "completed"
    assert done == []
    assert str(model.asked[-1]).count("no shell on Sundays") == 2


async def test_an_exact_decision_beats_a_standing_one_in_the_sdk_too(store: RunStore) -> None:
    done: list[Any] = []
    first = [calls("pay", f'{{"euros":{n}}}', f"c{n}") for n in (1, 2, 3)]
    worker = worker_with(store, done, first, says("done"))
    await worker.start()
    await store.approvals.reject("r", "c1", message="not this one")
    await store.approvals.approve("r", "c2", always=True)
    assert await worker.go_on() == "completed"
    assert done == [("pay", 2), ("pay", 3)]


async def test_a_standing_approval_of_one_agent_is_not_for_another(store: RunStore) -> None:
    """The SDK's own "always" for a shell would count for every agent of the run."""
    done: list[Any] = []
    model = ScriptedModel(
        [shell_call("c1", "ls")],
        calls("transfer_to_clerk", "{}", "c2"),
        [shell_call("c3", "rm -rf /data")],
    )

    def make() -> Agent[Any]:
        first = agent_of(model, done)
        first.handoffs = [agent_of(model, done, "clerk")]
        return first

    worker = Worker(store, make)
    await worker.start()
    await store.approvals.approve("r", "c1", always=True)
    assert await worker.go_on() == "interrupted"
    assert await worker.waiting() == [("c3", "shell:shell")]
    assert done == [("shell", "ls")]


async def test_a_state_of_another_snapshot_is_refused(store: RunStore) -> None:
    parts, other = await asked(shell_call("c1", "ls")), await asked(shell_call("c2", "ls"))
    await store.create("r", "user-42", parts.snapshot, **parts.header)
    await store.approvals.approve("r", "c1")
    claim = await store.claim("r", "w1")
    agent = agent_of(ScriptedModel(), [])
    state = await RunState.from_string(agent, other.snapshot.decode())
    with pytest.raises(InvalidRunState, match=r"make it from claim\.snapshot"):
        resumed_openai(claim, state)


# --- agents used as tools ------------------------------------------------------------------------


async def test_calls_of_agents_used_as_tools_are_decided_through_their_parent(
    store: RunStore,
) -> None:
    done: list[Any] = []
    outer = ScriptedModel(
        [calls(f"ask_{name}", '{"input":"x"}', f"c_{name}") for name in "ab"], says("done")
    )
    models = {
        name: ScriptedModel([shell_call(f"c_in_{name}", f"ls {name}")], says(name)) for name in "ab"
    }
    worker = Worker(
        store, lambda: outer_agent(outer, *(agent_of(models[n], done, n) for n in models))
    )
    await worker.start()
    assert [call_id for call_id, _ in await worker.waiting()] == ["c_in_a", "c_in_b"]
    await store.approvals.approve("r", "c_in_a", always=True)
    assert await worker.go_on() == "interrupted"
    await store.approvals.reject("r", "c_in_b")
    assert await worker.go_on() == "completed"
    assert done == [("shell", "ls a")]


async def test_another_process_goes_on_with_agents_used_as_tools(
    store: RunStore, valkey_url: str, prefix: str
) -> None:
    """Only the store is between the two; `store` has the lease of the one that parked the run."""
    outer = ScriptedModel([calls(f"ask_{name}", '{"input":"x"}', f"c_{name}") for name in "ab"])
    models = {"a": [shell_call("c_in_a", "ls a")], "b": [calls("pay", '{"euros":7}', "c_in_b")]}
    inner = [agent_of(ScriptedModel(turn), [], name) for name, turn in models.items()]
    await Worker(store, lambda: outer_agent(outer, *inner)).start()
    await store.approvals.reject("r", "c_in_a", always=True)
    await store.approvals.approve("r", "c_in_b", always=True)
    command = (sys.executable, str(WORKER), valkey_url, prefix)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert json.loads(output) == {"status": "completed", "done": [["pay", 7]]}


async def test_two_agents_used_as_tools_with_one_call_id_are_refused_with_the_reason() -> None:
    inner = [agent_of(ScriptedModel([shell_call("c_in", "ls")]), [], name) for name in "ab"]
    outer = ScriptedModel([calls(f"ask_{name}", '{"input":"x"}', f"c_{name}") for name in "ab"])
    result = await Runner.run(outer_agent(outer, *inner), "go")
    with pytest.raises(InvalidRunState) as caught:
        parked_openai(result.to_state().to_string())
    for part in ("'c_in'", "shell:shell of agent a", "of agent b", "by its id alone", "unique"):
        assert part in str(caught.value)


async def test_a_decision_on_another_agents_call_of_one_id_wakes_no_run_for_ever(
    store: RunStore,
) -> None:
    """The store took it for decided, the state did not, and the run went round and round."""

    def waiting_for(agent: str) -> Parked:
        call = PendingCall(call_id="c1", tool=ToolKey("pay"), agent=AgentId(agent), arguments="{}")
        state = runs.RunState(run_id="r", start_agent=AgentId("x"), agent=AgentId("x"))
        return parked(state.with_calls([call]))

    first, second = waiting_for("alice"), waiting_for("bob")
    await store.create("r", "user-42", first.snapshot, **first.header)
    await store.approvals.approve("r", "c1")
    claim = await store.claim("r", "w1", readable=readable_versions())
    done = await store.commit(claim, second.snapshot, turn=1, status="interrupted", **second.header)
    assert done.status == "queued"
    with pytest.raises(CallChanged, match="agent alice"):
        resumed(await store.claim("r", "w1", readable=readable_versions()))
