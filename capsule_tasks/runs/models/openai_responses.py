"""Models behind the Responses API, whose items are the items of runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from capsule_tasks.errors import ModelFailed
from capsule_tasks.runs.models.model import ModelDelta, ModelReply, ModelRequest, ToolSpec
from capsule_tasks.runs.models.openai_client import (
    OpenAIModel,
    completed_arguments,
    failure_of_reply,
    format_of,
    function_of,
    spent_of,
    streamed_reply,
    whole_reply,
)
from capsule_tasks.runs.records import Item

_PLAIN_SETTINGS = (
    "temperature",
    "top_p",
    "max_output_tokens",
    "reasoning",
    "truncation",
    "store",
    "metadata",
)
"""Settings that the API has under the same name."""

_DELTAS: dict[str, Any] = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "arguments",
}


class OpenAIResponses(OpenAIModel):
    """A model of OpenAI, or of a server that speaks its Responses API, through the official client.

    Needs the extra `openai`.
    """

    async def get_response(self, request: ModelRequest) -> ModelReply:
        call = (await self._clients.current()).responses.with_raw_response.create
        arguments = request_arguments(self.name, request)
        reply, request_id = await whole_reply(self.name, call, arguments)
        return reply_of(self.name, reply, request_id)

    async def stream_response(
        self, request: ModelRequest
    ) -> AsyncIterator[ModelDelta | ModelReply]:
        call = (await self._clients.current()).responses.with_raw_response.create
        arguments = request_arguments(self.name, request)
        call_ids: dict[Any, str] = {}
        async with aclosing(streamed_reply(self.name, call, arguments)) as events:
            async for event, request_id in events:
                part = part_of(self.name, event, request_id, call_ids)
                if part is not None:
                    yield part
                if isinstance(part, ModelReply):
                    return
        why = "its stream ended before the reply was complete"
        raise ModelFailed(self.name, why, is_retryable=True)

    async def compact(
        self,
        items: Sequence[Item],
        *,
        instructions: str | None = None,
        previous_response_id: str | None = None,
    ) -> ModelReply:
        """The items that the server puts in place of these ones, or of a stored response and all
        before it. Raises ModelFailed; nothing is tried again.
        """
        call = (await self._clients.current()).responses.with_raw_response.compact
        given = {
            "input": list(items) or None,
            "instructions": instructions,
            "previous_response_id": previous_response_id,
        }
        arguments = {name: value for name, value in given.items() if value is not None}
        reply, request_id = await whole_reply(self.name, call, {"model": self.name, **arguments})
        return reply_of(self.name, reply, request_id)


# --- the request -------------------------------------------------------------------------------


def request_arguments(model: str, request: ModelRequest) -> dict[str, Any]:
    """The arguments of `client.responses.create`."""
    settings = request.settings
    arguments: dict[str, Any] = {"model": model, "input": list(request.input)}
    given = {
        "instructions": request.instructions,
        "conversation": request.conversation_id,
        "previous_response_id": request.previous_response_id,
        "text": _text_format(request),
        **{name: getattr(settings, name) for name in _PLAIN_SETTINGS},
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    return completed_arguments(arguments, request, _tools(request.tools), _chosen)


def _text_format(request: ModelRequest) -> dict[str, Any] | None:
    text: dict[str, Any] = {}
    if (schema := request.output_schema) is not None:
        text["format"] = {"type": "json_schema", **format_of(schema)}
    if request.settings.verbosity is not None:
        text["verbosity"] = request.settings.verbosity
    return text or None


def _tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The tools, those of a namespace together in the place of its first one."""
    sent: list[dict[str, Any]] = []
    namespaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        if tool.hosted is not None:
            sent.append(tool.hosted)
            continue
        function = {"type": "function", **function_of(tool)}
        if tool.namespace is None:
            sent.append(function)
            continue
        if tool.namespace not in namespaces:
            namespaces[tool.namespace] = []
            namespace = {"type": "namespace", "name": tool.namespace}
            namespace["description"] = f"The tools of {tool.namespace}."
            sent.append({**namespace, "tools": namespaces[tool.namespace]})
        namespaces[tool.namespace].append(function)
    return sent


def _chosen(tool: ToolSpec) -> dict[str, Any]:
    if tool.hosted is None:
        return {"type": "function", "name": tool.name}
    labels = ("type", "server_label")
    return {name: tool.hosted[name] for name in labels if name in tool.hosted}


# --- the reply ---------------------------------------------------------------------------------


def part_of(
    model: str, event: dict[str, Any], request_id: str | None, call_ids: dict[Any, str]
) -> ModelDelta | ModelReply | None:
    """The part of the reply that an event of a stream adds.

    Raises ModelFailed for an event that ends the stream without a reply.

    `call_ids` has the id of each call by the place of its item, once the item was announced.
    """
    kind = event.get("type")
    if delta := _DELTAS.get(str(kind)):
        call_id = call_ids.get(event.get("output_index")) if delta == "arguments" else None
        return ModelDelta(kind=delta, text=event["delta"], call_id=call_id)
    if kind == "response.output_item.added" and event["item"].get("type") == "function_call":
        call_ids[event["output_index"]] = event["item"]["call_id"]
    elif kind in {"response.completed", "response.failed", "response.incomplete"}:
        return reply_of(model, event["response"], request_id)
    elif kind == "error":
        raise failure_of_reply(model, event.get("code"), event.get("message"))
    return None


def reply_of(model: str, response: dict[str, Any], request_id: str | None) -> ModelReply:
    """The reply that a response is. Raises ModelFailed for one that is not complete."""
    status = response.get("status") or "completed"
    if status == "failed":
        error = response.get("error") or {}
        raise failure_of_reply(model, error.get("code"), error.get("message"))
    if status != "completed":
        reason = (response.get("incomplete_details") or {}).get("reason")
        raise ModelFailed(model, f"its reply is {status}" + (f": {reason}" if reason else ""))
    items = response.get("output")
    if not isinstance(items, list):
        raise ModelFailed(model, f"its reply has no output: {str(response)[:100]}")
    return ModelReply(
        items=items,
        spent=spent_of(response.get("usage"), "input_tokens", "output_tokens"),
        response_id=response.get("id"),
        request_id=request_id,
    )
