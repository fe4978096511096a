"""States of runs in the store and back: our own, and those of openai-agents byte for byte."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import redis
from agents import (
    Agent,
    Model,
    ModelResponse,
    Runner,
    RunState,
    Usage,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from capsule_tasks import runs
from capsule_tasks.errors import (
    InvalidRunState,
    InvalidSetting,
    StorageUnavailable,
    UnreadableSchema,
)
from capsule_tasks.runs import AgentId, PendingCall, ToolKey
from capsule_tasks.runs.parking import (
    OPENAI_SCHEMA,
    Limits,
    parked,
    parked_openai,
    readable_versions,
    resumed,
)
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.runs.approval_signals import listening, listening_blocking
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, PlannedCall, Signal

LIMIT_S = 60
ALICE, BOB = AgentId("alice"), AgentId("bob & co", "0f#1")


def call(call_id: str, tool: ToolKey, agent: AgentId = ALICE) -> PendingCall:
    return PendingCall(call_id=call_id, tool=tool, agent=agent, arguments='{"é": 1}')


def waiting_state() -> runs.RunState:
    inner = runs.RunState(run_id="r/c4", start_agent=BOB, agent=BOB)
    inner = inner.with_calls([call("c9", ToolKey.namespaced("crm", "find/it"), BOB)])
    state = runs.RunState(run_id="r", start_agent=ALICE, agent=ALICE, turn=2, stored_items=4)
    state = state.with_calls(
        [
            call("c1", ToolKey("pay")),
            call("c2", ToolKey.namespaced("bank", "pay")),
            call("c3", ToolKey.deferred("pay")),
            call("c4", ToolKey("ask_bob")),
        ]
    ).approve("c4")
    data = state.to_json()
    data["nested"] = {"c4": {k: v for k, v in inner.to_json().items() if k != "$schemaVersion"}}
    return runs.RunState.from_json(data)


async def test_a_state_is_read_with_the_decisions_made_meanwhile(store: RunStore) -> None:
    state = waiting_state()
    parts = parked(state, of_tool={"bare:pay": Limits(may_decide=("ann",))})
    await store.create("r", "user-42", parts.snapshot, **parts.header)
    assert len(parts.approval_requests) == 4
    await store.approvals.approve("r", "c1", by="ann")
    await store.approvals.reject("r", "c2", message="too much")
    await store.approvals.approve("r", "c9", always=True)
    claim = await store.claim("r", "w1", readable=readable_versions())
    back = resumed(claim)
    assert [each.call_id for each in back.unresolved()] == ["c3"]
    decision = back.decision_for(back.calls[0])
    assert decision is not None
    assert (decision.approved, decision.by) == (True, "ann")
    rejection = back.decision_for(back.calls[1])
    assert rejection is not None
    assert rejection.rejection == "too much"
    later = call("c10", ToolKey.namespaced("crm", "find/it"), BOB)
    assert back.nested["c4"].decision_for(later) is not None, "the standing decision is lost"
    again = parked(back)
    done = await store.commit(claim, again.snapshot, turn=2, status="interrupted", **again.header)
    assert done.status == "interrupted"
    waiting = (await store.read("r")).pending
    assert [(each.call_id, each.tool) for each in waiting] == [("c3", "deferred_top_level:pay")]


async def test_the_ledger_knows_calls_by_the_fingerprints_of_the_state(store: RunStore) -> None:
    state = waiting_state()
    parts = parked(state)
    await store.create("r", "user-42", parts.snapshot, **parts.header)
    await store.approvals.approve("r", "c1")
    claim = await store.claim("r", "w1")
    planned = PlannedCall("c1", resumed(claim).calls[0].fingerprint)
    assert (await store.start_calls(claim, [planned])).calls[0].state == "go"


def test_two_waiting_calls_of_one_id_cannot_be_parked() -> None:
    state = waiting_state()
    data = state.to_json()
    data["nested"]["c4"]["calls"][0]["call_id"] = "c1"
    with pytest.raises(InvalidRunState, match="have one id"):
        parked(runs.RunState.from_json(data))


@pytest.mark.parametrize("name", ["refund", "tool:refund", ToolKey("refund")])
def test_limits_of_a_tool_that_would_limit_nothing_are_refused(name: Any) -> None:
    state = runs.RunState(run_id="r", start_agent=ALICE, agent=ALICE)
    state = state.with_calls([call("c1", ToolKey("refund"))])
    ops = Limits(may_decide=("ops",))
    with pytest.raises(InvalidSetting, match="bare:refund"):
        parked(state, of_tool={name: ops})
    assert parked(state, of_tool={"bare:refund": ops}).approval_requests[0].may_decide == ("ops",)


def test_states_need_neither_redis_nor_asyncio() -> None:
    source = (
        "import sys, capsule_tasks.runs; found = {'redis', 'asyncio', 'celery'} & set(sys.modules);"
        "sys.exit(f'loaded: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# --- signals -------------------------------------------------------------------------------------


async def test_a_signal_that_only_a_newer_release_knows_ends_no_listening(
    store: RunStore, valkey_url: str, prefix: str
) -> None:
    newer = msgspec.msgpack.encode({"event": "withdrawn", "run": "r", "call": "c1"})
    async with asyncio.timeout(LIMIT_S), listening(valkey_url, prefix=prefix) as signals:
        with redis.Redis.from_url(valkey_url) as client:
            for odd in (newer, b"\xc1", b"text"):
                assert client.publish(f"{prefix}:approvals", odd) == 1
        await store.create("r", "s", b"{}", schema="1", agent="a", approval_requests=[
            ApprovalRequest(call_id="c2", tool="t", agent="a", fingerprint="f")
        ])  # fmt: skip
        assert await anext(signals) == Signal("requested", "r", "c2")


async def test_listeners_are_notified_of_requests_and_decisions(
    store: RunStore, valkey_url: str, prefix: str
) -> None:
    async with asyncio.timeout(LIMIT_S), listening(valkey_url, prefix=prefix) as signals:
        parts = parked(runs.RunState(run_id="r", start_agent=ALICE, agent=ALICE).with_calls(
            [call("c1", ToolKey("pay")), call("c2", ToolKey("pay"))]
        ), limits=Limits(expires_in_s=0.01))  # fmt: skip
        await store.create("r", "user-42", parts.snapshot, **parts.header)
        heard = [await anext(signals) for _ in range(2)]
        assert heard == [Signal("requested", "r", "c1"), Signal("requested", "r", "c2")]
        assert len((await store.read("r")).pending) == 2, "the signal came before what it tells of"
        while not (await store.approvals.expire_due()).expired:
            await asyncio.sleep(0.005)
        heard = [await anext(signals) for _ in range(2)]
        assert heard == [Signal("decided", "r", each, "expiry") for each in ("c1", "c2")]


async def test_listeners_take_the_urls_that_stores_take(valkey_url: str, prefix: str) -> None:
    """With this option, which stores leave aside, the first signal ended the listening."""
    url = f"{valkey_url}?decode_responses=true"
    approval_requests = [ApprovalRequest(call_id="c", tool="bare:t", agent="a", fingerprint="f")]
    async with (
        asyncio.timeout(LIMIT_S),
        RunStore(url, settings=RunSettings(prefix=prefix)) as runs,
        listening(url, prefix=prefix) as signals,
    ):
        with listening_blocking(url, prefix=prefix) as blocking:
            await runs.create(
                "r", "s", b"", schema="1", agent="a", approval_requests=approval_requests
            )
            assert await anext(signals) == next(blocking) == Signal("requested", "r", "c")


async def test_listening_without_awaiting(store: RunStore, valkey_url: str, prefix: str) -> None:
    state = runs.RunState(run_id="r", start_agent=ALICE, agent=ALICE)
    parts = parked(state.with_calls([call("c1", ToolKey("pay"))]))
    with listening_blocking(valkey_url, prefix=prefix) as signals:
        await store.create("r", "user-42", parts.snapshot, **parts.header)
        await store.approvals.approve("r", "c1", by="ann")
        heard = [await asyncio.to_thread(next, signals) for _ in range(2)]
    assert heard == [Signal("requested", "r", "c1"), Signal("decided", "r", "c1", "ann")]


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_a_cluster_tells_of_runs_on_all_of_its_nodes(
    cluster_url: str, prefix: str, face: str
) -> None:
    state = runs.RunState(run_id="r", start_agent=ALICE, agent=ALICE)
    parts = parked(state.with_calls([call("c1", ToolKey("pay"))]))
    settings = RunSettings(prefix=prefix)
    names = [f"run-{number}" for number in range(6)]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(RunStore(cluster_url, settings=settings))
        if face == "async":
            signals = await stack.enter_async_context(listening(cluster_url, prefix=prefix))
        else:
            blocking = stack.enter_context(listening_blocking(cluster_url, prefix=prefix))
        for name in names:
            await store.create(name, f"session-{name}", parts.snapshot, **parts.header)
        async with asyncio.timeout(LIMIT_S):
            if face == "async":
                heard = [await anext(signals) for _ in names]
            else:
                heard = [await asyncio.to_thread(next, blocking) for _ in names]
    assert {each.run for each in heard} == set(names)


async def test_a_lost_connection_is_an_error_and_not_repaired_silently(
    valkey_url: str, prefix: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        async with asyncio.timeout(LIMIT_S), listening(valkey_url, prefix=prefix) as signals:
            assert client.client_kill_filter(_type="pubsub") == 1
            with pytest.raises(StorageUnavailable):
                await anext(signals)
        with listening_blocking(valkey_url, prefix=prefix) as blocking:
            assert client.client_kill_filter(_type="pubsub") == 1
            with pytest.raises(StorageUnavailable):
                await asyncio.to_thread(next, blocking)


# --- openai-agents -------------------------------------------------------------------------------


class Scripted(Model):
    """Asks for two calls of a tool, and after that repeats what it was given."""

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        given = kwargs.get("input", args[1] if len(args) > 1 else [])
        outputs = [each["output"] for each in given if each.get("type") == "function_call_output"]
        content: list[Any] = [
            ResponseFunctionToolCall(
                type="function_call", name="pay", call_id=f"call_{n}", arguments=f'{{"euros":{n}}}'
            )
            for n in (1, 2)
        ]
        if outputs:
            text = ResponseOutputText(
                type="output_text", text=" and ".join(map(str, outputs)), annotations=[]
            )
            content = [
                ResponseOutputMessage(
                    id="m", type="message", role="assistant", status="completed", content=[text]
                )
            ]
        return ModelResponse(output=content, usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def openai_agent(paid: list[int]) -> Agent[Any]:
    @function_tool(needs_approval=True)
    def pay(euros: int) -> str:
        """Pay an amount."""
        paid.append(euros)
        return f"paid {euros}"

    set_tracing_disabled(True)
    return Agent(name="triage", tools=[pay], model=Scripted())


async def test_a_run_of_openai_agents_is_parked_decided_and_resumed_byte_for_byte(
    store: RunStore,
) -> None:
    paid: list[int] = []
    result = await Runner.run(openai_agent(paid), "pay twice")
    assert len(result.interruptions) == 2
    snapshot = result.to_state().to_string().encode()
    parts = parked_openai(snapshot, limits=Limits(may_decide=("ann",)))
    assert parts.snapshot is snapshot
    await store.create("r", "user-42", parts.snapshot, **parts.header)
    listed = (await store.approvals.pending(tool="bare:pay", agent="triage")).calls
    assert [(each.call_id, each.arguments) for each in listed] == [
        ("call_1", '{"euros":1}'),
        ("call_2", '{"euros":2}'),
    ]
    await store.approvals.approve("r", "call_1", by="ann")
    await store.approvals.reject("r", "call_2", message="one is enough", by="ann")
    claim = await store.claim("r", "w1")
    assert claim.snapshot == snapshot

    agent = openai_agent(paid)
    state = await RunState.from_string(agent, claim.snapshot.decode())
    for item in state.get_interruptions():
        (decision,) = (each for each in claim.decisions.exact if each.call == item.call_id)
        if decision.approved:
            state.approve(item)
        else:
            state.reject(item, rejection_message=decision.message)
    planned = [PlannedCall(ask.call_id, ask.fingerprint) for ask in parts.approval_requests[:1]]
    assert (await store.start_calls(claim, planned)).calls[0].state == "go"
    final = await Runner.run(agent, state)
    assert paid == [1]
    assert final.final_output == "paid 1 and one is enough"
    done = await store.commit(claim, b"", turn=2, status="completed")
    assert done.status == "completed"


async def test_our_workers_leave_snapshots_of_openai_agents_alone(store: RunStore) -> None:
    result = await Runner.run(openai_agent([]), "pay twice")
    parts = parked_openai(result.to_state().to_string())
    assert parts.schema.startswith(OPENAI_SCHEMA)
    await store.create("r", "user-42", parts.snapshot, schema=parts.schema, agent=parts.agent)
    with pytest.raises(UnreadableSchema):
        await store.claim("r", "w1", readable=readable_versions())
    assert (await store.read("r")).status == "queued"
    assert (await store.claim("r", "w1", readable=[parts.schema])).snapshot == parts.snapshot


@pytest.mark.parametrize(
    "snapshot",
    [b"", b"[]", b"{}", b"\xff", b'{"$schemaVersion": 1, "current_agent": {"name": "a"}}',
     json.dumps({"$schemaVersion": "1.21", "current_agent": {"name": "sk-secret"},
                 "current_step": {"data": {"interruptions": [{"raw_item": "sk-secret"}]}}})],
)  # fmt: skip
def test_an_invalid_snapshot_of_openai_agents_is_refused_without_showing_its_values(
    snapshot: str | bytes,
) -> None:
    with pytest.raises(InvalidRunState, match="openai-agents") as caught:
        parked_openai(snapshot)
    assert "sk-secret" not in str(caught.value)
