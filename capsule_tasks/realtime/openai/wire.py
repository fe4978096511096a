"""The server's messages, as far as they are acted on (GA names of the Realtime API)."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from capsule_tasks.runs.records import Item, Spent

ContentIndex = Annotated[int, Meta(ge=0, lt=1024)]
"""The place of a part in an item. Those before it are made up if they are not known."""


class ServerMessage(msgspec.Struct, frozen=True):
    """A message of the server, of which nothing follows if it is no more than that."""

    kind: ClassVar[str]


class AudioPiece(ServerMessage, frozen=True):
    delta: bytes
    response_id: str
    item_id: str
    content_index: ContentIndex = 0


class OfContent(ServerMessage, frozen=True):
    """About a part of an item. Each kind has some of the fields."""

    item_id: str
    content_index: ContentIndex = 0
    response_id: str = ""
    delta: str = ""
    transcript: str | None = None
    error: Any = None
    audio_start_ms: int = 0
    audio_end_ms: int = 0


class OfItem(ServerMessage, frozen=True):
    item: Item
    previous_item_id: str | None = None
    response_id: str | None = None


# What a server says beside the point is not checked: a response that ends with a usage that nobody
# understands has ended all the same.


class Response(msgspec.Struct, frozen=True):
    id: str | None = None
    status: Any = None
    status_details: Any = None
    usage: Any = None
    conversation_id: str | UnsetType | None = UNSET
    """None for a response that is not part of the conversation."""


class OfResponse(ServerMessage, frozen=True):
    response: Response


class OfSession(ServerMessage, frozen=True):
    session: dict[str, Any]


class Error(msgspec.Struct, frozen=True):
    message: Any = None
    type: Any = None
    code: Any = None
    event_id: str | None = None
    """Of the client's message."""
    param: Any = None

    @property
    def text(self) -> str:
        return str(self.message or self.code or "the server gave no reason")


class OfError(ServerMessage, frozen=True):
    error: Error


# Each item is also told of by a message of the conversation, which has the item's place. So
# `response.output_item.added` is ignored; `….done` says which response has called a tool.
_SHAPES: dict[type[ServerMessage], str] = {
    AudioPiece: "response.output_audio.delta",
    OfContent: """
        response.output_audio.done response.output_text.delta
        response.output_audio_transcript.delta conversation.item.deleted
        conversation.item.truncated conversation.item.input_audio_transcription.completed
        conversation.item.input_audio_transcription.failed input_audio_buffer.speech_started
        input_audio_buffer.timeout_triggered
    """,
    OfItem: """
        conversation.item.added conversation.item.created conversation.item.done
        conversation.item.retrieved response.output_item.done
    """,
    OfResponse: "response.created response.done",
    OfSession: "session.created session.updated",
    OfError: "error",
    ServerMessage: """
        conversation.created conversation.item.input_audio_transcription.delta
        conversation.item.input_audio_transcription.segment input_audio_buffer.cleared
        input_audio_buffer.committed input_audio_buffer.dtmf_event_received
        input_audio_buffer.speech_stopped output_audio_buffer.cleared output_audio_buffer.started
        output_audio_buffer.stopped rate_limits.updated response.content_part.added
        response.content_part.done response.function_call_arguments.delta
        response.function_call_arguments.done response.output_audio_transcript.done
        response.output_item.added response.output_text.done
    """,
}


def _kinds() -> dict[str, Any]:
    kinds = {}
    for shape, names in _SHAPES.items():
        for kind in names.split():
            kinds[kind] = msgspec.defstruct(
                kind.replace(".", "_"),
                [],
                bases=(shape,),
                namespace={"kind": kind},
                tag_field="type",
                tag=kind,
                frozen=True,
            )
    return kinds


class _Head(msgspec.Struct):
    type: str


_KINDS = _kinds()
_decoder: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(reduce(or_, _KINDS.values()))
_head = msgspec.json.Decoder(_Head)


def decode(raw: bytes) -> ServerMessage | None:
    """A message, or None if its type is not known. Raises msgspec.DecodeError."""
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError:
        if _head.decode(raw).type in _KINDS:
            raise
        return None


_TEXTS_OF_ITEMS = {
    "message": ("role",),
    "function_call": ("name", "call_id", "arguments"),
    "function_call_output": ("call_id", "output"),
}
_TEXTS_OF_PARTS = ("type", "text", "transcript")


def flaw_of(raw: Item) -> str | None:
    """What is wrong with an item, so that it can be neither shown nor stored nor sent again."""
    if not raw.get("id"):
        return "an item has no id"
    kind = raw.get("type")
    if not (isinstance(kind, str) and kind):
        return "an item has no type"
    if kind == "message" and not raw.get("role"):
        return "a message has no role"
    for name in ("id", *_TEXTS_OF_ITEMS.get(kind, ())):
        if not isinstance(raw.get(name), str | None):
            return f"the {name} of an item is no text"
    content = raw.get("content")
    if not isinstance(content, list | None):
        return "the content of an item is no list"
    parts = [part for part in content or () if isinstance(part, dict)]
    for name in _TEXTS_OF_PARTS:
        if not all(isinstance(part.get(name), str | None) for part in parts):
            return f"the {name} of a part of an item is no text"
    return None


def item_of(raw: Item, *, is_done: bool) -> Item:
    """An item in the words of Responses: with a status, and without the data of audio."""
    item = {name: value for name, value in raw.items() if value is not None and name != "object"}
    item.setdefault("status", "completed" if is_done else "in_progress")
    if item.get("type") == "message":
        parts = (part for part in item.get("content") or () if isinstance(part, dict))
        item["content"] = [
            {name: value for name, value in part.items() if value is not None and name != "audio"}
            for part in parts
        ]
    elif item.get("type") == "function_call":
        item = {"name": "", "arguments": "", "call_id": "", **item}
    return item


def nested(value: Any, *names: str) -> Any:
    """A field within fields; None if there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def spent_of(usage: Any) -> Spent | None:
    if usage is None:
        return None

    def count(*names: str) -> int:
        found = nested(usage, *names)
        return found if isinstance(found, int) else 0

    return Spent(
        requests=1,
        input_tokens=count("input_tokens"),
        cached_tokens=count("input_token_details", "cached_tokens"),
        output_tokens=count("output_tokens"),
        reasoning_tokens=count("output_token_details", "reasoning_tokens"),
    )
