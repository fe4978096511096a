"""Agents whose models are scripted: the same for the SDK alone, for the driver and for a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from agents import Agent, Model, function_tool
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
)

OUTPUT_BYTES = 1024


class CallingModel(Model):
    """Calls a tool as often as the run's first message says, and then answers."""

    def __init__(self, tool: str, *, waits: Callable[[], None] | None = None) -> None:
        """With `waits` the model does not answer: it calls `waits`, and lets the run wait."""
        self._tool = tool
        self._waits = waits

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the runs are streamed")

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items = kwargs["input"] if "input" in kwargs else args[1]
        made = sum(item.get("type") == "function_call_output" for item in items)
        is_last = made >= int(items[0]["content"])
        if is_last and self._waits is not None:
            self._waits()
            await asyncio.Event().wait()
        output = _answer(made) if is_last else self._call(made)
        response = Response(
            id=f"resp_{made}",
            created_at=0,
            model="scripted",
            object="response",
            output=[output],
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCreatedEvent(response=response, sequence_number=0, type="response.created")
        yield ResponseOutputItemDoneEvent(
            item=output, output_index=0, sequence_number=1, type="response.output_item.done"
        )
        yield ResponseCompletedEvent(
            response=response, sequence_number=2, type="response.completed"
        )

    def _call(self, number: int) -> ResponseFunctionToolCall:
        return ResponseFunctionToolCall(
            id=f"fc_{number}",
            call_id=f"call_{number}",
            name=self._tool,
            arguments=json.dumps({"order": number}),
            type="function_call",
        )


def _answer(number: int) -> ResponseOutputMessage:
    text = ResponseOutputText(text=f"{number} orders", type="output_text", annotations=[])
    return ResponseOutputMessage(
        id="msg_1", content=[text], role="assistant", status="completed", type="message"
    )


def agent(*, needs_approval: bool = False, waits: Callable[[], None] | None = None) -> Agent[Any]:
    @function_tool(needs_approval=needs_approval)
    async def look_up(order: int) -> str:
        """Look an order up."""
        return f"{order:04}".ljust(OUTPUT_BYTES, "x")

    return Agent(name="support", model=CallingModel("look_up", waits=waits), tools=[look_up])
