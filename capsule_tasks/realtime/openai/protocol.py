"""The Realtime protocol without its connection: messages to events, and commands to messages.

Nothing here waits. The methods return the messages that are to be written.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, ClassVar

import msgspec

from capsule_tasks.realtime.model import (
    AgentSettings,
    AudioDelta,
    AudioDone,
    AudioInterrupted,
    Command,
    InputTimedOut,
    InputTranscribed,
    Interrupt,
    ItemChanged,
    ItemDeleted,
    ItemTruncated,
    ModelErred,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    SendAudio,
    SendItems,
    SendMessage,
    SendRaw,
    SendToolOutput,
    ServerEvent,
    TextDelta,
    ToolCalled,
)
from capsule_tasks.realtime.openai import wire
from capsule_tasks.realtime.openai.client_items import client_item
from capsule_tasks.realtime.openai.response_gate import FREE_CHOICE, Message, ResponseGate, Wish
from capsule_tasks.realtime.openai.session_update import Session, Updates
from capsule_tasks.realtime.openai.wire import AudioMessage, ServerMessage
from capsule_tasks.realtime.playback import UnplayedAudio
from capsule_tasks.runs.records import Item

_log = logging.getLogger(__name__)

_FINISHED_ITEMS = 64
"""Items whose end was told: the server tells it twice, the second time soon after the first."""


class Protocol:
    """The client's knowledge of the server's session, on one connection."""

    def __init__(
        self, model: str, audio: UnplayedAudio, emit: Callable[[ModelEvent], None]
    ) -> None:
        self._emit = emit
        self._audio = audio
        self._gate = ResponseGate()
        self.updates = Updates(model)
        self._numbers = count(1)
        self._session: Session = {}
        """The session as the server has told it last."""
        self._finished: deque[str] = deque(maxlen=_FINISHED_ITEMS)
        self._apart: set[str] = set()
        """Active responses that are not part of the conversation. Their beginning and end are
        events; what they say is in the messages of the server alone."""
        self._long_call_ids: dict[str, str] = {}
        """Ids of calls that the server would refuse, by those that it was told."""

    # --- commands --------------------------------------------------------------------------------

    def command(self, command: Command) -> list[Message]:
        """The messages of a command. What cannot be a message raises, and changes nothing."""
        match command:
            case SendMessage():
                item = {"type": "message", "role": "user", "content": list(command.content)}
                return self._ask(item)
            case SendToolOutput():
                return self._send_output(command)
            case SendItems():
                items = [client_item(item) for item in command.items]
                return [self._create(item) for item in items if item]
            case SendAudio():
                return self._send_audio(command)
            case Interrupt():
                return self._interrupt(command.response_id)
            case SendRaw():
                return self._send_raw(dict(command.message))
        raise TypeError(f"{type(command).__name__} is no command of OpenAIRealtime")

    def update(self, settings: AgentSettings, answer: asyncio.Future[None]) -> Message:
        """The update of the session; `answer` is told what the server says to it."""
        session = self.updates.next_session(settings)
        message = {"type": "session.update", "session": session}
        msgspec.json.encode(message)  # an update that is never sent would take the next answer
        return self._update(message, answer)

    def _update(self, message: Message, answer: asyncio.Future[None] | None) -> Message:
        event_id = message.get("event_id") or self._event_id("settings")
        self.updates.sent(event_id, message.get("session") or {}, answer)
        return {**message, "event_id": event_id}

    def _ask(self, item: Item, wish: Wish = None) -> list[Message]:
        message = self._create(item)
        msgspec.json.encode(message)  # what cannot be sent is nothing to answer
        return [message, *self._gate.wish(wish)]

    def _create(self, item: Item) -> Message:
        event_id = self._event_id("item")
        return {"type": "conversation.item.create", "event_id": event_id, "item": item}

    def _send_output(self, command: SendToolOutput) -> list[Message]:
        output = {"type": "function_call_output", "output": command.output}
        item = client_item({**output, "call_id": command.call_id})
        assert item is not None
        if item["call_id"] != command.call_id:
            self._long_call_ids[item["call_id"]] = command.call_id
        return self._ask(item, FREE_CHOICE if command.resets_tool_choice else None)

    def _send_raw(self, message: Message) -> list[Message]:
        msgspec.json.encode(message)
        match message.get("type"):
            case "response.create":
                return self._gate.wish(message)
            case "session.update":
                return [self._update(message, None)]
        return [message]

    def _send_audio(self, command: SendAudio) -> list[Message]:
        messages: list[Message] = []
        if command.data:
            data = base64.b64encode(command.data).decode()
            messages.append({"type": "input_audio_buffer.append", "audio": data})
        if command.commit:
            messages.append({"type": "input_audio_buffer.commit"})
            of_input = wire.nested(self._session, "audio", "input") or {}
            if of_input.get("turn_detection", "unknown") is None:
                # Where nobody detects the end of a turn, no response is made after it either.
                messages += self._gate.wish()
        return messages

    def _interrupt(self, response_id: str | None) -> list[Message]:
        stopped = self._audio.stop(response_id, self._gate.response_id)
        return [*self._gate.cancel(response_id), *self._truncated(stopped)]

    def _truncated(self, stopped: list[AudioInterrupted]) -> list[Message]:
        """Tell that audio is not to be played any more; the messages that truncate it."""
        for audio in stopped:
            self._emit(audio)
        return [
            {
                "type": "conversation.item.truncate",
                "event_id": self._event_id("truncate"),
                "item_id": audio.item_id,
                "content_index": audio.content_index,
                "audio_end_ms": audio.played_ms,
            }
            for audio in stopped
            if audio.played_ms is not None
        ]

    def _event_id(self, what: str) -> str:
        return f"{what}_{next(self._numbers)}"

    # --- messages of the server ------------------------------------------------------------------

    def received(self, raw: bytes) -> list[Message]:
        """Tell the events of a message of the server; what it has to be answered at once."""
        try:
            message = wire.decode(raw)
            if (handle := self._HANDLERS.get(message.type)) is not None:
                return handle(self, message) or []
            if message.type not in wire.IGNORED:
                self._emit(ServerEvent(raw))
        except Exception as error:  # noqa: BLE001 - one message is not the end of a conversation
            _log.debug("A message of the realtime model cannot be read", exc_info=True)
            why = f"a message cannot be read: {type(error).__name__}: {error}"
            self._emit(ModelErred("invalid_message", f"{why}: {raw!r:.300}"))
        return []

    def _response_created(self, message: ServerMessage) -> list[Message]:
        response = message.response
        messages = self._gate.created(response.id)
        if response.id and response.conversation_id is None:
            self._apart.add(response.id)
            self._audio.silence(response.id)
        if response.id and messages:  # it was interrupted before it began
            self._audio.silence(response.id)
        self._emit(ResponseStarted(response.id or ""))
        return messages

    def _response_done(self, message: ServerMessage) -> list[Message]:
        response = message.response
        response_id = response.id or self._gate.response_id or ""
        messages = self._gate.done(response.id)
        self._apart.discard(response_id)
        self._audio.end(response_id)
        spent, error = wire.spent_of(response.usage), None
        if response.status in {"failed", "incomplete"}:
            error = wire.nested(response.status_details, "error") or response.status_details
        match response.status:
            case "cancelled" | "incomplete" | "failed" as status:
                self._emit(ResponseEnded(response_id, status, spent, error))
            case _:
                self._emit(ResponseEnded(response_id, "completed", spent))
        return messages

    def _audio_came(self, message: AudioMessage) -> None:
        place = (message.response_id, message.item_id, message.content_index)
        if self._audio.add(*place, len(message.delta)):
            self._emit(AudioDelta(message.delta, *place))

    def _audio_ended(self, message: ServerMessage) -> None:
        if not self._audio.is_silenced(message.response_id):
            self._emit(AudioDone(message.response_id, message.item_id, message.content_index))

    def _text_came(self, message: ServerMessage) -> None:
        if message.response_id not in self._apart:
            is_transcript = message.type == "response.output_audio_transcript.delta"
            text = wire.decode_text(message.delta)
            place = (message.response_id, message.item_id, message.content_index)
            self._emit(TextDelta(text, *place, is_transcript))

    def _item_added(self, message: ServerMessage) -> None:
        self._changed(message.item, message.previous_item_id)

    def _item_done(self, message: ServerMessage) -> None:
        """The server is done with an item. It tells so by two messages for those it has made.

        Only the item of a response is a call to be made. Other items are told by one message alone:
        those of an earlier conversation, whose calls were made then.
        """
        raw, item_id = message.item, message.item.get("id")
        if message.response_id in self._apart:
            return
        if item_id not in self._finished:
            if item_id:
                self._finished.append(item_id)
            self._changed(raw, message.previous_item_id, is_final=True)
        if message.type != "response.output_item.done":
            return
        item = wire.item_of(raw, is_done=True)
        if item.get("type") == "function_call" and item["status"] == "completed":
            name, call_id, arguments = item["name"], item["call_id"], item["arguments"]
            response_id = message.response_id or self._gate.response_id
            self._emit(ToolCalled(name, call_id, arguments, item_id, response_id))

    def _item_retrieved(self, message: ServerMessage) -> None:
        status = message.item.get("status")
        self._changed(message.item, is_final=status in {"completed", "incomplete"})

    def _changed(self, raw: Item, after: str | None = None, *, is_final: bool = False) -> None:
        item = wire.item_of(raw, is_done=is_final)
        if (call_id := item.get("call_id")) in self._long_call_ids:
            item["call_id"] = self._long_call_ids[call_id]
        self._emit(ItemChanged(item, after or None, is_final))

    def _item_deleted(self, message: ServerMessage) -> None:
        self._emit(ItemDeleted(message.item_id))

    def _item_truncated(self, message: ServerMessage) -> None:
        # To retrieve the item would not give its text: the server removes all of it.
        self._emit(ItemTruncated(message.item_id, message.content_index, message.audio_end_ms))

    def _transcribed(self, message: ServerMessage) -> None:
        error = None
        if message.transcript is None:
            error = message.error or {"message": "the server gave no reason"}
        item_id, index = message.item_id, message.content_index
        self._emit(InputTranscribed(item_id, index, message.transcript, error))

    def _speech_started(self, _message: ServerMessage) -> list[Message]:
        """The user speaks, perhaps into audio that is being played."""
        names = ("audio", "input", "turn_detection", "interrupt_response")
        if wire.nested(self._session, *names) is True:  # the server cancels the response
            return self._truncated(self._audio.stop(None, self._gate.response_id))
        return self._interrupt(None) if self._audio.is_playing() else []

    def _timed_out(self, message: ServerMessage) -> None:
        self._emit(InputTimedOut(message.item_id, message.audio_start_ms, message.audio_end_ms))

    def _session_told(self, message: ServerMessage) -> None:
        self._session = message.session
        if audio_format := wire.nested(message.session, "audio", "output", "format"):
            self._audio.set_format(audio_format)
        if message.type == "session.created":
            self.updates.defaults = message.session
        else:
            self.updates.accepted(message.session)

    def _erred(self, message: ServerMessage) -> list[Message]:
        error = message.error
        event_id, code = error.get("event_id"), error.get("code")
        code = None if code is None else str(code)
        text = str(error.get("message") or code or "the server gave no reason")
        is_handled, messages = self._gate.refused(event_id, code, text)
        if self.updates.refused(event_id, text, code) or is_handled:
            _log.debug("The realtime model refused %s: %s", event_id, text)
        else:
            self._emit(ModelErred(code, text, event_id, error))
        return messages

    _HANDLERS: ClassVar[Mapping[str, Callable[[Protocol, Any], list[Message] | None]]] = {
        "response.output_audio.delta": _audio_came,
        "response.output_audio.done": _audio_ended,
        "response.output_audio_transcript.delta": _text_came,
        "response.output_text.delta": _text_came,
        "response.created": _response_created,
        "response.done": _response_done,
        "conversation.item.added": _item_added,
        "conversation.item.done": _item_done,
        "response.output_item.done": _item_done,
        "conversation.item.retrieved": _item_retrieved,
        "conversation.item.deleted": _item_deleted,
        "conversation.item.truncated": _item_truncated,
        "conversation.item.input_audio_transcription.completed": _transcribed,
        "conversation.item.input_audio_transcription.failed": _transcribed,
        "input_audio_buffer.speech_started": _speech_started,
        "input_audio_buffer.timeout_triggered": _timed_out,
        "session.created": _session_told,
        "session.updated": _session_told,
        "error": _erred,
    }
