"""A server as a protocol without a connection sees it."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from capsule_tasks.realtime.model import (
    Command,
    ModelEvent,
)
from capsule_tasks.realtime.openai.protocol import Protocol
from capsule_tasks.realtime.playback import UnplayedAudio

EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


class Server:
    """A protocol, with what it emits and writes; each message is one that OpenAI may send."""

    def __init__(self) -> None:
        self.events: list[ModelEvent] = []
        self.now_s = 0.0
        self.audio = UnplayedAudio(clock=lambda: self.now_s)
        self.protocol = Protocol("gpt-realtime", self.audio, self.events.append)

    def say(self, kind: str, *, is_typed: bool = True, **fields: Any) -> list[Any]:
        """The events that a message of the server makes, then the messages that answer it."""
        message = {"type": kind, "event_id": "event_1", **fields}
        if is_typed:
            EVENTS.validate_python(message)
        self.events.clear()
        answers = self.protocol.received(msgspec.json.encode(message))
        return [*self.events, *answers]

    def response(self, kind: str, response_id: str = "resp_1", **fields: Any) -> list[Any]:
        fields = {"conversation_id": "conv_1", **fields}
        return self.say(f"response.{kind}", response={"id": response_id, **fields})

    def speaks(
        self, data: bytes, response_id: str = "resp_1", item_id: str = "item_1"
    ) -> list[Any]:
        return self.say(
            "response.output_audio.delta",
            delta=base64.b64encode(data).decode(),
            response_id=response_id,
            item_id=item_id,
            content_index=0,
            output_index=0,
        )

    def session(self, *, is_updated: bool = True, **turn_detection: Any) -> list[Any]:
        audio = {"input": {"turn_detection": turn_detection or None}}
        kind = "session.updated" if is_updated else "session.created"
        return self.say(kind, session={"type": "realtime", "audio": audio})

    def do(self, command: Command) -> list[Any]:
        """The events that a command makes, and the messages that are to be written."""
        self.events.clear()
        messages = self.protocol.command(command)
        return [*self.events, *messages]
