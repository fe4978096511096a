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
from capsule_tasks.realtime.openai.client_items import client_call_id, client_item
from capsule_tasks.realtime.openai.response_gate import Message, ResponseGate
from capsule_tasks.realtime.openai.session_update import Session, Updates
from capsule_tasks.realtime.playback import StoppedAudio, UnplayedAudio
from capsule_tasks.runs.records import Item

_log = logging.getLogger(__name__)

_UNKNOWN = object()
_FINISHED_ITEMS = 64
"""Items whose end was told: the server tells it twice, the second time soon after the first."""


class Protocol:
    """What is known of the server's session, on one connection."""

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
        self._truncations: dict[str, StoppedAudio] = {}
        self._long_call_ids: dict[str, str] = {}
        """Ids of calls that the server would refuse, by those that it was told."""

    # --- commands --------------------------------------------------------------------------------

    def command(self, command: Command) -> Callable[[], list[Message]]:
        """What makes the messages of a command, once it is certain that they are written.

        Raises for what cannot be a message.
        """
        match command:
            case Interrupt():
                return lambda: self._interrupt(command.response_id)
            case SendAudio():
                return lambda: self._send_audio(command)
            case SendItems():
                items = [item for each in command.items if (item := client_item(each))]
                messages = [self._create(item) for item in items]
                return lambda: messages
            case SendMessage():
                item = {"type": "message", "role": "user", "content": list(command.content)}
                named = {} if command.item_id is None else {"id": command.item_id}
                return self._asking(self._create(item | named))
            case SendToolOutput():
                call_id = client_call_id(command.call_id)
                if call_id != command.call_id:
                    self._long_call_ids[call_id] = command.call_id
                item = {"type": "function_call_output", "call_id": call_id}
                return self._asking(self._create(item | {"output": command.output}))
            case SendRaw():
                return self._raw(command.message)
        raise TypeError(f"{type(command).__name__} is no command of OpenAIRealtime")

    def update(
        self, settings: AgentSettings, answer: asyncio.Future[None], *, is_first: bool
    ) -> tuple[str, Message]:
        """The update of the session, and its id; `answer` is told what the server says to it."""
        event_id = self._event_id("settings")
        session = self.updates.session_of(settings, is_first=is_first)
        message = {"type": "session.update", "event_id": event_id, "session": session}
        msgspec.json.encode(message)  # an update that is never sent would take the next answer
        self.updates.sent(event_id, session, answer)
        return event_id, message

    def _asking(self, message: Message) -> Callable[[], list[Message]]:
        msgspec.json.encode(message)  # what cannot be sent is nothing to answer
        return lambda: [message, *self._gate.wish()]

    def _raw(self, message: Mapping[str, Any]) -> Callable[[], list[Message]]:
        msgspec.json.encode(message)
        if message.get("type") == "response.create":
            return lambda: self._gate.wish(message)
        if message.get("type") != "session.update":
            return lambda: [dict(message)]
        event_id = message.get("event_id") or self._event_id("settings")

        def update() -> list[Message]:
            self.updates.sent(event_id, message.get("session") or {}, None)
            return [{**message, "event_id": event_id}]

        return update

    def _send_audio(self, command: SendAudio) -> list[Message]:
        messages: list[Message] = []
        if command.data:
            data = base64.b64encode(command.data).decode()
            messages.append({"type": "input_audio_buffer.append", "audio": data})
        if command.commit:
            messages.append({"type": "input_audio_buffer.commit"})
            of_input = wire.nested(self._session, "audio", "input") or {}
            if of_input.get("turn_detection", _UNKNOWN) is None:
                # Where nobody detects the end of a turn, no response is made after it either.
                messages += self._gate.wish()
        return messages

    def _interrupt(self, response_id: str | None) -> list[Message]:
        stopped = self._audio.stop(response_id, self._gate.response_id)
        return [*self._gate.cancel(response_id), *self._stopped(stopped)]

    def _stopped(self, stopped: list[StoppedAudio]) -> list[Message]:
        """Tell that audio is not to be played any more; the messages that truncate it."""
        messages: list[Message] = []
        for audio in stopped:
            self._emit(AudioInterrupted(*audio))
            if audio.played_ms is None:
                continue
            event_id = self._event_id("truncate")
            self._truncations[event_id] = audio
            messages.append(
                {
                    "type": "conversation.item.truncate",
                    "event_id": event_id,
                    "item_id": audio.item_id,
                    "content_index": audio.content_index,
                    "audio_end_ms": audio.played_ms,
                }
            )
        return messages

    def _create(self, item: Item) -> Message:
        event_id = self._event_id("item")
        return {"type": "conversation.item.create", "event_id": event_id, "item": item}

    def _event_id(self, what: str) -> str:
        return f"{what}_{next(self._numbers)}"

    # --- messages of the server ------------------------------------------------------------------

    def received(self, raw: bytes) -> list[Message]:
        """Tell the events of a message of the server; what it has to be answered at once."""
        try:
            if (message := wire.decode(raw)) is None:
                self._emit(ServerEvent(raw))
            elif (handle := self._HANDLERS.get(message.kind)) is not None:
                return handle(self, message) or []
        except Exception as error:  # noqa: BLE001 - one message is not the end of a conversation
            _log.debug("A message of the realtime model cannot be read", exc_info=True)
            self._invalid(f"a message cannot be read: {type(error).__name__}: {error}", raw)
        return []

    def _invalid(self, why: str, raw: object) -> None:
        self._emit(ModelErred("invalid_message", f"{why}: {raw!r:.300}"))

    def _response_created(self, message: wire.OfResponse) -> list[Message]:
        response = message.response
        if response.id and response.conversation_id is None:
            self._apart.add(response.id)
            self._audio.silence(response.id)
        messages = self._gate.created(response.id)
        if response.id and messages:  # it was interrupted before it began
            self._audio.silence(response.id)
        self._emit(ResponseStarted(response.id or ""))
        return messages

    def _response_done(self, message: wire.OfResponse) -> list[Message]:
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

    def _audio_came(self, message: wire.AudioPiece) -> None:
        response_id, item_id, index = message.response_id, message.item_id, message.content_index
        if self._audio.add(response_id, item_id, index, len(message.delta)):
            self._emit(AudioDelta(message.delta, response_id, item_id, index))

    def _audio_ended(self, message: wire.OfContent) -> None:
        if not self._audio.is_silenced(message.response_id):
            self._emit(AudioDone(message.response_id, message.item_id, message.content_index))

    def _text_came(self, message: wire.OfContent) -> None:
        if message.response_id in self._apart:
            return
        is_transcript = message.kind == "response.output_audio_transcript.delta"
        response_id, item_id, index = message.response_id, message.item_id, message.content_index
        self._emit(TextDelta(message.delta, response_id, item_id, index, is_transcript))

    def _item_added(self, message: wire.OfItem) -> None:
        self._changed(message.item, message.previous_item_id)

    def _item_created(self, message: wire.OfItem) -> None:
        """Of servers before GA, which do not tell the end of an item that is not generated."""
        item = message.item
        is_generated = item.get("role") == "assistant" or item.get("type") == "function_call"
        self._changed(item, message.previous_item_id, is_final=not is_generated)

    def _item_done(self, message: wire.OfItem) -> None:
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
        if message.kind != "response.output_item.done":
            return
        item = wire.item_of(raw, is_done=True)
        if item.get("type") == "function_call" and item["status"] == "completed":
            name, call_id, arguments = item["name"], item["call_id"], item["arguments"]
            response_id = message.response_id or self._gate.response_id
            self._emit(ToolCalled(name, call_id, arguments, item_id, response_id))

    def _item_retrieved(self, message: wire.OfItem) -> None:
        status = message.item.get("status")
        self._changed(message.item, is_final=status in {"completed", "incomplete"})

    def _changed(self, raw: Item, after: str | None = None, *, is_final: bool = False) -> None:
        if (flaw := wire.flaw_of(raw)) is not None:
            self._invalid(flaw, raw)
        else:
            item = wire.item_of(raw, is_done=is_final)
            if (call_id := item.get("call_id")) in self._long_call_ids:
                item["call_id"] = self._long_call_ids[call_id]
            self._emit(ItemChanged(item, after or None, is_final))

    def _item_deleted(self, message: wire.OfContent) -> None:
        self._emit(ItemDeleted(message.item_id))

    def _item_truncated(self, message: wire.OfContent) -> None:
        key, total_ms = (message.item_id, message.content_index), None
        for event_id, audio in self._truncations.items():
            if audio[:2] == key:
                total_ms = self._truncations.pop(event_id).total_ms
                break
        # To retrieve the item would not give its text: the server removes all of it.
        self._emit(ItemTruncated(*key, message.audio_end_ms, total_ms))

    def _transcribed(self, message: wire.OfContent) -> None:
        error = message.error if isinstance(message.error, dict) else None
        if message.transcript is None:
            error = error or {"message": "the server gave no reason"}
        item_id, index = message.item_id, message.content_index
        self._emit(InputTranscribed(item_id, index, message.transcript, error))

    def _speech_started(self, _message: wire.OfContent) -> list[Message]:
        """The user speaks, perhaps into audio that is being played."""
        names = ("audio", "input", "turn_detection", "interrupt_response")
        if wire.nested(self._session, *names) is True:  # the server cancels the response
            return self._stopped(self._audio.stop(None, self._gate.response_id))
        return self._interrupt(None) if self._audio.is_playing() else []

    def _timed_out(self, message: wire.OfContent) -> None:
        self._emit(InputTimedOut(message.item_id, message.audio_start_ms, message.audio_end_ms))

    def _session_told(self, message: wire.OfSession) -> None:
        self._session = message.session
        if audio_format := wire.nested(message.session, "audio", "output", "format"):
            self._audio.set_format(audio_format)
        if message.kind == "session.created":
            self.updates.defaults = message.session
        else:
            self.updates.accepted(message.session)

    def _erred(self, message: wire.OfError) -> list[Message]:
        error = message.error
        code = None if error.code is None else str(error.code)
        is_handled, messages = self._gate.refused(error.event_id, code, error.text)
        self._truncations.pop(error.event_id or "", None)
        if self.updates.refused(error.event_id, error.text, code) or is_handled:
            _log.debug("The realtime model refused %s: %s", error.event_id, error.text)
        else:
            data = msgspec.structs.asdict(error)
            self._emit(ModelErred(code, error.text, error.event_id, data))
        return messages

    _HANDLERS: ClassVar[Mapping[str, Callable[[Protocol, Any], list[Message] | None]]] = {
        "response.output_audio.delta": _audio_came,
        "response.output_audio.done": _audio_ended,
        "response.output_audio_transcript.delta": _text_came,
        "response.output_text.delta": _text_came,
        "response.created": _response_created,
        "response.done": _response_done,
        "conversation.item.added": _item_added,
        "conversation.item.created": _item_created,
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
