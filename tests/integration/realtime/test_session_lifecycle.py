"""Sessions over real sockets: opened, closed from everywhere, lost; and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from capsule_tasks import (
    Agent,
    ModelSettings,
    ToolContext,
    Verdict,
    function_tool,
    output_guardrail,
)
from capsule_tasks.errors import (
    CallbackFailed,
    RealtimeClosed,
    RealtimeInUse,
    RealtimeLost,
    RealtimeNoAnswer,
    RealtimeRefused,
)
from capsule_tasks.realtime import (
    OpenAIRealtime,
    RealtimeAgentEnd,
    RealtimeConfig,
    RealtimeEvent,
    RealtimeHandoff,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
    RealtimeTextDelta,
)
from capsule_tasks.realtime.model import InputTimedOut, ModelEvent
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, RealtimeServer, speaks, writes
from tests.integration.realtime.listeners import until

QUIET = RealtimeConfig(raw_model_events=False)
SUPPORT = Agent(name="Support", instructions="Help.")
BILLING = Agent(name="Billing", instructions="Talk about money.")


class ItemList:
    """A history in memory."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = list(items)

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        self.items += items


def connection_to(server: RealtimeServer) -> RealtimeModelConfig:
    return RealtimeModelConfig(url=server.url, api_key="a key")


def session_on(
    server: RealtimeServer, agent: Agent = SUPPORT, config: RealtimeConfig = QUIET, **options: Any
) -> RealtimeSession:
    return RealtimeRunner(agent, config=config).run(model_config=connection_to(server), **options)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def nothing_left(server: RealtimeServer) -> AsyncIterator[None]:
    """Check that the block leaves no task, no connection, and no socket."""
    tasks, files = asyncio.all_tasks(), open_files()
    yield
    await server.wait_for_open(0)
    for _ in range(100):
        if asyncio.all_tasks() <= tasks and open_files() == files:
            return
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - tasks == set()
    assert open_files() == files


async def until_answered(session: RealtimeSession) -> list[RealtimeEvent]:
    """The events up to the end of an answer."""
    events: list[RealtimeEvent] = []
    async for event in session:
        events.append(event)
        if isinstance(event, RealtimeAgentEnd):
            break
    return events


# --- opening -------------------------------------------------------------------------------------


async def test_a_conversation_leaves_nothing_behind(server: RealtimeServer) -> None:
    server.add("Hello.", speaks("Good bye."))
    history = ItemList({"role": "user", "content": "I was here before."})
    async with nothing_left(server), session_on(server, history=history) as session:
        for text in ("Hi", "Bye"):
            await session.send_message(text)
            await until_answered(session)
    assert server.count("session.update") == 1
    assert [item["role"] for item in history.items] == ["user", *["user", "assistant"] * 2]
    assert session.usage.requests == 2


async def broken(*_: Any, **__: Any) -> str:
    raise ValueError("broken")


async def test_an_agent_that_cannot_be_resolved_connects_to_nothing(
    server: RealtimeServer,
) -> None:
    async with nothing_left(server):
        with pytest.raises(CallbackFailed):
            await session_on(server, SUPPORT.clone(instructions=broken)).__aenter__()
    assert server.handshakes == 0


async def test_a_refused_connection_leaves_nothing(server: RealtimeServer) -> None:
    server.refuse_handshakes(401)
    model = OpenAIRealtime()
    async with nothing_left(server):
        with pytest.raises(RealtimeRefused, match="401"):
            await RealtimeRunner(SUPPORT, model).run(None, connection_to(server)).__aenter__()
    again = RealtimeRunner(SUPPORT, model).run(None, connection_to(server))
    async with nothing_left(server), again:
        await server.wait_for_open(1)


async def test_refused_settings_leave_nothing(server: RealtimeServer) -> None:
    server.refuse("session.update", "no such voice")
    server.expect_errors("invalid_value")
    async with nothing_left(server):
        with pytest.raises(RealtimeRefused, match="no such voice"):
            await session_on(server).__aenter__()


async def test_a_model_serves_one_session_at_a_time(server: RealtimeServer) -> None:
    server.add("Hello.")
    runner = RealtimeRunner(SUPPORT, OpenAIRealtime(), QUIET)
    async with nothing_left(server):
        async with runner.run(None, connection_to(server)) as session:
            with pytest.raises(RealtimeInUse):
                await runner.run(None, connection_to(server)).__aenter__()
            await session.send_message("Are you there?")
            await until_answered(session)
        async with runner.run(None, connection_to(server)):
            pass


@pytest.mark.parametrize("place", ["handshake", "settings"])
@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_an_opening_that_is_ended_leaves_nothing(
    server: RealtimeServer, place: str, way: str
) -> None:
    until = asyncio.Event()
    if place == "handshake":
        server.delay_handshakes(until)
    else:
        server.delay("session.update", until)
    async with nothing_left(server):
        session = session_on(server)
        entering = asyncio.create_task(session.__aenter__())
        reached = (lambda: server.handshakes) if place == "handshake" else None
        await server.wait_until(reached or (lambda: server.count("session.update")), place)
        if way == "cancel":
            entering.cancel()
        else:
            await session.close()
        with pytest.raises(asyncio.CancelledError if way == "cancel" else RealtimeClosed):
            await entering
        until.set()


# --- closing -------------------------------------------------------------------------------------


class Closers:
    """Ways to close a session while its tool runs."""

    def __init__(self) -> None:
        self.in_tool = asyncio.Event()
        self.session: RealtimeSession

    async def of_block(self) -> None:
        pass

    async def repeated(self) -> None:
        for _ in range(3):
            await self.session.close()

    async def concurrent(self) -> None:
        await asyncio.gather(*(self.session.close() for _ in range(3)))

    async def cancelled(self) -> None:
        closing = asyncio.create_task(self.session.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    async def of_consumer(self) -> None:
        async for event in self.session:
            if isinstance(event, RealtimeAgentEnd):
                await self.session.close()

    async def of_tool(self) -> None:
        self.in_tool.set()


@pytest.mark.parametrize(
    "way", ["of_block", "repeated", "concurrent", "cancelled", "of_consumer", "of_tool"]
)
async def test_a_close_from_anywhere_leaves_nothing(server: RealtimeServer, way: str) -> None:
    closers, ends, runs = Closers(), list[str](), asyncio.Event()

    @function_tool
    async def dig() -> str:
        runs.set()
        try:
            await closers.in_tool.wait()
            await closers.session.close()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return "gold"

    server.add([calls("dig")])
    history = ItemList()
    async with nothing_left(server):
        async with session_on(server, SUPPORT.clone(tools=[dig]), history=history) as session:
            closers.session = session
            await session.send_message("Dig!")
            await runs.wait()
            waiting = [asyncio.create_task(all_of(session)) for _ in range(2)]
            await getattr(closers, way)()
        await asyncio.gather(*waiting)
    assert ends == ["cancelled"]
    assert server.count("conversation.item.create") == 1
    assert [item["type"] for item in history.items][1:] == ["function_call", "function_call_output"]


async def all_of(session: RealtimeSession) -> list[RealtimeEvent]:
    return [event async for event in session]


async def test_a_guardrail_may_close_its_session(server: RealtimeServer) -> None:
    @output_guardrail
    async def closing(context: Any, agent: Agent, output: str) -> Verdict:
        await session.close()
        return Verdict(tripped=True)

    server.add("Hello.")
    async with nothing_left(server):
        agent = SUPPORT.clone(output_guardrails=[closing])
        session = session_on(server, agent)
        await session.__aenter__()
        await session.send_message("Hi")
        events = await all_of(session)
        await session.close()
    assert "guardrail_tripped" not in [event.type for event in events]


async def test_a_listener_of_the_model_may_close_the_session(server: RealtimeServer) -> None:
    class Closing:
        def on_event(self, event: ModelEvent) -> Awaitable[None] | None:
            return session.close() if isinstance(event, InputTimedOut) else None

    async with nothing_left(server):
        session = await session_on(server).__aenter__()
        session.model.add_listener(listener := Closing())
        await send_timeouts(server, 1)
        assert [event.type for event in await all_of(session)] == ["input_audio_timeout_triggered"]
        await session.close()
        session.model.remove_listener(listener)


async def test_the_function_that_gives_the_key_may_close_the_session(
    server: RealtimeServer,
) -> None:
    async def no_key() -> str:
        await session.close()
        return "a key"

    config = RealtimeModelConfig(url=server.url, api_key=no_key)
    session = RealtimeRunner(SUPPORT).run(model_config=config)
    async with nothing_left(server):
        with pytest.raises(RealtimeClosed):
            await session.__aenter__()
    assert server.handshakes == 0


# --- the end of the connection -------------------------------------------------------------------


async def note_texts(session: RealtimeSession, texts: list[str]) -> None:
    async for event in session:
        if isinstance(event, RealtimeTextDelta):
            texts.append(event.delta)  # noqa: PERF401  until an error


async def test_a_lost_connection_ends_the_iteration_after_what_came_before(
    server: RealtimeServer,
) -> None:
    hold, history = Hold(), ItemList()
    server.add(writes("Once upon a time", hold))
    async with nothing_left(server):
        session = await session_on(server, history=history).__aenter__()
        await session.send_message("Tell me a story")
        await hold.reached()
        server.connection.abort()
        texts: list[str] = []
        with pytest.raises(RealtimeLost):
            await note_texts(session, texts)
        with pytest.raises(RealtimeClosed) as raised:
            await session.send_message("Are you there?")
        assert isinstance(raised.value.__cause__, RealtimeLost)
        await session.close()
    assert "".join(texts) == "Once upon a time"
    told, answer = history.items
    assert told["content"][0]["text"] == "Tell me a story"
    assert (answer["status"], answer["content"][0]["text"]) == ("incomplete", "Once upon a time")


async def test_an_unexpected_error_of_the_reader_is_a_lost_connection(
    server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nothing_left(server):
        session = await session_on(server).__aenter__()
        with monkeypatch.context() as patch:
            patch.setattr(ClientConnection, "recv", broken)
            await send_timeouts(server, 2)
            with pytest.raises(RealtimeLost, match="broken") as raised:
                await anext(event async for event in session if event.type == "error")
        assert isinstance(raised.value.__cause__, ValueError)
        await session.close()


async def test_a_regular_end_of_the_connection_ends_the_iteration(server: RealtimeServer) -> None:
    async with nothing_left(server), session_on(server) as session:
        await server.connection.close()
        assert await all_of(session) == []
        with pytest.raises(RealtimeClosed):
            await session.interrupt()


# --- agents --------------------------------------------------------------------------------------


async def test_an_update_that_is_refused_leaves_both_sides_as_they_were(
    server: RealtimeServer,
) -> None:
    server.expect_errors("invalid_value")
    async with nothing_left(server), session_on(server) as session:
        server.refuse("session.update", "too long")
        with pytest.raises(RealtimeRefused, match="too long"):
            await session.update_agent(BILLING)
        assert session.agent is SUPPORT
        assert server.connection.settings.wire["instructions"] == "Help."
        await session.update_agent(BILLING)
        assert server.connection.settings.wire["instructions"] == "Talk about money."
        assert await anext(aiter(session)) == RealtimeHandoff(SUPPORT, BILLING)


async def test_an_update_that_cannot_be_sent_leaves_both_sides_as_they_were(
    server: RealtimeServer,
) -> None:
    async with nothing_left(server), session_on(server) as session:
        unsendable = SUPPORT.clone(model_settings=ModelSettings(reasoning={"effort": object()}))
        with pytest.raises(TypeError, match="object"):
            await session.update_agent(unsendable)
        assert session.agent is SUPPORT
        await session.update_agent(SUPPORT.clone())
        assert server.count("session.update") == 3


async def test_an_update_without_an_answer_is_taken_back(server: RealtimeServer) -> None:
    runner = RealtimeRunner(SUPPORT, OpenAIRealtime(answer_timeout_s=0.2), QUIET)
    async with nothing_left(server), runner.run(None, connection_to(server)) as session:
        server.ignore("session.update")
        with pytest.raises(RealtimeNoAnswer):
            await session.update_agent(BILLING)
        assert session.agent is SUPPORT
        assert server.count("session.update") == 3
        assert server.connection.settings.wire["instructions"] == "Help."


async def test_a_server_that_never_answers_an_update_fails_the_session(
    server: RealtimeServer,
) -> None:
    runner = RealtimeRunner(SUPPORT, OpenAIRealtime(answer_timeout_s=0.05), QUIET)
    async with nothing_left(server):
        session = await runner.run(None, connection_to(server)).__aenter__()
        server.ignore("session.update", times=2)
        with pytest.raises(RealtimeNoAnswer):
            await session.update_agent(BILLING)
        with pytest.raises(RealtimeNoAnswer):
            await anext(aiter(session))
        await session.close()


# --- slow consumers ------------------------------------------------------------------------------


async def test_a_server_waits_for_a_slow_consumer_and_no_control_event_is_missing() -> None:
    count, limit = 60, 8
    async with RealtimeServer(receive_buffer_bytes=4096) as server, nothing_left(server):
        config = RealtimeConfig(raw_model_events=False, event_limit=limit)
        async with session_on(server, config=config) as session:
            filling = asyncio.create_task(send_timeouts(server, count))
            got, most = list[str | None](), 0
            while len(got) < count:
                event: Any = await anext(aiter(session))
                got.append(event.item_id)
                most = max(most, len(session._queue))
            await filling
    assert got == [str(number) for number in range(count)]
    assert most <= limit


async def test_the_agent_is_updated_while_the_consumer_is_slow(server: RealtimeServer) -> None:
    config = RealtimeConfig(raw_model_events=False, event_limit=2)
    async with nothing_left(server), session_on(server, config=config) as session:
        await send_timeouts(server, 5)
        await until(lambda: session._queue.is_full)
        await session.update_agent(SUPPORT.clone(instructions="Be brief."))
        assert server.connection.settings.wire["instructions"] == "Be brief."


async def send_timeouts(server: RealtimeServer, count: int) -> None:
    for number in range(count):
        event = {
            "type": "input_audio_buffer.timeout_triggered",
            "item_id": str(number),
            "audio_start_ms": 0,
            "audio_end_ms": 1,
        }
        await server.send(event)


async def test_a_tool_shows_what_it_does_while_the_consumer_is_slow(
    server: RealtimeServer,
) -> None:
    @function_tool
    async def dig(context: ToolContext) -> str:
        assert context.publish is not None
        for number in range(10):
            context.publish("tool_progress", number)
        return "gold"

    server.add([calls("dig")], "Found it.")
    config = RealtimeConfig(raw_model_events=False, event_limit=5)
    agent = SUPPORT.clone(tools=[dig])
    async with nothing_left(server), session_on(server, agent, config) as session:
        await session.send_message("Dig!")
        await server.wait_for("conversation.item.create", 2)
        events: list[Any] = [*await until_answered(session), *await until_answered(session)]
    shown = [event.data for event in events if event.type == "tool_update"]
    missing = sum(event.other_events for event in events if event.type == "events_dropped")
    assert len(shown) + missing >= 10
    assert [event.type for event in events].count("tool_end") == 1


async def test_a_session_makes_no_call_again_that_is_in_its_history() -> None:
    made: list[int] = []

    @function_tool
    def refund(order: int) -> str:
        made.append(order)
        return "refunded"

    agent = Agent(name="Support", tools=[refund])
    history = ItemList()
    async with RealtimeServer([calls("refund", {"order": 42}), "Done.", "Yes."]) as server:
        for question in ("Refund order 42.", "Was it refunded?"):
            async with session_on(server, agent, history=history) as session:
                await session.send_message(question)
                await anext(event async for event in session if event.type == "text_delta")
        assert made == [42]
    kinds = [item["type"] for item in history.items]
    assert kinds == ["message", "function_call", "function_call_output", *["message"] * 3]
