"""A model for openai-agents with the answers that a test wrote down for it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agents import Model, ModelResponse, Usage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
)


class ScriptedModel(Model):
    """Answers with its turns in order, raises those that are errors, keeps what it was asked."""

    def __init__(self, *turns: Any) -> None:
        self.turns = deque(turns)
        self.asked: list[Any] = []

    def answer(self, asked: Any) -> list[Any]:
        self.asked.append(asked)
        turn = self.turns.popleft()
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, list) else [turn]

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        output = self.answer(kwargs["input"] if "input" in kwargs else args[1])
        return ModelResponse(output, Usage(requests=1), response_id=f"resp_{len(self.asked)}")

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        output = self.answer(kwargs["input"] if "input" in kwargs else args[1])
        response = Response(
            id=f"resp_{len(self.asked)}",
            created_at=0,
            model="scripted",
            object="response",
            output=output,
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCreatedEvent(response=response, sequence_number=0, type="response.created")
        for number, item in enumerate(output):
            yield ResponseOutputItemDoneEvent(
                item=item,
                output_index=number,
                sequence_number=number + 1,
                type="response.output_item.done",
            )
        yield ResponseCompletedEvent(
            response=response, sequence_number=len(output) + 1, type="response.completed"
        )


class StatelessModel(ScriptedModel):
    """Answers by how many calls of its own were answered before, as a model does in any process."""

    def __init__(self, *turns: Sequence[Any], on_call: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._replies = [list(turn) for turn in turns]
        self._on_call = on_call

    def answer(self, asked: Any) -> list[Any]:
        self.asked.append(asked)
        self._on_call()
        items = asked if isinstance(asked, list) else []
        known = {item.get("call_id") for item in items if str(item.get("type")).endswith("output")}
        for turn in self._replies:
            ids = {getattr(item, "call_id", None) for item in turn}
            if not ids <= known:
                return turn
        raise AssertionError("the model was asked after its last answer")


def says(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(
        id=f"msg_{text[:8]}",
        content=[content],
        role="assistant",
        status="completed",
        type="message",
    )


def calls(name: str, arguments: str, call_id: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        call_id=call_id, name=name, arguments=arguments, type="function_call"
    )
