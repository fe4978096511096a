"""The life of a session: scenarios of the SDK's tests, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from capsule_tasks.errors import RealtimeClosed, RealtimeRefused
from capsule_tasks.realtime import (
    OpenAIRealtime,
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
)
from capsule_tasks.realtime.events import RealtimeEvent
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, RealtimeServer
from tests.integration.realtime.scenarios import NotedTools, talk_to


class ClosesAsTold(OpenAIRealtime):
    """A model whose `close` waits for the test, and fails as often as the test says."""

    def __init__(self, *failures: BaseException) -> None:
        super().__init__()
        self.begun, self.release = asyncio.Event(), asyncio.Event()
        self.attempts = 0
        self._failures = list(failures)

    async def close(self) -> None:
        self.attempts += 1
        self.begun.set()
        await self.release.wait()
        if self._failures:
            raise self._failures.pop(0)
        await super().close()


async def taken(session: Any) -> list[str]:
    """The types of the events that one iteration takes."""
    return [event.type async for event in session]


# --- close ---------------------------------------------------------------------------------------


async def test_a_cancelled_iteration_takes_no_event() -> None:
    async with talk_to(Agent(name="A"), collects=False) as talk:
        first = asyncio.ensure_future(anext(aiter(talk.session)))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(anext(aiter(talk.session)))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await talk.session.send_message("hi")
        assert isinstance(await asyncio.wait_for(second, 5), RealtimeEvent)


@pytest.mark.parametrize(
    "failure", [None, RuntimeError("cannot close"), asyncio.CancelledError()], ids=str
)
async def test_iterations_end_before_the_connection_is_closed(
    failure: BaseException | None,
) -> None:
    model = ClosesAsTold(*([] if failure is None else [failure]))
    async with talk_to(Agent(name="A"), model=model, collects=False) as talk:
        readers = [asyncio.create_task(taken(talk.session)) for _ in range(2)]
        await asyncio.sleep(0)
        closers = [asyncio.create_task(talk.session.close()) for _ in range(2)]
        await model.begun.wait()
        await asyncio.wait_for(asyncio.gather(*readers), 5)
        assert not any(each.done() for each in closers)
        model.release.set()
        ends = await asyncio.gather(*closers, return_exceptions=True)
        if failure is not None:
            assert ends[0] is not None
            assert ends[0] is ends[1] or type(ends[0]) is type(ends[1])
            await talk.session.close()
        assert model.attempts == (1 if failure is None else 2)
        await talk.hung_up()


async def test_events_that_came_before_a_close_that_fails_can_still_be_taken() -> None:
    model = ClosesAsTold(RuntimeError("cannot close"))
    model.release.set()
    async with talk_to(Agent(name="A"), model=model, collects=False) as talk:
        await talk.session.send_message("hi")
        await talk.model_event("response_ended")
        with pytest.raises(RuntimeError, match="cannot close"):
            await talk.session.close()
        found = await taken(talk.session)
        assert "history_added" in found
        assert found.count("agent_start") == found.count("agent_end") == 1
        assert await taken(talk.session) == []


async def test_a_slow_consumer_keeps_no_other_from_its_end() -> None:
    model = ClosesAsTold(RuntimeError("cannot close"))
    model.release.set()
    async with talk_to(Agent(name="A"), model=model, collects=False) as talk:
        busy, resume = asyncio.Event(), asyncio.Event()

        async def slow() -> int:
            count = 0
            async for _ in talk.session:
                count += 1
                busy.set()
                await resume.wait()
            return count

        consumer = asyncio.create_task(slow())
        await talk.session.send_message("hi")
        await busy.wait()
        other = asyncio.create_task(taken(talk.session))
        await talk.model_event("response_ended")
        resume.set()
        with pytest.raises(RuntimeError, match="cannot close"):
            await talk.session.close()
        await asyncio.wait_for(asyncio.gather(consumer, other), 5)


async def test_a_cancelled_close_goes_on_for_the_others() -> None:
    model = ClosesAsTold()
    async with talk_to(Agent(name="A"), model=model) as talk:
        staying = asyncio.create_task(talk.session.close())
        await model.begun.wait()
        leaving = asyncio.create_task(talk.session.close())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not staying.done()
        model.release.set()
        await staying
        assert model.attempts == 1


async def test_tools_have_ended_before_the_model_is_closed() -> None:
    order: list[str] = []
    begun = asyncio.Event()

    class Noted(OpenAIRealtime):
        async def close(self) -> None:
            order.append("model")
            await super().close()

    @function_tool
    async def look() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("tool")

    async with talk_to(Agent(name="A", tools=[look]), model=Noted()) as talk:
        await talk.call("look", call_id="c1")
        await begun.wait()
        await talk.session.close()
        assert order == ["tool", "model"]


async def test_nothing_counts_once_a_close_has_begun() -> None:
    begun, ending, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @function_tool
    async def look() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await release.wait()

    tools = NotedTools()
    agent = Agent(name="A", tools=[look, tools.make("other")])
    async with talk_to(agent) as talk:
        hold = Hold()
        both = [
            {**calls(name), "call_id": call_id}
            for name, call_id in (("look", "c1"), ("other", "c2"))
        ]
        talk.replies.append([both[0], hold, both[1]])
        await talk.session.send_message("hi")
        await begun.wait()
        closing = asyncio.create_task(talk.session.close())
        await ending.wait()
        history = talk.session.history
        hold.release()
        await talk.server.wait_until(
            lambda: len(talk.server.connection.conversation.items) >= 3, "the call"
        )
        for refused in (
            talk.session.send_message("hi"),
            talk.session.send_audio(b"\0\0"),
            talk.session.interrupt(),
            talk.session.update_agent(Agent(name="B")),
        ):
            with pytest.raises(RealtimeClosed):
                await refused
        release.set()
        await closing
        assert len(talk.session.history) <= len(history) + 1  # the output of the call that was cut
        assert talk.count("error") == 0
    assert tools.calls == []


@pytest.mark.parametrize("where", ["tool", "below"])
@pytest.mark.parametrize("when", ["at once", "when it is cancelled"])
async def test_a_tool_closes_its_session(when: str, where: str) -> None:
    begun, ends = asyncio.Event(), list[str]()
    close: list[Callable[[], Awaitable[None]]] = []

    async def work() -> None:
        begun.set()
        try:
            if when == "at once":
                await close[0]()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            if when == "when it is cancelled":
                await close[0]()
            raise

    @function_tool
    async def look() -> str:
        await (work() if where == "tool" else asyncio.gather(work()))
        return "not reached"

    async with talk_to(Agent(name="A", tools=[look])) as talk:
        close.append(talk.session.close)
        await talk.call("look", call_id="c1")
        await begun.wait()
        await asyncio.wait_for(talk.session.close(), 5)
        assert ends == ["cancelled"]
        await talk.hung_up()
    assert talk.outputs == []
    assert talk.session.history[-1]["output"] == UNCERTAIN


async def test_a_tool_that_resists_its_cancel_sends_nothing_after_the_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, cancelled, release = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()

    @function_tool
    async def look() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            await release.wait()
        ended.set()
        return "late"

    config = RealtimeConfig(close_timeout_s=0.01)
    async with talk_to(Agent(name="A", tools=[look]), config=config) as talk:
        await talk.call("look", call_id="c1")
        await begun.wait()
        with caplog.at_level(logging.WARNING):
            await talk.session.close()
        assert cancelled.is_set()
        assert "look" in caplog.text
        await talk.hung_up()
        release.set()
        await ended.wait()
    assert talk.outputs == []
    assert "late" not in str(talk.session.history)


# --- enter ---------------------------------------------------------------------------------------


class NotesListeners(OpenAIRealtime):
    def __init__(self) -> None:
        super().__init__()
        self.listeners: set[Any] = set()

    def add_listener(self, listener: Any, **options: Any) -> None:
        self.listeners.add(listener)
        super().add_listener(listener, **options)

    def remove_listener(self, listener: Any) -> None:
        self.listeners.discard(listener)
        super().remove_listener(listener)


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_a_connect_that_fails_or_is_cancelled_leaves_nothing(how: str) -> None:
    model = NotesListeners()
    async with RealtimeServer() as server:
        config = RealtimeModelConfig(url=server.url, api_key="key")
        session = RealtimeRunner(Agent(name="A"), model=model).run(model_config=config)
        if how == "refused":
            server.refuse_handshakes(401)
            with pytest.raises(RealtimeRefused, match="401"):
                await session.__aenter__()
        else:
            server.delay_handshakes(asyncio.Event())
            entering = asyncio.create_task(session.__aenter__())
            await server.wait_until(lambda: server.handshakes, "a handshake")
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
        assert model.listeners == set()
        with pytest.raises(RealtimeClosed):
            await session.send_message("hi")
        await session.close()
