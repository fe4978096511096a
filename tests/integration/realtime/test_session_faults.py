"""Faults at every await of a session, over real sockets: no error and no cancel leaves anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import pytest

from capsule_tasks import (
    Agent,
    Handoff,
    RunContext,
    ToolVerdict,
    Verdict,
    function_tool,
    input_guardrail,
    output_guardrail,
    tool_input_guardrail,
    tool_output_guardrail,
)
from capsule_tasks.realtime import (
    RealtimeConfig,
    RealtimeHistoryAdded,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
    RealtimeToolApprovalRequired,
)
from capsule_tasks.realtime.model import ModelEvent, ToolCalled
from capsule_tasks.realtime.openai import connection
from capsule_tasks.testing.models import ScriptedModel, calls, hands_over
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.cancelling import CancelAt, cancelling

OUTPUT = "function_call_output"
SCRIPT = [
    [calls("look", call_id="c1"), calls("ask", {"input": "Who?"}, "c2"), hands_over("Billing")],
    *["I am Billing."] * 6,
]
OUTPUTS = 3
MOST_AWAITS = 1_000
SETTINGS = {
    "api_key",
    "instructions of Billing",
    "instructions of Expert",
    "instructions of Support",
    "is_enabled of a handoff",
    "is_enabled of a tool",
}
CALLBACKS = {
    "input guardrail",
    "needs_approval",
    "on_handoff",
    "output guardrail",
    "refusing input guardrail",
    "tool",
    "tool input guardrail",
    "tool output guardrail",
}
HISTORY = {"get_items", "add_items", "add_items done"}
SOCKET = {"connect", "recv", "send", "close", "close done"}


class Fault(Exception):
    """The injected error."""


class Awaits:
    """Counts what a session awaits of its surroundings, and lets one await fail or be cancelled."""

    def __init__(self, at: int | None = None, kind: Literal["error", "cancel"] = "error") -> None:
        self.places: list[str] = []
        self._at = at
        self._kind = kind

    async def __call__(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) == self._at:
            if self._kind == "error":
                raise Fault(place)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(0)

    @property
    def has_struck(self) -> bool:
        return self._at is not None and len(self.places) >= self._at

    def returns(self, place: str, result: Any) -> Callable[..., Awaitable[Any]]:
        """A callback that takes anything. Of several results, each is returned once, in order."""
        results = iter(result) if isinstance(result, list) else repeat(result)

        async def callback(*_: Any) -> Any:
            await self(place)
            return next(results)

        return callback


class CountedHistory:
    """A history in memory, which knows a repeated write by its operation."""

    def __init__(self, awaits: Awaits) -> None:
        self.items: list[dict[str, Any]] = [{"role": "user", "content": "I was here before."}]
        self._known: set[str] = set()
        self._awaits = awaits

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        await self._awaits("get_items")
        return self.items[:] if limit is None else self.items[-limit:]

    async def add_items(self, items: list[dict[str, Any]], *, operation_id: str) -> None:
        await self._awaits("add_items")
        if operation_id not in self._known:
            self._known.add(operation_id)
            self.items += items
        await self._awaits("add_items done")


class Conversation:
    """A session in which all callbacks wait: opened, tools called, handed over, updated, closed."""

    def __init__(self, server: RealtimeServer, awaits: Awaits) -> None:
        self.server = server
        self.history = CountedHistory(awaits)
        self.runs = 0
        """How often the tool has run."""
        self.called: list[str] = []
        """The calls that the session was told of."""
        returns = awaits.returns

        @function_tool(
            needs_approval=returns("needs_approval", True),
            is_enabled=returns("is_enabled of a tool", True),
            input_guardrails=[
                tool_input_guardrail(name="in", before_approval=True)(
                    returns("tool input guardrail", ToolVerdict())
                )
            ],
            output_guardrails=[
                tool_output_guardrail(name="out")(returns("tool output guardrail", ToolVerdict()))
            ],
        )
        async def look() -> str:
            await awaits("tool")
            self.runs += 1
            return "seen"

        async def on_handoff(context: RunContext) -> None:
            await awaits("on_handoff")

        def agent(name: str, **options: Any) -> Agent:
            async def instructions(context: RunContext, agent: Agent) -> str:
                await awaits(f"instructions of {name}")
                return name

            return Agent(name=name, instructions=instructions, **options)

        verdicts = [Verdict(tripped=True), *[Verdict()] * 100]
        output = output_guardrail(name="answers")(returns("output guardrail", verdicts))
        first = input_guardrail(name="first", parallel=False)
        inputs = [
            first(returns("refusing input guardrail", Verdict())),
            input_guardrail(name="beside")(returns("input guardrail", Verdict())),
        ]
        expert = agent("Expert", model=ScriptedModel(["It is a cat."]))
        billing = agent("Billing", output_guardrails=[output])
        is_enabled = returns("is_enabled of a handoff", True)
        self.support = agent(
            "Support",
            tools=[look, expert.as_tool("ask", "Ask an expert.")],
            handoffs=[Handoff(billing, on_handoff=on_handoff, is_enabled=is_enabled)],
            input_guardrails=inputs,
            output_guardrails=[output],
        )
        connection = RealtimeModelConfig(url=server.url, api_key=returns("api_key", "a key"))
        config = RealtimeConfig(close_timeout_s=5, guardrail_debounce_chars=5)
        runner = RealtimeRunner(self.support, config=config)
        self.session: RealtimeSession = runner.run(None, connection, history=self.history)

    async def hold(self) -> None:
        async with self.session as session:
            session.model.add_listener(self)
            await session.send_message("Look!")
            outputs = 0
            async for event in session:
                if isinstance(event, RealtimeToolApprovalRequired):
                    await session.approve_tool_call(event.call_id)
                elif isinstance(event, RealtimeHistoryAdded):
                    outputs += event.item["type"] == OUTPUT
                if outputs == OUTPUTS:
                    break
            try:
                updates = (session.update_agent(self.support) for _ in range(2))
                await asyncio.gather(*updates)
            finally:
                await self._check_agreed()
            await asyncio.gather(session.close(), session.close())

    def on_event(self, event: ModelEvent) -> None:
        if isinstance(event, ToolCalled) and self.session.is_open:
            self.called.append(event.call_id)

    async def _check_agreed(self) -> None:
        """Check that the server works as the agent that the session says."""
        names = {"update of the agent", "handoff"}  # a cancel of the caller does not cut them
        if changes := [task for task in asyncio.all_tasks() if task.get_name() in names]:
            await asyncio.wait(changes)
        if self.session.is_open:
            told = self.server.connection.settings.wire["instructions"]
            assert told == self.session.agent.name

    async def check_released(self) -> None:
        with suppress(asyncio.CancelledError, Fault):
            await self.session.close()
        await self.session.close()
        await self.server.wait_for_open(0)
        assert self.runs <= 1
        outputs = [item["call_id"] for item in self.history.items if item.get("type") == OUTPUT]
        assert sorted(outputs) == sorted(set(outputs))
        assert {*self.called} == {*outputs, *(call.call_id for call in self.session.state.calls)}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count_socket_awaits(awaits: Awaits, patch: pytest.MonkeyPatch) -> None:
    """Count the awaits of the client's WebSocket, too.

    A write waits after it was done, for room in the buffer; where it fails, the connection is lost.
    """
    websocket, connect = connection.ClientConnection, connection.connect
    send, recv, close = websocket.send, websocket.recv, websocket.close

    async def connected(*args: Any, **options: Any) -> Any:
        await awaits("connect")
        return await connect(*args, **options)

    async def sent(self: Any, *args: Any, **options: Any) -> None:
        await send(self, *args, **options)
        try:
            await awaits("send")
        except Fault:
            self.transport.abort()
            raise

    async def received(self: Any, *args: Any, **options: Any) -> Any:
        await awaits("recv")
        return await recv(self, *args, **options)

    async def closed(self: Any, *args: Any, **options: Any) -> None:
        await awaits("close")
        await close(self, *args, **options)
        await awaits("close done")

    patch.setattr(connection, "connect", connected)
    patch.setattr(websocket, "send", sent)
    patch.setattr(websocket, "recv", received)
    patch.setattr(websocket, "close", closed)


async def check_faults(
    patch: pytest.MonkeyPatch,
    make_awaits: Callable[[int], Awaits],
    make_plan: Callable[[int], CancelAt] | None = None,
) -> None:
    """Hold a conversation for each await at which these strike; nothing is left of any of them."""
    patch.setattr("capsule_tasks.realtime.tool_calls._FIRST_RETRY_S", 0.001)
    async with RealtimeServer(lambda number: SCRIPT) as server:
        server.expect_errors("response_cancel_not_active")  # the answer has ended meanwhile
        tasks, files = asyncio.all_tasks(), open_files()
        for at in range(1, MOST_AWAITS):
            awaits = make_awaits(at)
            plan = None if make_plan is None else make_plan(at)
            conversation = Conversation(server, awaits)
            with patch.context() as of_socket, cancelling(plan) if plan else nullcontext():
                count_socket_awaits(awaits, of_socket)
                holding = asyncio.create_task(conversation.hold(), name="conversation")
                await asyncio.wait({holding}, timeout=10)
                place = f"after a fault at await {at}: {awaits.places[at - 1 : at]}"
                assert holding.done(), place
                await conversation.check_released()
            for _ in range(20):  # callbacks of tasks that have ended
                await asyncio.sleep(0)
            assert asyncio.all_tasks() - tasks == set(), place
            assert open_files() == files, place
            server.forget()
            if not (awaits.has_struck or (plan and plan.has_cancelled)):
                holding.result()
                assert at > 1, "nothing was struck"
                assert {*awaits.places} == SETTINGS | CALLBACKS | HISTORY | SOCKET
                return
            error = None if holding.cancelled() else holding.exception()
            assert not isinstance(error, AssertionError), place
    raise AssertionError("the conversation has no end")


@pytest.mark.parametrize("kind", ["error", "cancel"])
async def test_a_fault_of_the_surroundings_at_any_await_leaves_nothing(
    kind: Literal["error", "cancel"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever task it is: callbacks, the history, and the socket's reads and writes."""
    await check_faults(monkeypatch, lambda at: Awaits(at, kind))


@pytest.mark.parametrize(
    "name",
    [
        "conversation",
        "opening of a realtime session",
        "realtime open",
        "realtime reader",
        "realtime keepalive",
        "update of the agent",
        "handoff",
        "call c1",
        "call c2",
        "input guardrails",
        "output guardrails",
        "closing of a realtime session",
        "realtime close",
    ],
)
async def test_a_cancel_of_any_task_at_any_await_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_faults(monkeypatch, lambda _: Awaits(), lambda at: CancelAt(name, at))


async def test_a_cancel_while_anybody_waits_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(at: int) -> CancelAt:
        return CancelAt("conversation", at, anybody=True)

    await check_faults(monkeypatch, lambda _: Awaits(), plan)
