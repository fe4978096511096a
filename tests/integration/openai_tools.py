"""Agents of openai-agents with a tool of each kind, and the loop of the guide that drives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agents import (
    Agent,
    ApplyPatchTool,
    CustomTool,
    HostedMCPTool,
    Runner,
    RunState,
    ShellTool,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import (
    ResponseApplyPatchToolCall,
    ResponseCustomToolCall,
    ResponseFunctionShellToolCall,
)
from openai.types.responses.response_output_item import McpApprovalRequest

from capsule_tasks.runs.parking import parked_openai, resumed_openai
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.runs.types import Claim, Committed
from tests.agents_script import ScriptedModel

MOST_ROUNDS = 10
"""Rounds after which a loop that makes no progress is taken for endless."""


def shell_call(call_id: str, *commands: str) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "type": "shell_call",
            "id": f"id_{call_id}",
            "call_id": call_id,
            "status": "completed",
            "action": {"commands": list(commands)},
        }
    )


def patch_call(call_id: str, path: str) -> ResponseApplyPatchToolCall:
    return ResponseApplyPatchToolCall.model_validate(
        {
            "type": "apply_patch_call",
            "id": f"id_{call_id}",
            "call_id": call_id,
            "status": "completed",
            "operation": {"type": "delete_file", "path": path},
        }
    )


def custom_call(call_id: str, given: str) -> ResponseCustomToolCall:
    return ResponseCustomToolCall(
        type="custom_tool_call", name="query", call_id=call_id, input=given
    )


def mcp_request(call_id: str, server: str) -> McpApprovalRequest:
    return McpApprovalRequest(
        id=call_id, type="mcp_approval_request", name="pay", server_label=server, arguments="{}"
    )


class Editor:
    def __init__(self, done: list[Any]) -> None:
        self._done = done

    def create_file(self, operation: Any) -> None:
        raise NotImplementedError

    update_file = create_file

    def delete_file(self, operation: Any) -> None:
        self._done.append(("delete", operation.path))


def agent_of(model: ScriptedModel, done: list[Any], name: str = "triage") -> Agent[Any]:
    """An agent with a tool of each kind; `done` is what they did."""
    set_tracing_disabled(True)

    @function_tool(needs_approval=True)
    def pay(euros: int = 0) -> str:
        """Pay an amount."""
        done.append(("pay", euros))
        return f"paid {euros}"

    async def shell(request: Any) -> str:
        done.append(("shell", *request.data.action.commands))
        return "ran"

    async def query(_: Any, given: str) -> str:
        done.append(("query", given))
        return "found"

    servers = [
        HostedMCPTool(tool_config={"type": "mcp", "server_label": label, "server_url": "https://x",
                                   "require_approval": "always"})
        for label in ("shop", "bank")
    ]  # fmt: skip
    return Agent(
        name=name,
        model=model,
        tools=[
            pay,
            ShellTool(executor=shell, needs_approval=True),
            ApplyPatchTool(editor=Editor(done), needs_approval=True),
            CustomTool(
                name="query",
                description="Query.",
                on_invoke_tool=query,
                needs_approval=True,
                format={"type": "text"},
            ),
            *servers,
        ],
    )


class Worker:
    """The loop of the guide: claim, apply what was decided, go on, park."""

    def __init__(
        self,
        store: RunStore,
        make_agent: Callable[[], Agent[Any]],
        incarnation: str = "w1",
    ) -> None:
        self._store = store
        self._make_agent = make_agent
        self._incarnation = incarnation
        self.rounds = 0

    async def start(self) -> None:
        result = await Runner.run(self._make_agent(), "go")
        parts = parked_openai(result.to_state().to_string())
        await self._store.create("r", "user-42", parts.snapshot, **parts.header)

    async def go_on(self) -> str:
        """Work until the run waits for a person or is over; its status then."""
        while True:
            self.rounds += 1
            assert self.rounds < MOST_ROUNDS, "the run is woken and parked for ever"
            claim = await self._store.claim("r", self._incarnation)
            done = await self._turn(claim)
            if done.status != "queued":
                return done.status

    async def _turn(self, claim: Claim) -> Committed:
        agent = self._make_agent()
        state = await RunState.from_string(agent, claim.snapshot.decode())
        result = await Runner.run(agent, resumed_openai(claim, state))
        turn = claim.turn + 1
        if not result.interruptions:
            return await self._store.commit(claim, b"", turn=turn, status="completed")
        parts = parked_openai(result.to_state().to_string())
        return await self._store.commit(
            claim, parts.snapshot, turn=turn, status="interrupted", **parts.header
        )

    async def waiting(self) -> list[tuple[str, str]]:
        return [(each.call_id, each.tool) for each in (await self._store.read("r")).pending]


def outer_agent(model: ScriptedModel, *inner: Agent[Any]) -> Agent[Any]:
    tools = [agent.as_tool(f"ask_{agent.name}", "Ask.") for agent in inner]
    return Agent(name="outer", model=model, tools=tools)
