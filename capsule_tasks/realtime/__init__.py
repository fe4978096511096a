"""Realtime sessions: agents that talk over one connection to a model.

A `RealtimeRunner` makes sessions of an agent. A session owns everything that it takes: its
connection, its tasks, its queue of events. `docs/realtime.md` is the guide. Names are loaded when
they are first asked for (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capsule_tasks.realtime.events import (
        RealtimeAgentEnd,
        RealtimeAgentStart,
        RealtimeAudio,
        RealtimeAudioEnd,
        RealtimeAudioInterrupted,
        RealtimeErrorEvent,
        RealtimeEvent,
        RealtimeEventsDropped,
        RealtimeGuardrailTripped,
        RealtimeHandoff,
        RealtimeHistoryAdded,
        RealtimeHistoryUpdated,
        RealtimeInputAudioTimeout,
        RealtimeRawModelEvent,
        RealtimeTextDelta,
        RealtimeToolApprovalRequired,
        RealtimeToolEnd,
        RealtimeToolStart,
        RealtimeToolUpdate,
    )
    from capsule_tasks.realtime.model import RealtimeModel
    from capsule_tasks.realtime.openai.websocket import OpenAIRealtime
    from capsule_tasks.realtime.playback import PlaybackTracker
    from capsule_tasks.realtime.runner import RealtimeRunner
    from capsule_tasks.realtime.session.session import RealtimeSession
    from capsule_tasks.realtime.settings import (
        RealtimeConfig,
        RealtimeModelConfig,
        RealtimeSettings,
    )

__all__ = [
    "OpenAIRealtime",
    "PlaybackTracker",
    "RealtimeAgentEnd",
    "RealtimeAgentStart",
    "RealtimeAudio",
    "RealtimeAudioEnd",
    "RealtimeAudioInterrupted",
    "RealtimeConfig",
    "RealtimeErrorEvent",
    "RealtimeEvent",
    "RealtimeEventsDropped",
    "RealtimeGuardrailTripped",
    "RealtimeHandoff",
    "RealtimeHistoryAdded",
    "RealtimeHistoryUpdated",
    "RealtimeInputAudioTimeout",
    "RealtimeModel",
    "RealtimeModelConfig",
    "RealtimeRawModelEvent",
    "RealtimeRunner",
    "RealtimeSession",
    "RealtimeSettings",
    "RealtimeTextDelta",
    "RealtimeToolApprovalRequired",
    "RealtimeToolEnd",
    "RealtimeToolStart",
    "RealtimeToolUpdate",
]

_LOADED_LATER = (
    "settings",
    "events",
    "model",
    "playback",
    "openai.websocket",
    "session.session",
    "runner",
)


def __getattr__(name: str) -> object:
    for module in _LOADED_LATER if name in __all__ else ():
        home = import_module(f"{__name__}.{module}")
        if hasattr(home, name):
            return globals().setdefault(name, getattr(home, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
