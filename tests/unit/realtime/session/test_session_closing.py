"""Closing a session: from anywhere, repeatedly, at the same time, and again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from capsule_tasks import Agent, Verdict, function_tool, output_guardrail
from capsule_tasks.errors import HistoryNoAnswer, RealtimeClosed, RealtimeLost, ToolFailed
from capsule_tasks.realtime.events import (
    RealtimeErrorEvent,
    RealtimeEvent,
    RealtimeInputAudioTimeout,
)
from capsule_tasks.realtime.model import (
    ConnectionEnded,
    InputTimedOut,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    SendMessage,
    SendToolOutput,
    TextDelta,
    ToolCalled,
)
from capsule_tasks.realtime.runner import RealtimeRunner
from capsule_tasks.realtime.session.session import RealtimeSession
from capsule_tasks.realtime.settings import RealtimeConfig
from tests.unit.realtime.session.fake_model import FakeModel, Gate

QUIET = RealtimeConfig(raw_model_events=False, close_timeout_s=0.05)


class ItemList:
    """A history in memory, which fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.items: list[dict[str, Any]] = []
        self.failures = failures

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no disk")
        self.items += items


class Stage:
    """A session with a tool that waits, and calls `during` before it does so."""

    def __init__(self, model: FakeModel, history: ItemList | None = None) -> None:
        self.model = model
        self.gate = Gate()
        self.during: Callable[[], Awaitable[None]] = self.gate
        self.tool_ended = False

        @function_tool
        async def dig() -> str:
            try:
                await self.during()
            finally:
                self.tool_ended = True
            return "gold"

        agent = Agent(name="Support", tools=[dig])
        self.session = RealtimeRunner(agent, model, QUIET).run(history=history)

    async def open_with_running_tool(self) -> None:
        await self.session.__aenter__()
        self.model.says(ToolCalled("dig", "call_1", "{}"))
        await self.gate.reached.wait()

    def assert_released(self) -> None:
        assert self.tool_ended
        assert self.model.listeners == []
        assert not self.model.is_connected
        assert len(asyncio.all_tasks()) == 1


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
async def stage(model: FakeModel) -> AsyncIterator[Stage]:
    stage = Stage(model)
    await stage.open_with_running_tool()
    yield stage
    with suppress(OSError):
        await stage.session.close()


async def test_a_close_releases_everything_once(stage: Stage) -> None:
    await stage.session.close()
    stage.assert_released()
    await stage.session.close()
    assert stage.model.closes == 1
    for refused in (
        stage.session.send_message("Hello"),
        stage.session.send_audio(b""),
        stage.session.interrupt(),
        stage.session.update_agent(stage.session.agent),
        stage.session.approve_tool_call("call_1"),
        stage.session.reject_tool_call("call_1"),
        stage.session.__aenter__(),
    ):
        with pytest.raises(RealtimeClosed, match="the realtime session is closed"):
            await refused


async def test_several_closers_wait_for_one_cleanup(stage: Stage) -> None:
    gate = Gate()
    stage.model.steps["close"].append(gate)
    closers = [asyncio.create_task(stage.session.close()) for _ in range(3)]
    await gate.reached.wait()
    closers.append(asyncio.create_task(stage.session.close()))
    await asyncio.sleep(0)
    assert not any(closer.done() for closer in closers)
    gate.released.set()
    await asyncio.gather(*closers)
    stage.assert_released()
    assert stage.model.closes == 1


async def test_all_closers_get_the_first_error_and_a_later_one_makes_the_rest(
    model: FakeModel,
) -> None:
    history = ItemList()
    stage = Stage(model, history)
    await stage.open_with_running_tool()
    history.failures = 2
    model.steps["close"].append(OSError("stuck"))
    closers = [stage.session.close() for _ in range(2)]
    errors = await asyncio.gather(*closers, return_exceptions=True)
    assert [str(error) for error in errors] == ["stuck", "stuck"]
    assert stage.tool_ended
    assert model.listeners == []
    with pytest.raises(RealtimeClosed, match="a step of its cleanup failed"):
        await stage.session.send_message("Hello")
    while history.failures:
        with suppress(OSError):
            await stage.session.close()
    await stage.session.close()
    stage.assert_released()
    assert model.closes == 2
    assert [item["type"] for item in history.items] == ["function_call_output"]


async def test_a_close_waits_for_a_history_that_hangs_only_so_long(model: FakeModel) -> None:
    gate = Gate()

    class Hanging(ItemList):
        session_id = "customer-7"

        async def add_items(self, items: list[dict[str, Any]]) -> None:
            await gate()
            await super().add_items(items)

    history = Hanging()
    stage = Stage(model, history)
    await stage.open_with_running_tool()
    for _ in range(2):
        with pytest.raises(HistoryNoAnswer, match=r"history 'customer-7' .* within 0.05 s"):
            await stage.session.close()
        with pytest.raises(RealtimeClosed, match="a step of its cleanup failed"):
            await stage.session.send_message("Hello")
    gate.released.set()
    await stage.session.close()
    stage.assert_released()
    assert [item["type"] for item in history.items] == ["function_call_output"]


async def test_a_cancel_of_a_closer_does_not_stop_the_cleanup(stage: Stage) -> None:
    gate = Gate()
    stage.model.steps["close"].append(gate)
    closer = asyncio.create_task(stage.session.close())
    await gate.reached.wait()
    closer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closer
    gate.released.set()
    await stage.session.close()
    stage.assert_released()
    assert stage.model.closes == 1


async def test_a_tool_that_closes_its_session_is_cancelled(model: FakeModel) -> None:
    stage = Stage(model)
    cancels: list[BaseException] = []

    async def close() -> None:
        stage.gate.reached.set()
        try:
            await stage.session.close()
        except asyncio.CancelledError as error:
            cancels.append(error)
            raise

    stage.during = close
    await stage.open_with_running_tool()
    await stage.session.close()
    stage.assert_released()
    assert len(cancels) == 1


@pytest.mark.parametrize("is_below", [False, True], ids=["in the task", "in a task below"])
async def test_a_tool_that_closes_its_session_when_it_is_cancelled_holds_up_nothing(
    model: FakeModel, caplog: pytest.LogCaptureFixture, is_below: bool
) -> None:
    stage = Stage(model)

    async def work() -> None:
        try:
            await stage.gate()
        finally:
            await stage.session.close()

    async def below() -> None:
        await asyncio.gather(work())

    stage.during = below if is_below else work
    await stage.open_with_running_tool()
    await stage.session.close()
    stage.assert_released()
    assert caplog.text == ""


async def test_a_guardrail_that_closes_its_session_is_cancelled(model: FakeModel) -> None:
    ends: list[str] = []

    @output_guardrail
    async def closing(context: Any, agent: Agent, output: str) -> Verdict:
        try:
            await session.close()
        finally:
            ends.append("ended")
        return Verdict(tripped=False)

    agent = Agent(name="Support", output_guardrails=[closing])
    session = RealtimeRunner(agent, model, QUIET).run()
    await session.__aenter__()
    model.says(ResponseStarted("r"), TextDelta("Hello", "r", "item"), ResponseEnded("r"))
    while not ends:
        await asyncio.sleep(0)
    await session.close()
    assert (model.listeners, model.is_connected, len(asyncio.all_tasks())) == ([], False, 1)


async def test_a_listener_of_the_model_may_close_the_session(stage: Stage) -> None:
    class Closing:
        def on_event(self, event: ModelEvent) -> Awaitable[None] | None:
            return stage.session.close()

    listener = Closing()
    stage.model.add_listener(listener)
    [pause] = stage.model.says(InputTimedOut())
    await pause
    stage.model.remove_listener(listener)
    stage.assert_released()


async def test_a_tool_that_swallows_its_cancel_is_named_in_the_log_and_sends_nothing(
    model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(model)
    release = asyncio.Event()

    async def stubborn() -> None:
        stage.gate.reached.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    stage.during = stubborn
    await stage.open_with_running_tool()
    await stage.session.close()
    assert "go on 0.05 s after their cancel: call call_1 of dig" in caplog.text
    assert (model.is_connected, model.closes) == (False, 1)
    release.set()
    while not stage.tool_ended or len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    assert model.told(SendToolOutput) == []
    assert [item["call_id"] for item in stage.session.history] == ["call_1"]


async def test_a_message_that_waits_to_be_sent_is_not_sent_after_the_close(stage: Stage) -> None:
    gate = Gate()
    stage.model.steps["SendMessage"].append(gate)
    sending = asyncio.create_task(stage.session.send_message("Hello"))
    await gate.reached.wait()
    closing = asyncio.create_task(stage.session.close())
    await asyncio.sleep(0)
    gate.released.set()
    with pytest.raises(RealtimeClosed):
        await sending
    await closing
    assert stage.model.told(SendMessage) == []


# --- the body of the block -----------------------------------------------------------------------


async def test_the_error_of_the_block_is_kept_if_the_close_fails_too(model: FakeModel) -> None:
    model.steps["close"].append(OSError("stuck"))
    with pytest.raises(ValueError, match="of the block") as raised:
        async with RealtimeRunner(Agent(name="Support"), model).run():
            raise ValueError("of the block")
    assert raised.value.__notes__ == ["closing the session failed, too: stuck"]


async def test_a_block_that_ends_raises_the_error_of_the_close(model: FakeModel) -> None:
    model.steps["close"].append(OSError("stuck"))
    with pytest.raises(OSError, match="stuck"):
        async with RealtimeRunner(Agent(name="Support"), model).run():
            pass


# --- iterators -----------------------------------------------------------------------------------


async def test_a_close_within_the_iteration_ends_it_after_the_events_before(
    stage: Stage,
) -> None:
    stage.model.says(InputTimedOut("1"), InputTimedOut("2"))
    got: list[RealtimeEvent] = []
    async for event in stage.session:
        got.append(event)
        await stage.session.close()
    timeouts = [each.item_id for each in got if isinstance(each, RealtimeInputAudioTimeout)]
    assert timeouts == ["1", "2"]


async def all_of(session: RealtimeSession) -> list[RealtimeEvent]:
    return [event async for event in session]


async def test_a_close_wakes_everybody_who_iterates(model: FakeModel) -> None:
    session = RealtimeRunner(Agent(name="Support"), model, QUIET).run()
    await session.__aenter__()
    consumers = [asyncio.create_task(all_of(session)) for _ in range(3)]
    await asyncio.sleep(0)
    model.says(InputTimedOut("1"))
    await session.close()
    assert sorted(map(len, await asyncio.gather(*consumers))) == [0, 0, 1]


# --- the end of the connection -------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("reset"), RealtimeLost("reset")])
async def test_a_lost_connection_ends_the_iteration_with_its_error(
    stage: Stage, error: Exception
) -> None:
    stage.model.says(InputTimedOut("1"), ConnectionEnded(error))
    events = aiter(stage.session)
    while not isinstance(await anext(events), RealtimeInputAudioTimeout):
        pass
    with pytest.raises(RealtimeLost, match="lost: reset") as raised:
        await anext(events)
    with pytest.raises(RealtimeClosed) as refused:
        await stage.session.send_message("Hello")
    assert refused.value.__cause__ is raised.value
    await stage.session.close()
    stage.assert_released()


async def test_a_regular_end_of_the_connection_closes_the_session(stage: Stage) -> None:
    stage.model.says(ConnectionEnded())
    assert not [each for each in await all_of(stage.session) if each.type == "error"]
    await stage.session.close()
    stage.assert_released()


async def test_a_session_that_dies_stores_its_history_and_a_failure_is_tried_again(
    model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    history = ItemList()
    stage = Stage(model, history)
    await stage.open_with_running_tool()
    history.failures = 2
    model.says(ConnectionEnded(OSError("reset")))
    with pytest.raises(RealtimeLost):
        await all_of(stage.session)
    while "Closing a realtime session failed" not in caplog.text:
        await asyncio.sleep(0)
    await stage.session.close()
    stage.assert_released()
    assert [item["type"] for item in history.items] == ["function_call_output"]


async def test_a_tool_that_fails_the_session_is_what_the_iteration_raises(
    model: FakeModel,
) -> None:
    @function_tool(on_error="raise")
    async def dig() -> str:
        raise ValueError("a stone")

    session = RealtimeRunner(Agent(name="Support", tools=[dig]), model, QUIET).run()
    async with session:
        model.says(ToolCalled("dig", "call_1", "{}"))
        with pytest.raises(ToolFailed, match="a stone"):
            await all_of(session)
    assert "a stone" in session.history[0]["output"]


# --- tasks ---------------------------------------------------------------------------------------


async def test_an_error_of_a_task_becomes_an_event(stage: Stage) -> None:
    async def broken() -> None:
        raise ValueError("broken")

    task = stage.session.start(broken(), "work")
    await asyncio.wait({task})
    async for event in stage.session:
        if isinstance(event, RealtimeErrorEvent):
            assert str(event.error) == "broken"
            break


async def test_an_error_of_a_handler_of_an_event_becomes_an_event(stage: Stage) -> None:
    stage.model.says(ResponseEnded("r", spent=5))  # type: ignore[arg-type]
    stage.model.says(InputTimedOut("1"))
    got = [await anext(aiter(stage.session)) for _ in range(3)]
    assert [event.type for event in got][-2:] == ["error", "input_audio_timeout_triggered"]


async def test_no_task_is_started_after_the_close(stage: Stage) -> None:
    await stage.session.close()

    async def work() -> None:
        raise AssertionError

    with pytest.raises(RealtimeClosed):
        stage.session.start(work(), "work")
