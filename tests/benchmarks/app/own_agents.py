"""The agents of `scripted_agents`, declared for our own engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.models.model import ModelDelta, ModelReply, ModelRequest
from capsule_tasks.runs.records import Item
from tests.benchmarks.app.scripted_agents import OUTPUT_BYTES


class CallingModel:
    """Calls a tool as often as the run's first message says, and then answers."""

    tool = "look_up"

    async def get_response(self, request: ModelRequest) -> ModelReply:
        items = request.input
        made = sum(item.get("type") == "function_call_output" for item in items)
        is_last = made >= int(items[0]["content"])
        item = _answer(made) if is_last else _call(self.tool, made)
        return ModelReply(items=[item], response_id=f"resp_{made}")

    async def stream_response(
        self, request: ModelRequest
    ) -> AsyncIterator[ModelDelta | ModelReply]:
        yield await self.get_response(request)


def _call(tool: str, number: int) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"call_{number}",
        "name": tool,
        "arguments": json.dumps({"order": number}) if tool == "look_up" else "{}",
    }


def _answer(number: int) -> Item:
    text = {"type": "output_text", "text": f"{number} orders", "annotations": []}
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }


@function_tool
async def look_up(order: int) -> str:
    """Look an order up."""
    return f"{order:04}".ljust(OUTPUT_BYTES, "x")


class RelayingModel(CallingModel):
    """Hands the run over as often as the run's first message says, and then answers."""

    tool = "relay"


def agent() -> Agent:
    return Agent(name="support", model=CallingModel(), tools=[look_up])


def relay() -> Agent:
    """Two agents that hand the run over to each other: turns without tools."""
    one, other = (Agent(name=name, model=RelayingModel()) for name in ("one", "other"))
    one.handoffs = [Handoff(agent=other, name="relay")]
    other.handoffs = [Handoff(agent=one, name="relay")]
    return one
