"""Sessions over a real socket with a scripted server, for scenarios that need little of either."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from capsule_tasks.realtime import (
    OpenAIRealtime,
    PlaybackTracker,
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSettings,
)
from capsule_tasks.realtime.model import ModelEvent, RealtimeModel, SendRaw
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.tools import Tool
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Answer, RealtimeServer

WAIT_S = 5.0
PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": True}


class NotedTools:
    """Tools that note their calls: what they return, the call's id, and its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, str, str]] = []

    def make(
        self,
        name: str,
        output: Any = "ok",
        before: Callable[[], Awaitable[Any]] | None = None,
        **options: Any,
    ) -> Tool:
        """A tool that returns `output`, once `before` has returned."""

        async def invoke(context: ToolContext, arguments: str) -> Any:
            self.calls.append((output, context.call_id, arguments))
            if before is not None:
                await before()
            return output

        options = {"strict": False} | options
        return Tool(name=name, description="", parameters=PARAMETERS, invoke=invoke, **options)


class Noted:
    """Events of several types, as they come. Each type has a place up to which it was taken."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.error: BaseException | None = None
        """Raised by those who wait for what has not come."""
        self._taken: Counter[str] = Counter()
        self._change = asyncio.Event()

    def add(self, event: Any) -> None:
        self.all.append(event)
        self._change.set()

    def end(self, error: BaseException) -> None:
        self.error = error
        self._change.set()

    async def next(self, kind: str) -> Any:
        while True:
            for place in range(self._taken[kind], len(self.all)):
                if self.all[place].type == kind:
                    self._taken[kind] = place + 1
                    return self.all[place]
            if self.error is not None:
                raise self.error
            self._change.clear()
            await asyncio.wait_for(self._change.wait(), WAIT_S)


class Talk:
    """An open session, its events so far, and the server's side of it."""

    def __init__(self, session: Any, server: RealtimeServer, replies: deque[Any]) -> None:
        self.session = session
        self.server = server
        self.replies = replies
        """The next replies of the model, whose responses are empty without them."""
        self._events = Noted()
        self._model_events = Noted()
        self._heard: Counter[str] = Counter()
        session.model.add_listener(self)

    def on_event(self, event: ModelEvent) -> None:
        """Note an event of the model, which the session has got before."""
        self._model_events.add(event)

    async def collect(self) -> None:
        """Take all events of the session."""
        try:
            async for event in self.session:
                self._events.add(event)
            self._events.end(EOFError("the iteration has ended"))
        except Exception as error:  # noqa: BLE001  whatever the session failed with
            self._events.end(error)

    # --- what the session shows ---

    @property
    def seen(self) -> list[Any]:
        return self._events.all

    async def event(self, kind: str) -> Any:
        """The next event of a type. Raises the error that the iteration has ended with."""
        return await self._events.next(kind)

    def count(self, kind: str) -> int:
        return sum(event.type == kind for event in self.seen)

    # --- what the model does ---

    async def model_event(self, kind: str) -> Any:
        """The next event of a type that the session has got from the model."""
        return await self._model_events.next(kind)

    async def call(self, name: str, arguments: str = "{}", call_id: str = "c1") -> None:
        """Have the model call a tool; returns when the session has got the call."""
        self.replies.append({**calls(name, arguments), "call_id": call_id})
        await self.session.send_message(f"Call {name}.")
        await self.model_event("tool_called")

    # --- what the server hears ---

    async def hear(self, kind: str) -> Any:
        """The next message of a type that the server gets."""
        self._heard[kind] += 1
        return await self.server.wait_for(kind, self._heard[kind])

    async def choice(self) -> Any:
        """The tool choice in the next `response.create`; None if the settings are to hold."""
        return (await self.hear("response.create")).get("response", {}).get("tool_choice")

    async def output(self, call_id: str) -> str:
        """The output of a call, as soon as the server has it."""

        def is_meant(message: dict[str, Any]) -> bool:
            item = message.get("item") or {}
            return bool(item.get("type") == "function_call_output" and item["call_id"] == call_id)

        output: str = (await self.server.wait_for(is_meant))["item"]["output"]
        return output

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """All outputs that the server has got."""
        items = [each["item"] for each in self.server.find("conversation.item.create")]
        found = [item for item in items if item["type"] == "function_call_output"]
        return [(item["call_id"], item["output"]) for item in found]

    async def settled(self) -> None:
        """Wait until the server has got all that was sent before."""
        await self.session.model.send_event(SendRaw({"type": "input_audio_buffer.clear"}))
        await self.hear("input_audio_buffer.clear")

    async def hung_up(self) -> None:
        """Wait until the client has closed the connection."""
        await self.server.wait_for_open(0)


@asynccontextmanager
async def talk_to(
    agent: Agent,
    *,
    context: Any = None,
    config: RealtimeConfig | None = None,
    settings: RealtimeSettings | None = None,
    model: RealtimeModel | None = None,
    playback: PlaybackTracker | None = None,
    collects: bool = True,
) -> AsyncIterator[Talk]:
    """A session with an agent and a server of its own.

    A test that iterates over the session itself says `collects=False`.
    """
    replies: deque[Any] = deque()

    def script(_number: int) -> Iterator[Any]:
        while True:
            yield replies.popleft() if replies else Answer()

    async with RealtimeServer(script) as server:
        runner = RealtimeRunner(agent, model=model or OpenAIRealtime(), config=config)
        reach = RealtimeModelConfig(
            url=server.url,
            api_key="key",
            settings=settings or RealtimeSettings(),
            playback_tracker=playback,
        )
        collecting: asyncio.Task[None] | None = None
        try:
            async with runner.run(context, reach) as session:
                talk = Talk(session, server, replies)
                if collects:
                    collecting = asyncio.create_task(talk.collect())
                yield talk
        finally:
            if collecting is not None:
                collecting.cancel()
                await asyncio.gather(collecting, return_exceptions=True)
        await server.wait_for_open(0)
