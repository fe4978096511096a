"""Models for tests of agents: replies that a test wrote, in place of a server's."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from inspect import isawaitable
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import snake_case
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.models.model import ModelDelta, ModelReply, ModelRequest
from capsule_tasks.runs.records import Item

Scripted = Any
"""One reply of a script: a text, an item, a list of both, a `ModelReply`, an exception to raise,
`breaks_off(…)`, or a function of the request that returns one of these, or an awaitable of it."""

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
"""The types of items that a server gives ids, and the beginnings of those ids."""


# --- what a model says -------------------------------------------------------------------------


def says(text: str) -> Item:
    """A message of the model."""
    content = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [content]}


def refuses(text: str) -> Item:
    """A message in which the model refuses to answer."""
    content = {"type": "refusal", "refusal": text}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [content]}


def reasons(text: str) -> Item:
    """Reasoning of the model, with its summary."""
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def calls(
    tool: str,
    arguments: dict[str, Any] | str | None = None,
    call_id: str | None = None,
    *,
    namespace: str | None = None,
) -> Item:
    """A call of a tool, whose arguments may be any text. Without `call_id` it is given one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    item: Item = {"type": "function_call", "name": tool, "arguments": text, "status": "completed"}
    if call_id is not None:
        item["call_id"] = call_id
    if namespace is not None:
        item["namespace"] = namespace
    return item


def hands_over(
    to: Agent | Handoff | str,
    arguments: dict[str, Any] | str | None = None,
    call_id: str | None = None,
) -> Item:
    """A call of the tool that hands the run over to an agent, or to the agent of this name."""
    if isinstance(to, str):
        return calls(f"transfer_to_{snake_case(to)}", arguments, call_id)
    handoff = to if isinstance(to, Handoff) else Handoff(agent=to)
    return calls(handoff.tool_name, arguments, call_id)


@dataclass(frozen=True)
class BreaksOff:
    """A streamed reply that fails after its deltas."""

    items: Any
    error: Exception


def breaks_off(items: Any, error: Exception) -> BreaksOff:
    """A reply whose stream has all the deltas of `items` and then fails. Unstreamed it fails."""
    return BreaksOff(items, error)


# --- the models --------------------------------------------------------------------------------


class ScriptedModel:
    """A model that gives its replies in order, and keeps the requests that it was sent.

    It may be used by several threads and event loops. A request after the last reply is an
    `AssertionError` that says what was asked.
    """

    def __init__(self, replies: Iterable[Scripted] = (), *, delta_chars: int = 16) -> None:
        self._replies = iter(replies)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._delta_chars = delta_chars
        self.requests: list[ModelRequest] = []

    async def get_response(self, request: ModelRequest) -> ModelReply:
        reply = await self._reply_to(request)
        if isinstance(reply, BreaksOff):
            raise reply.error
        return reply

    async def stream_response(
        self, request: ModelRequest
    ) -> AsyncIterator[ModelDelta | ModelReply]:
        reply = await self._reply_to(request)
        for delta in _deltas(reply.items, self._delta_chars):
            yield delta
        if isinstance(reply, BreaksOff):
            raise reply.error
        yield reply

    def choose(self, request: ModelRequest) -> tuple[int, Scripted]:
        """The number of the reply among those of the script, and the reply."""
        try:
            return next(self._numbers), next(self._replies)
        except StopIteration:
            raise AssertionError(_after_the_script(request, len(self.requests) - 1)) from None

    async def _reply_to(self, request: ModelRequest) -> ModelReply | BreaksOff:
        request = replace(request, input=list(request.input))  # the run goes on with its own list
        with self._lock:
            self.requests.append(request)
            number, scripted = self.choose(request)
        if callable(scripted):
            scripted = scripted(request)
        if isawaitable(scripted):
            scripted = await scripted
        return _as_reply(scripted, request, number)


class StatelessModel(ScriptedModel):
    """A model that chooses its reply by the request alone, so that any process goes on with it.

    The reply is the first one of the script that calls tools of whose outputs one is missing in
    the input, or that calls none. So the calls of the script need ids that differ.
    """

    def __init__(
        self,
        replies: Sequence[Scripted],
        *,
        on_call: Callable[[ModelRequest], Awaitable[None] | None] | None = None,
        delta_chars: int = 16,
    ) -> None:
        """`on_call` is called before each reply: a test kills the process there."""
        super().__init__(delta_chars=delta_chars)
        self._script = [_as_items(reply) for reply in replies]
        self._on_call = on_call

    def choose(self, request: ModelRequest) -> tuple[int, Scripted]:
        known = {item["call_id"] for item in request.input if _is_output(item)}
        for number, items in enumerate(self._script, 1):
            ids = {item.get("call_id") for item in items if item["type"] == "function_call"}
            if None in ids:
                raise AssertionError(f"reply {number} of the script has a call without a call_id")
            if not ids or not ids <= known:
                return number, items
        raise AssertionError(_after_the_script(request, len(self._script)))

    async def _reply_to(self, request: ModelRequest) -> ModelReply | BreaksOff:
        if self._on_call is not None and isawaitable(done := self._on_call(request)):
            await done
        return await super()._reply_to(request)


# --- from a script to a reply ------------------------------------------------------------------


def _as_reply(scripted: Scripted, request: ModelRequest, number: int) -> ModelReply | BreaksOff:
    if isinstance(scripted, BaseException):
        raise scripted
    if isinstance(scripted, ModelReply):
        return scripted
    if isinstance(scripted, BreaksOff):
        return BreaksOff(_with_ids(_as_items(scripted.items), request, number), scripted.error)
    items = _with_ids(_as_items(scripted), request, number)
    return ModelReply(items=items, response_id=f"resp_{_digest(request, number)}")


def _as_items(scripted: Scripted) -> list[Item]:
    parts = scripted if isinstance(scripted, (list, tuple)) else [scripted]
    items = [says(part) if isinstance(part, str) else part for part in parts]
    if strange := [item for item in items if not isinstance(item, dict)]:
        raise TypeError(f"a scripted reply is made of texts and items, and not of {strange[0]!r}")
    return items


def _with_ids(items: list[Item], request: ModelRequest, number: int) -> list[Item]:
    """Copies of the items with ids, as a server gives them.

    A conversation has each id once, and the same script gives the same ids in every process.
    """
    digest = _digest(request, number)
    named = []
    for place, item in enumerate(items):
        given: Item = {}
        if prefix := _ID_PREFIXES.get(item["type"]):
            given["id"] = f"{prefix}_{digest}_{place}"
        if item["type"] == "function_call":
            given["call_id"] = f"call_{digest}_{place}"
        named.append(given | item)
    return named


def _digest(request: ModelRequest, number: int) -> str:
    asked = [number, request.instructions, len(request.input), request.input[-1:]]
    return sha256(msgspec.json.encode(asked)).hexdigest()[:12]


def _deltas(items: Iterable[Item], size: int) -> Iterator[ModelDelta]:
    for item in items:
        for kind, text in _texts(item):
            for start in range(0, len(text), size):
                piece = text[start : start + size]
                yield ModelDelta(kind=kind, text=piece, call_id=item.get("call_id"))


def _texts(item: Item) -> Iterator[tuple[Any, str]]:
    match item["type"]:
        case "message":
            for part in item["content"]:
                kind = "refusal" if part["type"] == "refusal" else "text"
                yield kind, part[kind]
        case "reasoning":
            yield from (("reasoning", part["text"]) for part in item["summary"])
        case "function_call":
            yield "arguments", item["arguments"]


def _is_output(item: Item) -> bool:
    return "call_id" in item and str(item.get("type")).endswith("_output")


def _after_the_script(request: ModelRequest, replies: int) -> str:
    last = msgspec.json.encode(list(request.input[-1:])).decode()
    tools = ", ".join(tool.name for tool in request.tools) or "none"
    return (
        f"the scripted model has given all of its {replies} replies and was asked once more; "
        f"instructions: {request.instructions!r}; {len(request.input)} items, the last one of "
        f"them: {last[:500]}; tools: {tools}"
    )
