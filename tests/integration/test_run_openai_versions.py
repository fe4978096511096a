"""Snapshots of every schema version that the installed SDK reads, as its releases wrote them.

A new SDK with a new version fails the first test: see `tests/fixtures/openai_runstate/write.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, HostedMCPTool, ShellTool, function_tool
from agents.run_state import SUPPORTED_SCHEMA_VERSIONS

from capsule_tasks.errors import UnreadableSchema
from capsule_tasks.openai_agents import OpenAIEngine
from capsule_tasks.runs.parking import OPENAI_SCHEMA, parked_openai
from capsule_tasks.storage import RunStore
from tests.agents_script import ScriptedModel, says
from tests.integration.durable_agents import Runs

FOLDER = Path(__file__).parent.parent / "fixtures/openai_runstate"
VERSIONS = [each.removeprefix(OPENAI_SCHEMA) for each in OpenAIEngine.readable[1:]]
NEWER = "1.999"


class Office:
    """The agents of the fixtures, and what they did."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.model = ScriptedModel(says("all done"))

        @function_tool(needs_approval=True)
        async def look(what: str) -> str:
            self.done.append(f"look {what}")
            return f"saw {what}"

        @function_tool(needs_approval=True)
        async def pay(euros: int) -> str:
            self.done.append(f"pay {euros}")
            return f"paid {euros}"

        async def execute(request: Any) -> str:
            self.done.append(" ".join(request.data.action.commands))
            return "ran"

        shop = HostedMCPTool(
            tool_config={
                "type": "mcp",
                "server_label": "shop",
                "server_url": "https://shop.example",
                "require_approval": "always",
            }
        )
        desk = Agent(
            name="desk",
            model=self.model,
            tools=[pay, ShellTool(executor=execute, needs_approval=True), shop],
        )
        front = Agent(name="front", model=ScriptedModel(), tools=[look], handoffs=[desk])
        self.engine = OpenAIEngine(front)


def fixture_of(version: str) -> tuple[bytes, list[Any]]:
    """A snapshot of this version, and the session of its run."""
    data = json.loads((FOLDER / f"{version}.json").read_text())
    return data["snapshot"].encode(), data["session"]


async def parked_run(store: RunStore, version: str) -> tuple[Runs, Office]:
    snapshot, session = fixture_of(version)
    office = Office()
    runs = Runs(store, office.engine)
    parts = parked_openai(snapshot)
    assert parts.schema == f"{OPENAI_SCHEMA}{version}"
    await store.create("r", "r", parts.snapshot, **parts.header)
    await runs.history("r").add_items(session)
    return runs, office


def test_each_version_that_the_sdk_reads_has_a_snapshot() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == SUPPORTED_SCHEMA_VERSIONS
    for version in VERSIONS:
        assert json.loads(fixture_of(version)[0])["$schemaVersion"] == version


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_snapshot_of_each_version_comes_back_byte_for_byte(
    store: RunStore, version: str
) -> None:
    runs, _ = await parked_run(store, version)
    snapshot, _ = fixture_of(version)
    assert await runs.approve_all() == [
        'bare:pay {"euros": 5}',
        'shell:shell {"commands": ["ls"]}',
        'hosted_mcp:shop/buy {"what": "door"}',
    ]
    claim = await store.claim("r", "w1", readable=OpenAIEngine.readable)
    assert claim.snapshot == snapshot
    # Another worker parks it again, and it is the same.
    header = parked_openai(claim.snapshot).header
    await store.commit(claim, claim.snapshot, turn=1, status="interrupted", **header)
    claim = await store.claim("r", "w1", readable=OpenAIEngine.readable)
    assert claim.snapshot == snapshot


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_run_of_each_version_goes_on(store: RunStore, version: str) -> None:
    runs, office = await parked_run(store, version)
    await store.approvals.approve("r", "c_pay")
    await store.approvals.reject("r", "c_shell", message="no shell on Sundays")
    await store.approvals.approve("r", "mcpr_1")
    stop = await runs.drive()
    assert (stop.status, stop.result) == ("completed", b'"all done"')
    assert office.done == ["pay 5"]
    told = office.model.asked[-1]
    outputs = {each["call_id"]: each["output"] for each in told if "output" in each}
    assert outputs["c_look"] == "saw door"
    assert outputs["c_pay"] == "paid 5"
    assert "no shell on Sundays" in json.dumps(outputs["c_shell"])
    answers = [each for each in told if each.get("type") == "mcp_approval_response"]
    assert [(each["approval_request_id"], each["approve"]) for each in answers] == [
        ("mcpr_1", True)
    ]
    # The history is what the model was told, each item once, and its answer.
    items = await runs.items()
    assert [key_of(each) for each in items[:-1]] == [key_of(each) for each in told]


def key_of(item: dict[str, Any]) -> tuple[Any, ...]:
    kind = item.get("type") or item.get("role")
    return kind, item.get("call_id") or item.get("approval_request_id") or item.get("id")


async def test_a_newer_version_is_left_to_other_workers(store: RunStore) -> None:
    snapshot, _ = fixture_of(VERSIONS[-1])
    label = f'"$schemaVersion": "{VERSIONS[-1]}"'.encode()
    assert label in snapshot
    newer = snapshot.replace(label, f'"$schemaVersion": "{NEWER}"'.encode())
    parts = parked_openai(newer)
    await store.create("r", "r", parts.snapshot, **parts.header)
    runs = Runs(store, Office().engine)
    await runs.approve_all()
    before = await store.read("r")
    with pytest.raises(UnreadableSchema) as caught:
        await runs.drive()
    assert f"'{OPENAI_SCHEMA}{NEWER}'" in str(caught.value)
    assert ", ".join(OpenAIEngine.readable) in str(caught.value)
    assert await store.read("r") == before
    assert before.status == "queued"
