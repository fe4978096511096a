"""Hears a model: each of its events is shown, and passed on to the part that acts on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from capsule_tasks.errors import ModelFailed, RealtimeLost, RealtimeRefused
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.conversation.log import Change, ConversationLog
from capsule_tasks.realtime.conversation.saving import HistoryWriter
from capsule_tasks.realtime.events import (
    RealtimeAgentEnd,
    RealtimeAgentStart,
    RealtimeAudio,
    RealtimeAudioEnd,
    RealtimeAudioInterrupted,
    RealtimeErrorEvent,
    RealtimeHistoryAdded,
    RealtimeHistoryUpdated,
    RealtimeInputAudioTimeout,
    RealtimeRawModelEvent,
    RealtimeTextDelta,
)
from capsule_tasks.realtime.guarding import Guarding
from capsule_tasks.realtime.host import SessionHost
from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioDone,
    AudioInterrupted,
    ConnectionEnded,
    InputTimedOut,
    InputTranscribed,
    ItemChanged,
    ItemDeleted,
    ItemTruncated,
    ModelErred,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    ServerEvent,
    TextDelta,
    ToolCalled,
)
from capsule_tasks.realtime.responses import Responses
from capsule_tasks.realtime.session.event_queue import EventQueue
from capsule_tasks.realtime.settings import RealtimeConfig
from capsule_tasks.realtime.tool_calls import ToolCalls
from capsule_tasks.runs.identity import AgentId
from capsule_tasks.runs.records import Item, Spent


@dataclass(eq=False)
class ModelListener:
    """The listener of a session's model. Nothing here waits, and nothing does I/O."""

    host: SessionHost
    config: RealtimeConfig
    queue: EventQueue
    log: ConversationLog
    writer: HistoryWriter
    responses: Responses
    guarding: Guarding
    calls: ToolCalls
    on_spent: Callable[[AgentId, Spent], None]

    def on_event(self, event: ModelEvent) -> Awaitable[None] | None:
        if self.config.raw_model_events:
            self.queue.put_droppable(RealtimeRawModelEvent(event))
        handle = self._HANDLERS.get(type(event))
        if handle is not None:
            try:
                handle(self, event)
            except Exception as error:  # noqa: BLE001  the connection goes on, and others listen
                self.queue.put(RealtimeErrorEvent(error))
        return self.queue.room() if self.queue.is_full else None

    # --- answers ----------------------------------------------------------------------------------

    def _response_started(self, event: ResponseStarted) -> None:
        self.log.apply(event)
        self.guarding.started(event)
        self.queue.put(RealtimeAgentStart(self.host.snapshot.agent, event.response_id))

    def _audio(self, event: AudioDelta) -> None:
        if not self.responses.is_stopped(event.response_id):
            audio = (event.data, event.response_id, event.item_id, event.content_index)
            self.queue.put_audio(RealtimeAudio(*audio))

    def _audio_done(self, event: AudioDone) -> None:
        self.queue.put(RealtimeAudioEnd(event.response_id, event.item_id, event.content_index))

    def _audio_interrupted(self, event: AudioInterrupted) -> None:
        discarded_bytes = self.queue.remove_audio(event.item_id, event.content_index)
        about = (event.item_id, event.content_index, discarded_bytes)
        self.queue.put(RealtimeAudioInterrupted(*about))
        self._item(event)

    def _text(self, event: TextDelta) -> None:
        if self.log.apply(event) == "added":
            self.queue.put(RealtimeHistoryAdded(self.log.last_added))
        self.guarding.text(event)
        if not self.responses.is_stopped(event.response_id):
            delta = (event.delta, event.response_id, event.item_id, event.is_transcript)
            self.queue.put_droppable(RealtimeTextDelta(*delta))

    def _response_ended(self, event: ResponseEnded) -> None:
        speaker = self.responses.speaker(event.response_id) or self.host.snapshot
        if event.spent is not None:
            self.on_spent(speaker.able.identity, event.spent)
        self._item(event)
        if event.status == "failed":
            error = ModelFailed("the realtime model", str(event.error or "its answer failed"))
            self.queue.put(RealtimeErrorEvent(error, event.error))
        about = (speaker.agent, event.response_id, event.status, event.spent)
        self.queue.put(RealtimeAgentEnd(*about))
        self.guarding.ended(event)

    def _tool_called(self, event: ToolCalled) -> None:
        speaker = None if event.response_id is None else self.responses.speaker(event.response_id)
        # The tools of an answer are those of the agent that began it.
        self.calls.called(event, speaker or self.host.snapshot)

    # --- items ------------------------------------------------------------------------------------

    def _item(self, event: ModelEvent) -> Change:
        """Show what has become of the conversation, and store what is final."""
        change = self.log.apply(event)
        if change == "added":
            self.queue.put(RealtimeHistoryAdded(self.log.last_added))
        elif change == "updated":
            self.queue.put(RealtimeHistoryUpdated(self.log.items))
        self.writer.add(self.log.take_final())
        return change

    def _item_changed(self, event: ItemChanged) -> None:
        item = event.item
        if self._item(event) == "added" and item.get("role") == "user" and _has_audio(item):
            self.guarding.heard(item["id"])

    def _transcribed(self, event: InputTranscribed) -> None:
        self._item(event)
        if event.transcript:
            self.guarding.said(event.transcript, event.item_id)
        if event.error is not None:
            what = f"the transcription of item {event.item_id!r}"
            self.queue.put(RealtimeErrorEvent(RealtimeRefused(what, str(event.error)), event.error))

    # --- the connection ---------------------------------------------------------------------------

    def _input_timed_out(self, event: InputTimedOut) -> None:
        self.queue.put(RealtimeInputAudioTimeout(event.item_id))

    def _erred(self, event: ModelErred) -> None:
        what = "a message" if event.event_id is None else f"the message {event.event_id!r}"
        error = RealtimeRefused(what, event.message, event.code)
        self.queue.put(RealtimeErrorEvent(error, event.data))

    def _server_event(self, event: ServerEvent) -> None:
        if self.config.raw_server_events and not self.config.raw_model_events:
            self.queue.put_droppable(RealtimeRawModelEvent(event))

    def _connection_ended(self, event: ConnectionEnded) -> None:
        error = event.error
        if error is not None and not isinstance(error, RealtimeLost):
            error = RealtimeLost(reason_of(error))
            error.__cause__ = event.error
        self.host.end(error)

    _HANDLERS: ClassVar[dict[type[ModelEvent], Callable[[Any, Any], object]]] = {
        AudioDelta: _audio,
        TextDelta: _text,
        AudioDone: _audio_done,
        AudioInterrupted: _audio_interrupted,
        ItemChanged: _item_changed,
        ItemTruncated: _item,
        ItemDeleted: _item,
        InputTranscribed: _transcribed,
        ResponseStarted: _response_started,
        ResponseEnded: _response_ended,
        ToolCalled: _tool_called,
        InputTimedOut: _input_timed_out,
        ModelErred: _erred,
        ServerEvent: _server_event,
        ConnectionEnded: _connection_ended,
    }


def _has_audio(item: Item) -> bool:
    content = item.get("content")
    return isinstance(content, list) and any(part.get("type") == "input_audio" for part in content)
