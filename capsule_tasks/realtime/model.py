"""The port to a realtime model: what a session tells it, and what it tells the session.

A model holds one connection at a time. It translates between the server's protocol and the
commands and events below, and owns what only the server's protocol knows: when a response may be
asked for, and how much audio was played when it is truncated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec

from capsule_tasks.realtime.settings import RealtimeModelConfig, RealtimeSettings
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.runs.records import Item, Spent

# --- events: from the model to the session ------------------------------------------------------


class ModelEvent(msgspec.Struct, frozen=True):
    """An event of a realtime model."""

    type: ClassVar[str]


class ResponseStarted(ModelEvent, frozen=True):
    """The model begins to answer."""

    type: ClassVar = "response_started"
    response_id: str


class ResponseEnded(ModelEvent, frozen=True):
    """The model has answered, or was stopped."""

    type: ClassVar = "response_ended"
    response_id: str
    status: Literal["completed", "cancelled", "incomplete", "failed"] = "completed"
    spent: Spent | None = None
    error: Mapping[str, Any] | None = None
    """Why it failed, in the words of the server."""


class AudioDelta(ModelEvent, frozen=True):
    """Audio of an answer."""

    type: ClassVar = "audio_delta"
    data: bytes
    response_id: str
    item_id: str
    content_index: int = 0


class AudioDone(ModelEvent, frozen=True):
    """All audio of an item was sent."""

    type: ClassVar = "audio_done"
    response_id: str
    item_id: str
    content_index: int = 0


class AudioInterrupted(ModelEvent, frozen=True):
    """Audio of an item is not to be played any more."""

    type: ClassVar = "audio_interrupted"
    item_id: str
    content_index: int = 0
    played_ms: int | None = None
    """How much was played; None if that is unknown, or if all of it was."""
    total_ms: int | None = None
    """How much audio of the item has come."""


class TextDelta(ModelEvent, frozen=True):
    """A piece of the text of an answer, or of the transcript of its audio."""

    type: ClassVar = "text_delta"
    delta: str
    response_id: str
    item_id: str
    content_index: int = 0
    is_transcript: bool = False


class ItemChanged(ModelEvent, frozen=True):
    """An item was added to the conversation, or has changed; the item is whole.

    `item` is in the words of OpenAI's Responses: it has an `id`, a `type` and a `status`. Audio is
    a part of type `output_audio` or `input_audio`, which has a `transcript` and no data.
    """

    type: ClassVar = "item_changed"
    item: Item
    after: str | None = None
    """The id of the item before it; None if it comes last, or is known already."""
    is_final: bool = False
    """Whether the server is done with the item, but for the transcript of audio of the user."""


class ItemTruncated(ModelEvent, frozen=True):
    """The server has cut the audio of an item, whose end was not played."""

    type: ClassVar = "item_truncated"
    item_id: str
    content_index: int = 0
    played_ms: int = 0
    total_ms: int | None = None


class ItemDeleted(ModelEvent, frozen=True):
    """An item was removed from the conversation."""

    type: ClassVar = "item_deleted"
    item_id: str


class InputTranscribed(ModelEvent, frozen=True):
    """Audio of the user has a transcript, or could not be transcribed."""

    type: ClassVar = "input_transcribed"
    item_id: str
    content_index: int = 0
    transcript: str | None = None
    error: Mapping[str, Any] | None = None


class InputTimedOut(ModelEvent, frozen=True):
    """The user was silent for as long as the turn detection allows."""

    type: ClassVar = "input_timed_out"
    item_id: str | None = None
    audio_start_ms: int = 0
    audio_end_ms: int = 0


class ToolCalled(ModelEvent, frozen=True):
    """The model calls a tool. The call's item came before, as `ItemChanged`."""

    type: ClassVar = "tool_called"
    name: str
    call_id: str
    arguments: str
    item_id: str | None = None
    response_id: str | None = None


class ModelErred(ModelEvent, frozen=True):
    """The server reports an error that does not end the connection."""

    type: ClassVar = "model_erred"
    code: str | None
    message: str
    event_id: str | None = None
    """The id of the client's message that the error is about."""
    data: Mapping[str, Any] | None = None


class ConnectionEnded(ModelEvent, frozen=True):
    """The connection is gone, and no event follows. It is not sent after `close()`."""

    type: ClassVar = "connection_ended"
    error: Exception | None = None
    """None if the server has closed it in the regular way."""


class ServerEvent(ModelEvent, frozen=True):
    """A message of the server as it came."""

    type: ClassVar = "server_event"
    raw: bytes

    @property
    def data(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.raw)
        return decoded


# --- commands: from the session to the model ----------------------------------------------------


class Command(msgspec.Struct, frozen=True):
    """Something that a session tells its model."""


class SendMessage(Command, frozen=True):
    """A message of the user; the model answers it, as soon as no other response is in the way."""

    content: tuple[Mapping[str, Any], ...]
    """Parts, such as `{"type": "input_text", "text": "…"}` and `input_image`."""


class SendAudio(Command, frozen=True):
    """A piece of what the user says. `commit` ends the user's turn where no server detects it."""

    data: bytes
    commit: bool = False


class SendItems(Command, frozen=True):
    """Items of an earlier conversation, in order; the model does not answer them."""

    items: tuple[Item, ...]


class SendToolOutput(Command, frozen=True):
    """The output of a call. The model answers it, as soon as no other response is in the way."""

    call_id: str
    output: str
    resets_tool_choice: bool = False
    """Whether the model is free to call no tool in that answer, whatever `tool_choice` says."""


class Interrupt(Command, frozen=True):
    """Stop the answer that is being made, and the audio that is being played.

    With a `response_id` only that answer and its audio are stopped: another one goes on. Audio
    that is stopped is reported with `AudioInterrupted`, and truncated to what was played.
    """

    response_id: str | None = None


class UpdateSettings(Command, frozen=True):
    """Apply settings. `send` returns when the server has accepted them.

    Raises RealtimeRefused if the server has refused them, so that the earlier ones hold, and
    RealtimeNoAnswer if it has not answered in time, so that either may hold.
    """

    settings: AgentSettings


class SendRaw(Command, frozen=True):
    """A message in the words of the server. One of type `response.create` waits its turn."""

    message: Mapping[str, Any]


class AgentSettings(msgspec.Struct, frozen=True):
    """The instructions, tools and settings that a server is told."""

    instructions: str
    tools: tuple[ToolSpec, ...]
    """Tools and handoffs, none of them hosted."""
    settings: RealtimeSettings


# --- the port -----------------------------------------------------------------------------------


class Listener(Protocol):
    """Whoever is told of the events of a model."""

    def on_event(self, event: ModelEvent) -> Awaitable[None] | None:
        """Take an event, without waiting.

        An answer that can be awaited asks the model for a pause: it waits for it before it reads
        on, so that a slow consumer slows the server down. The pause has to end while a command
        waits for an answer of the server, which would not be read.
        """
        ...


@runtime_checkable
class RealtimeModel(Protocol):
    """A connection to a realtime model."""

    async def connect(self, config: RealtimeModelConfig, settings: AgentSettings) -> None:
        """Connect, and apply the settings. A failure leaves nothing behind.

        Raises RealtimeInUse if there is a connection already.
        """
        ...

    def add_listener(self, listener: Listener, *, server_events: bool = False) -> None:
        """Deliver events to it. With `server_events` each message of the server is one, too.

        Messages of types that the model does not know are delivered to everybody.
        """
        ...

    def remove_listener(self, listener: Listener) -> None:
        """No event is delivered to it any more; an unknown one is ignored."""
        ...

    async def send_event(self, command: Command) -> None:
        """Tell the server. Raises RealtimeLost if there is no connection."""
        ...

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        """Tell the server if the condition holds at the moment of the write; whether it did.

        Nothing can happen between the check of the condition and the write of the first message.
        """
        ...

    async def close(self) -> None:
        """Release the connection and all tasks. It may be repeated, and called at any time."""
        ...
