"""Models behind the Chat Completions API, which most servers of open models speak.

Items become messages and come back as items. Reasoning has no place in messages and is left out;
an item or a setting without a counterpart is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from capsule_tasks.errors import InvalidSetting, ModelFailed
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

_NAMES_OF_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_completion_tokens",
    "verbosity": "verbosity",
    "store": "store",
    "metadata": "metadata",
}
_DELTAS: dict[str, Any] = {
    "content": "text",
    "refusal": "refusal",
    "reasoning_content": "reasoning",  # of servers of open models
}


class OpenAIChat(OpenAIModel):
    """A model of a server that speaks Chat Completions, through the official client.

    Needs the extra `openai`.
    """

    async def get_response(self, request: ModelRequest) -> ModelReply:
        arguments = request_arguments(self.name, request)
        call = (await self._clients.current()).chat.completions.with_raw_response.create
        reply, request_id = await whole_reply(self.name, call, arguments)
        if error := reply.get("error"):
            raise failure_of_reply(self.name, error.get("code"), error.get("message"))
        if not reply.get("choices"):
            raise ModelFailed(self.name, f"its reply has no choices: {str(reply)[:100]}")
        choice = reply["choices"][0]
        return reply_of(self.name, request.tools, choice, reply.get("usage"), request_id)

    async def stream_response(
        self, request: ModelRequest
    ) -> AsyncIterator[ModelDelta | ModelReply]:
        arguments = request_arguments(self.name, request)
        arguments["stream_options"] = {"include_usage": True}
        call = (await self._clients.current()).chat.completions.with_raw_response.create
        whole = StreamedChoice()
        async with aclosing(streamed_reply(self.name, call, arguments)) as chunks:
            async for chunk, request_id in chunks:
                whole.request_id = request_id
                for delta in whole.deltas_of(chunk):
                    yield delta
        if whole.choice["finish_reason"] is None:
            why = "its stream ended before the reply was complete"
            raise ModelFailed(self.name, why, is_retryable=True)
        yield reply_of(self.name, request.tools, whole.choice, whole.usage, whole.request_id)


# --- the request -------------------------------------------------------------------------------


def request_arguments(model: str, request: ModelRequest) -> dict[str, Any]:
    """The arguments of `client.chat.completions.create`."""
    settings = request.settings
    _refuse_what_has_no_place(request)
    arguments: dict[str, Any] = {"model": model, "messages": messages_of(model, request)}
    for name, sent_as in _NAMES_OF_SETTINGS.items():
        if (value := getattr(settings, name)) is not None:
            arguments[sent_as] = value
    if settings.reasoning and settings.reasoning.get("effort"):
        arguments["reasoning_effort"] = settings.reasoning["effort"]
    if (schema := request.output_schema) is not None:
        arguments["response_format"] = {"type": "json_schema", "json_schema": format_of(schema)}
    tools = [_tool(model, tool) for tool in request.tools]
    return completed_arguments(arguments, request, tools, _chosen)


def _refuse_what_has_no_place(request: ModelRequest) -> None:
    given = {
        "conversation_id": request.conversation_id,
        "previous_response_id": request.previous_response_id,
        "ModelSettings.truncation": request.settings.truncation,
    }
    for name, value in given.items():
        if value is not None:
            raise InvalidSetting(name, value, "None: Chat Completions have nothing like it")


def messages_of(model: str, request: ModelRequest) -> list[dict[str, Any]]:
    """The instructions and the items as messages.

    A text of the model and the calls after it are one message. The outputs of its calls come right
    behind it, as servers want them, also if somebody has said something in between.
    """
    messages: list[dict[str, Any]] = []
    outputs: dict[str, dict[str, Any]] = {}
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    is_open = False  # whether the model may have said more in the last message
    for item in request.input:
        match item.get("type", "message"):
            case "message" if item["role"] == "assistant":
                said = _assistant_message(model, item)
                if is_open and not _has_text(messages[-1]):
                    messages[-1] |= said
                else:
                    messages.append(said)
                is_open = True
            case "message":
                content = _content(model, item["content"], _user_part)
                messages.append({"role": item["role"], "content": content})
                is_open = False
            case "function_call":
                if not is_open:
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(_call(item))
                is_open = True
            case "function_call_output":
                call_id, content = item["call_id"], _content(model, item["output"], _text_part)
                outputs[call_id] = {"role": "tool", "tool_call_id": call_id, "content": content}
                is_open = False
            case "reasoning":
                continue
            case kind:
                raise _no_place(model, f"an item of type {kind!r}")
    return list(_with_outputs(messages, outputs))


def _with_outputs(
    messages: list[dict[str, Any]], outputs: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield message
        for call in message.get("tool_calls", ()):
            if call["id"] in outputs:
                yield outputs[call["id"]]


def _call(item: Item) -> dict[str, Any]:
    function = {"name": _wire_name(item), "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _assistant_message(model: str, item: Item) -> dict[str, Any]:
    if isinstance(item["content"], str):
        return {"role": "assistant", "content": item["content"]}
    message: dict[str, Any] = {"role": "assistant"}
    for part in item["content"]:
        kind = "refusal" if part["type"] == "refusal" else "content"
        text = part["refusal"] if kind == "refusal" else _text_part(model, part)["text"]
        message[kind] = message.get(kind, "") + text
    return {"content": None, **message} if "refusal" in message else {"content": "", **message}


def _has_text(message: dict[str, Any]) -> bool:
    return bool(message.get("content") or message.get("refusal"))


def _content(
    model: str, content: Any, part_of: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part_of(model, part) for part in content]


def _text_part(model: str, part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") not in {"input_text", "output_text", "text"}:
        raise _no_place(model, f"a part of type {part.get('type')!r} here")
    return {"type": "text", "text": part["text"]}


def _user_part(model: str, part: dict[str, Any]) -> dict[str, Any]:
    match part.get("type"):
        case "input_image" if part.get("image_url"):
            image = {"url": part["image_url"], "detail": part.get("detail") or "auto"}
            return {"type": "image_url", "image_url": image}
        case "input_file" if not part.get("file_url"):
            names = ("file_data", "file_id", "filename")
            return {"type": "file", "file": {name: part[name] for name in names if part.get(name)}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case _:
            return _text_part(model, part)


def _no_place(model: str, what: str) -> ModelFailed:
    return ModelFailed(model, f"Chat Completions have no place for {what}")


def _wire_name(named: ToolSpec | Item) -> str:
    """The name of a function, which has its namespace in it: the API has no namespaces."""
    if isinstance(named, ToolSpec):
        namespace, name = named.namespace, named.name
    else:
        namespace, name = named.get("namespace"), named["name"]
    return f"{namespace}__{name}" if namespace else name


def _tool(model: str, tool: ToolSpec) -> dict[str, Any]:
    if tool.hosted is not None:
        raise _no_place(model, f"the hosted tool {tool.name!r}")
    return {"type": "function", "function": {**function_of(tool), "name": _wire_name(tool)}}


def _chosen(tool: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _wire_name(tool)}}


# --- the reply ---------------------------------------------------------------------------------


class StreamedChoice:
    """The choice of a streamed reply, put together from its chunks."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] | None = None
        self.request_id: str | None = None
        self.choice: dict[str, Any] = {"message": {}, "finish_reason": None}
        self._calls: dict[int, dict[str, Any]] = {}

    def deltas_of(self, chunk: dict[str, Any]) -> Iterator[ModelDelta]:
        """Take in a chunk; the deltas are what it adds."""
        self.usage = chunk.get("usage") or self.usage
        for choice in (chunk.get("choices") or [])[:1]:
            self.choice["finish_reason"] = (
                choice.get("finish_reason") or self.choice["finish_reason"]
            )
            yield from self._added(choice.get("delta") or {})

    def _added(self, delta: dict[str, Any]) -> Iterator[ModelDelta]:
        message = self.choice["message"]
        for field, kind in _DELTAS.items():
            if text := delta.get(field):
                message[field] = message.get(field, "") + text
                yield ModelDelta(kind=kind, text=text)
        for place, piece in enumerate(delta.get("tool_calls") or []):
            yield from self._added_to_call(piece.get("index", place), piece)

    def _added_to_call(self, index: int, piece: dict[str, Any]) -> Iterator[ModelDelta]:
        call = self._calls.get(index)
        if call is None:
            call_id = piece.get("id") or _made_up_id()
            call = {"id": call_id, "function": {"name": "", "arguments": ""}}
            self._calls[index] = call
            self.choice["message"].setdefault("tool_calls", []).append(call)
        added = piece.get("function") or {}
        call["function"]["name"] += added.get("name") or ""
        if text := added.get("arguments"):
            call["function"]["arguments"] += text
            yield ModelDelta(kind="arguments", text=text, call_id=call["id"])


def reply_of(
    model: str,
    tools: Sequence[ToolSpec],
    choice: dict[str, Any],
    usage: dict[str, Any] | None,
    request_id: str | None,
) -> ModelReply:
    """The reply that a choice is. Raises ModelFailed for one that is not complete."""
    if (reason := choice.get("finish_reason")) in {"length", "content_filter"}:
        raise ModelFailed(model, f"its reply is incomplete: {reason}")
    items = list(_items(choice.get("message") or {}, tools))
    return ModelReply(
        items=items,
        spent=spent_of(usage, "prompt_tokens", "completion_tokens"),
        request_id=request_id,
    )


def _items(message: dict[str, Any], tools: Sequence[ToolSpec]) -> Iterator[Item]:
    content: list[dict[str, Any]] = []
    if message.get("content"):
        content.append({"type": "output_text", "text": message["content"], "annotations": []})
    if message.get("refusal"):
        content.append({"type": "refusal", "refusal": message["refusal"]})
    if content:
        fields = {"role": "assistant", "status": "completed", "content": content}
        yield {"type": "message", **fields}
    known = {_wire_name(tool): tool for tool in tools}
    for call in message.get("tool_calls") or []:
        function = call["function"]
        tool = known.get(function["name"])
        yield {
            "type": "function_call",
            "call_id": call.get("id") or _made_up_id(),
            "name": tool.name if tool else function["name"],
            **({"namespace": tool.namespace} if tool and tool.namespace else {}),
            "arguments": function.get("arguments") or "{}",
            "status": "completed",
        }


def _made_up_id() -> str:
    """An id for a call of a server that gives none."""
    return f"call_{uuid4().hex}"
