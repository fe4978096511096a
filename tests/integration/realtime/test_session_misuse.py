"""Sessions that are used from other threads, or given odd texts, keys and items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from capsule_tasks import Agent, Verdict, input_guardrail
from capsule_tasks.errors import (
    InvalidSetting,
    RealtimeClosed,
    WrongEventLoop,
)
from capsule_tasks.realtime import RealtimeModelConfig, RealtimeRunner, RealtimeSession
from capsule_tasks.testing.realtime import Hold, RealtimeServer, speaks

AGENT = Agent(name="Support", instructions="Help.")


class ItemList:
    """A history in memory."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        self.items += items


def session_on(server: RealtimeServer, agent: Agent = AGENT, **options: Any) -> RealtimeSession:
    config = RealtimeModelConfig(url=server.url, api_key="a key")
    return RealtimeRunner(agent).run(model_config=config, **options)


async def until(session: RealtimeSession, kind: str) -> Any:
    async for event in session:
        if event.type == kind:
            return event
    raise AssertionError(f"there is no {kind}")


CALLS: dict[str, Callable[[RealtimeSession], Coroutine[Any, Any, object]]] = {
    "send_message": lambda session: session.send_message("Hi"),
    "send_audio": lambda session: session.send_audio(b"12"),
    "interrupt": lambda session: session.interrupt(),
    "update_agent": lambda session: session.update_agent(AGENT),
    "approve_tool_call": lambda session: session.approve_tool_call("call_1"),
    "reject_tool_call": lambda session: session.reject_tool_call("call_1"),
    "close": lambda session: session.close(),
    "async for": lambda session: until(session, "agent_end"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_session_is_not_used_on_the_event_loop_of_another_thread(
    server: RealtimeServer, call: str
) -> None:
    server.add("Hello.")
    async with session_on(server) as session:
        with pytest.raises(WrongEventLoop, match=f"^{call} was called on another"):
            await asyncio.to_thread(asyncio.run, CALLS[call](session))
        await session.send_message("Hi")
        await until(session, "agent_end")


async def test_a_close_does_not_leave_a_message_waiting_for_its_guardrail(
    server: RealtimeServer,
) -> None:
    begun = asyncio.Event()

    @input_guardrail(parallel=False)
    async def hangs(context: Any, agent: Agent, text: Any) -> Verdict:
        begun.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with session_on(server, AGENT.clone(input_guardrails=[hangs])) as session:
        sending = asyncio.create_task(session.send_message("Hi"))
        await begun.wait()
    with pytest.raises(RealtimeClosed):
        await asyncio.wait_for(sending, 5)
    assert server.count("conversation.item.create") == 0


async def test_a_cancelled_message_is_not_sent_once_its_guardrail_allows_it(
    server: RealtimeServer,
) -> None:
    begun, ends = asyncio.Event(), list[str]()

    @input_guardrail(parallel=False)
    async def slow(context: Any, agent: Agent, text: Any) -> Verdict:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ends.append("ended")
        raise AssertionError

    async with session_on(server, AGENT.clone(input_guardrails=[slow])) as session:
        sending = asyncio.create_task(session.send_message("Hi"))
        await begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert ends == ["ended"]
    assert server.count("conversation.item.create") == 0


async def test_text_that_utf_8_lacks_is_escaped(server: RealtimeServer) -> None:
    """`input()` gives such text for bytes that are no UTF-8."""
    server.add("Hello.")
    async with session_on(server) as session:
        await session.send_message("caf\udce9")
        await until(session, "agent_end")
    (message,) = server.find("conversation.item.create")
    assert message["item"]["content"] == [{"type": "input_text", "text": "caf\\udce9"}]


@pytest.mark.parametrize(
    "item", [{"id": "bad", "type": 5}, {"id": "bad", "type": "message", "role": None}]
)
async def test_an_item_that_nobody_can_store_costs_no_other_item_and_no_event(
    server: RealtimeServer, item: dict[str, Any]
) -> None:
    pause, history = Hold(), ItemList()
    server.add(speaks("Hel", pause, "lo."), "Hello again.")
    async with asyncio.timeout(5), session_on(server, history=history) as session:
        await session.send_message("Hi")
        await pause.reached()
        content = [{"type": "output_text", "text": "?"}]
        await server.send({"type": "conversation.item.done", "item": item | {"content": content}})
        pause.release()
        await until(session, "agent_end")
    assert [each["role"] for each in history.items] == ["user", "assistant"]
    async with asyncio.timeout(5), session_on(server, history=history) as session:
        await session.send_message("Hi")
        await until(session, "agent_end")


@pytest.mark.parametrize("url", ["", "ws://[::1"])
async def test_a_url_that_is_broken_is_named(url: str) -> None:
    config = RealtimeModelConfig(url=url, api_key="a key")
    with pytest.raises(InvalidSetting, match=r"RealtimeModelConfig\.url = "):
        async with RealtimeRunner(AGENT).run(model_config=config):
            pass


async def test_a_key_with_a_line_end_is_refused_and_not_shown(server: RealtimeServer) -> None:
    config = RealtimeModelConfig(url=server.url, api_key="sk-secret\n")
    with pytest.raises(InvalidSetting, match="header 'Authorization'") as caught:
        async with RealtimeRunner(AGENT).run(model_config=config):
            pass
    assert "secret\n" not in str(caught.value)
    assert server.handshakes == 0
