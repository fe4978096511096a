"""The server's messages, as far as they are acted on (GA names of the Realtime API)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from capsule_tasks.runs.records import Item, Spent

_NonEmpty = Annotated[str, Meta(min_length=1)]
ContentIndex = Annotated[int, Meta(ge=0, lt=1024)]
"""The place of a part in an item. Those before it are made up if they are not known."""


class Response(msgspec.Struct, frozen=True):
    """A response. Only its ids are checked: one that ends with an odd usage has ended, too."""

    id: str | None = None
    status: Any = None
    status_details: Any = None
    usage: Any = None
    conversation_id: str | UnsetType | None = UNSET
    """None for a response that is not part of the conversation."""


class ServerMessage(msgspec.Struct, frozen=True):
    """A message of the server. Each type has some of the fields."""

    type: str
    response_id: str = ""
    item_id: str = ""
    content_index: ContentIndex = 0
    delta: msgspec.Raw = msgspec.Raw(b'""')
    """JSON: that of messages of unknown types may be anything."""
    response: Response = Response()
    item: Item = {}
    previous_item_id: str | None = None
    session: dict[str, Any] = {}
    error: dict[str, Any] = {}
    transcript: str | None = None
    audio_start_ms: int = 0
    audio_end_ms: int = 0


class AudioMessage(msgspec.Struct, frozen=True):
    """A message with audio, which is decoded from base64 as the message is read."""

    type: str
    response_id: str
    item_id: str
    delta: bytes
    content_index: ContentIndex = 0


_AUDIO_TYPE = b'"response.output_audio.delta"'
_audio_decoder = msgspec.json.Decoder(AudioMessage)
_decoder = msgspec.json.Decoder(ServerMessage)
decode_text = msgspec.json.Decoder(str).decode


def decode(raw: bytes) -> ServerMessage | AudioMessage:
    """A message of the server. Raises msgspec.DecodeError."""
    return (_audio_decoder if _AUDIO_TYPE in raw else _decoder).decode(raw)


# Each item is also told of by a message of the conversation, which has the item's place. So
# `response.output_item.added` is ignored; `….done` says which response has called a tool.
_IGNORED = """
    conversation.created conversation.item.created
    conversation.item.input_audio_transcription.delta
    conversation.item.input_audio_transcription.segment input_audio_buffer.cleared
    input_audio_buffer.committed input_audio_buffer.dtmf_event_received
    input_audio_buffer.speech_stopped output_audio_buffer.cleared output_audio_buffer.started
    output_audio_buffer.stopped rate_limits.updated response.content_part.added
    response.content_part.done response.function_call_arguments.delta
    response.function_call_arguments.done response.output_audio_transcript.done
    response.output_item.added response.output_text.done
"""
IGNORED = frozenset(_IGNORED.split())
"""Types of messages of which nothing follows."""


class _Part(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    transcript: str | None = None


class _CheckedItem(msgspec.Struct):
    """The fields without which an item can be neither shown nor stored nor sent again."""

    id: _NonEmpty
    type: _NonEmpty
    role: str | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    output: str | None = None
    content: list[_Part] | None = None


def item_of(raw: Item, *, is_done: bool) -> Item:
    """An item in the words of Responses: with a status, and without the data of audio.

    Raises ValueError if a field that somebody needs is missing or of another type.
    """
    checked = msgspec.convert(raw, _CheckedItem)
    if checked.type == "message" and not checked.role:
        raise ValueError("a message has no role")
    item = {name: value for name, value in raw.items() if value is not None and name != "object"}
    item.setdefault("status", "completed" if is_done else "in_progress")
    if item.get("type") == "message":
        item["content"] = [
            {name: value for name, value in part.items() if value is not None and name != "audio"}
            for part in item.get("content") or ()
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
