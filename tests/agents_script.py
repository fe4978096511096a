"""A model for openai-agents with the answers that a test wrote down for it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)


class ScriptedModel(Model):
    """Answers with its turns in order, raises those that are errors, keeps what it was asked."""

    def __init__(self, *turns: Any) -> None:
        self.turns = deque(turns)
        self.asked: list[Any] = []

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["input"])
        turn = self.turns.popleft()
        if isinstance(turn, Exception):
            raise turn
        output = turn if isinstance(turn, list) else [turn]
        return ModelResponse(output, Usage(), response_id=f"resp_{len(self.asked)}")

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


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
