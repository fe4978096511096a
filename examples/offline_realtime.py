"""A realtime model that needs neither a network nor a key, and follows one rule."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

from capsule_tasks.realtime import RealtimeModelConfig
from capsule_tasks.runs.models import ModelRequest, ToolSpec
from capsule_tasks.testing.realtime import RealtimeConnection, RealtimeServer

Rule = Callable[[ModelRequest], Any]


@asynccontextmanager
async def realtime_model(rule: Rule) -> AsyncIterator[RealtimeModelConfig]:
    """How to reach the stand-in that answers by this rule, or OpenAI if there is a key."""
    if os.environ.get("OPENAI_API_KEY"):
        yield RealtimeModelConfig()
        return

    def answer(connection: RealtimeConnection) -> Any:
        return rule(_request_of(connection))

    async with RealtimeServer(lambda _number: repeat(answer)) as server:
        yield RealtimeModelConfig(url=server.url, api_key="none")


def _request_of(connection: RealtimeConnection) -> ModelRequest:
    """The conversation so far, as a request to a model of runs."""
    tools = (
        ToolSpec(name=tool["name"], description="", parameters={})
        for tool in connection.settings.wire["tools"]
    )
    return ModelRequest(input=connection.conversation.items, tools=tuple(tools))
