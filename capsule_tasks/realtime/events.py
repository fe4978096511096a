"""The events of a realtime session, for those who iterate over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from capsule_tasks.realtime.model import ModelEvent
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.tools import AgentTool, Tool
from capsule_tasks.runs.records import GuardrailResult, Item, Spent


class RealtimeEvent(msgspec.Struct, frozen=True):
    """An event of a session. `type` says which one it is."""

    type: ClassVar[str]


class RealtimeAgentStart(RealtimeEvent, frozen=True):
    """An agent begins to answer."""

    type: ClassVar = "agent_start"
    agent: Agent
    response_id: str


class RealtimeAgentEnd(RealtimeEvent, frozen=True):
    """An agent has answered, or was stopped."""

    type: ClassVar = "agent_end"
    agent: Agent
    """The agent that began the answer."""
    response_id: str
    status: Literal["completed", "cancelled", "incomplete", "failed"]
    usage: Spent | None = None


class RealtimeHandoff(RealtimeEvent, frozen=True):
    """Another agent has taken over, by a handoff or by `update_agent`."""

    type: ClassVar = "handoff"
    from_agent: Agent
    to_agent: Agent


class RealtimeToolStart(RealtimeEvent, frozen=True):
    """A tool is called."""

    type: ClassVar = "tool_start"
    agent: Agent
    tool: Tool | AgentTool
    call_id: str
    arguments: str


class RealtimeToolUpdate(RealtimeEvent, frozen=True):
    """A tool that runs elsewhere shows what it does, as a task of Celery does.

    `kind` and `data` are those of the events of runs: `tool_text`, `tool_progress`, …
    """

    type: ClassVar = "tool_update"
    agent: Agent
    call_id: str
    kind: str
    data: Any


class RealtimeToolEnd(RealtimeEvent, frozen=True):
    """The model has the output of a tool."""

    type: ClassVar = "tool_end"
    agent: Agent
    tool: Tool | AgentTool
    call_id: str
    arguments: str
    output: str


class RealtimeToolApprovalRequired(RealtimeEvent, frozen=True):
    """A tool call waits for `approve_tool_call` or `reject_tool_call`."""

    type: ClassVar = "tool_approval_required"
    agent: Agent
    """The agent that calls the tool, which may be one that is used as a tool."""
    tool: str
    """The name of the tool."""
    call_id: str
    arguments: str


class RealtimeTextDelta(RealtimeEvent, frozen=True):
    """A piece of an answer's text, or of the transcript of its audio, to be shown at once.

    None comes after a guardrail has stopped the answer. The history gets the whole text.
    """

    type: ClassVar = "text_delta"
    delta: str
    response_id: str
    item_id: str
    is_transcript: bool


class RealtimeAudio(RealtimeEvent, frozen=True):
    """Audio to be played."""

    type: ClassVar = "audio"
    data: bytes
    response_id: str
    item_id: str
    content_index: int


class RealtimeAudioEnd(RealtimeEvent, frozen=True):
    """All audio of an item has come."""

    type: ClassVar = "audio_end"
    response_id: str
    item_id: str
    content_index: int


class RealtimeAudioInterrupted(RealtimeEvent, frozen=True):
    """Audio of an item is not to be played any more: stop the local playback at once.

    Events with audio of the item that were still waiting were removed from the queue.
    """

    type: ClassVar = "audio_interrupted"
    item_id: str
    content_index: int
    discarded_bytes: int = 0


class RealtimeHistoryAdded(RealtimeEvent, frozen=True):
    """An item was added to the conversation."""

    type: ClassVar = "history_added"
    item: Item


class RealtimeHistoryUpdated(RealtimeEvent, frozen=True):
    """The conversation has changed."""

    type: ClassVar = "history_updated"
    _read: Callable[[], list[Item]]

    @property
    def history(self) -> list[Item]:
        """The conversation as it is now, which costs what its items cost."""
        return self._read()


class RealtimeGuardrailTripped(RealtimeEvent, frozen=True):
    """A guardrail has stopped an answer, at most once for each answer."""

    type: ClassVar = "guardrail_tripped"
    agent: Agent
    results: tuple[GuardrailResult, ...]
    message: str
    """The text that was looked at."""
    response_id: str | None = None
    """The answer that was stopped. None if an input has tripped, and no answer to it goes on: the
    message was not sent, the answer is stopped as it begins, or the answer is over."""


class RealtimeInputAudioTimeout(RealtimeEvent, frozen=True):
    """The user was silent for as long as the turn detection allows."""

    type: ClassVar = "input_audio_timeout_triggered"
    item_id: str | None = None


class RealtimeErrorEvent(RealtimeEvent, frozen=True):
    """Something failed. The session goes on, unless its iterators raise the error afterwards."""

    type: ClassVar = "error"
    error: Exception
    data: Mapping[str, Any] | None = None
    """The error in the words of the server, if it is the server's."""


class RealtimeRawModelEvent(RealtimeEvent, frozen=True):
    """An event of the model, as the session got it."""

    type: ClassVar = "raw_model_event"
    data: ModelEvent


class RealtimeEventsDropped(RealtimeEvent, frozen=True):
    """The consumer was too slow: here events are missing, none of which is a control event."""

    type: ClassVar = "events_dropped"
    audio_bytes: int = 0
    other_events: int = 0
    """Raw events, deltas of texts, and updates of tools."""
