"""Opens sessions for tests, and reads their events one after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from capsule_tasks.realtime import RealtimeConfig, RealtimeModelConfig, RealtimeRunner
from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.testing.realtime import RealtimeServer

WAIT_S = 5.0


class Opened:
    """An open session, and the events that were read of it."""

    def __init__(self, session: Any, server: RealtimeServer) -> None:
        self.session = session
        self.server = server
        self.seen: list[Any] = []
        self._taken: Counter[str] = Counter()

    async def until(self, kind: str) -> Any:
        """The next event of a type; others may come before it or after it, and are read, too.

        Raises the error that the session failed with.
        """
        self._taken[kind] += 1
        async with asyncio.timeout(WAIT_S):
            while len(found := self.of(kind)) < self._taken[kind]:
                try:
                    self.seen.append(await anext(self.session.__aiter__()))
                except StopAsyncIteration:
                    raise AssertionError(f"the session has ended with {self.kinds}") from None
        return found[self._taken[kind] - 1]

    async def rest(self) -> None:
        """Read all events up to the end of the session. Raises the error that it failed with."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.session:
                self.seen.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.type for event in self.seen]

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.seen if event.type == kind]

    def outputs(self) -> list[tuple[str, str]]:
        """The outputs that the server has got over all connections."""
        items = [each["item"] for each in self.server.find("conversation.item.create")]
        found = [item for item in items if item["type"] == "function_call_output"]
        return [(item["call_id"], item["output"]) for item in found]

    async def output(self, call_id: str) -> str:
        """The output of a call, as soon as the server has it."""

        def found() -> list[str]:
            return [text for each, text in self.outputs() if each == call_id]

        texts = await self.server.wait_until(found, f"the output of call {call_id!r}")
        assert len(texts) == 1
        return texts[0]


@asynccontextmanager
async def opened(
    server: RealtimeServer,
    agent: Agent,
    *,
    says: str | None = "hi",
    history: Any = None,
    state: RunState | None = None,
    model: Any = None,
    open_approvals: Literal["return", "abandon"] = "return",
) -> AsyncIterator[Opened]:
    """An open session, whose user has said something. It is closed at the end of the block."""
    runner = RealtimeRunner(agent, model, RealtimeConfig(open_approvals=open_approvals))
    reach = RealtimeModelConfig(url=server.url, api_key="a key")
    async with runner.run(None, reach, history=history, state=state) as session:
        if says is not None:
            await session.send_message(says)
        yield Opened(session, server)
