"""Replies of a server of Chat Completions: items of a `Reply` as a completion, and as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_FINISHED_AS = {"response.completed": "stop", "response.incomplete": "length"}


def completion_of(
    output: Sequence[dict[str, Any]], ending: str, body: dict[str, Any], number: int
) -> dict[str, Any]:
    """The whole completion; messages and function calls among the items become its message."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for item in output:
        if item["type"] == "message":
            for part in item["content"]:
                field = "refusal" if part["type"] == "refusal" else "content"
                message[field] = (message[field] or "") + part.get("text", part.get("refusal"))
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    finish = "tool_calls" if "tool_calls" in message else _FINISHED_AS.get(ending)
    return {
        "id": f"chatcmpl_{number}",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": body.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }


def chunks_of(completion: dict[str, Any], ending: str, size: int) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed completion, in the order of the real ones."""
    (choice,) = completion["choices"]
    message = choice["message"]

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        kind = "chat.completion.chunk"
        return {**completion, "object": kind, "choices": choices, "usage": None}

    yield chunk({"role": "assistant", "content": ""})
    for field in ("content", "refusal"):
        text = message[field] or ""
        for start in range(0, len(text), size):
            yield chunk({field: text[start : start + size]})
    for index, call in enumerate(message.get("tool_calls", [])):
        named = {"name": call["function"]["name"], "arguments": ""}
        yield chunk({"tool_calls": [{**call, "index": index, "function": named}]})
        text = call["function"]["arguments"]
        for start in range(0, len(text), size):
            piece = {"arguments": text[start : start + size]}
            yield chunk({"tool_calls": [{"index": index, "function": piece}]})
    if ending == "error":
        yield {"error": {"message": "broken", "code": "server_error"}}
    elif ending:
        yield chunk({}, choice["finish_reason"])
        yield {**completion, "object": "chat.completion.chunk", "choices": []}
