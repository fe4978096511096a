"""`session.update`: the settings of an agent in the words of the server, and the server's answers.

The server answers each update in turn, with a `session.updated` that has the whole session but does
not say which update it answers, or with an `error` that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from capsule_tasks.errors import InvalidSetting, RealtimeRefused
from capsule_tasks.realtime.model import AgentSettings
from capsule_tasks.realtime.settings import AudioFormat
from capsule_tasks.runs.models.model import ToolSpec

Session = dict[str, Any]

_TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
"""Unless settings say otherwise: the history has no text of what the user says without it."""
_PCM = {"type": "audio/pcm", "rate": 24_000}
_ULAW = {"type": "audio/pcmu"}
_ALAW = {"type": "audio/pcma"}
_FORMATS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("pcm16", "pcm", "audio/pcm"), _PCM),
    **dict.fromkeys(("g711_ulaw", "pcmu", "audio/pcmu"), _ULAW),
    **dict.fromkeys(("g711_alaw", "pcma", "audio/pcma"), _ALAW),
}
_KEPT = frozenset({"model", "voice", "tracing"})
"""Settings that cannot be taken back once they are in use."""


def session_of(agent: AgentSettings, model: str, *, is_first: bool) -> Session:
    """The session of a `session.update`. Settings that are None are left out."""
    settings = agent.settings
    session: Session = {
        "type": "realtime",
        "model": settings.model or model,
        "instructions": agent.instructions,
        "tools": [_function(tool) for tool in agent.tools],
        "output_modalities": settings.modalities,
        "tool_choice": _tool_choice(settings.tool_choice, agent.tools),
        "parallel_tool_calls": settings.parallel_tool_calls,
        "max_output_tokens": settings.max_output_tokens,
        "reasoning": settings.reasoning,
        "prompt": settings.prompt,
        "tracing": settings.tracing if is_first else None,
        "audio": {
            "input": _switched_off(
                {
                    "format": format_of("input_format", settings.input_format),
                    "transcription": settings.transcription or _TRANSCRIPTION,
                    "turn_detection": settings.turn_detection,
                    "noise_reduction": settings.noise_reduction,
                }
            ),
            "output": _switched_off(
                {
                    "format": format_of("output_format", settings.output_format),
                    "voice": settings.voice,
                    "speed": settings.speed,
                }
            ),
        },
    }
    return merged(_switched_off(session), settings.extra or {})


def _switched_off(fields: Session) -> Session:
    """The fields without those that are None; `off` is null."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {name: None if value == "off" else value for name, value in given.items()}


def format_of(name: str, audio_format: AudioFormat | None) -> dict[str, Any] | None:
    if isinstance(audio_format, str):
        if audio_format not in _FORMATS:
            must = f"one of {', '.join(_FORMATS)}, or a format in the words of the server"
            raise InvalidSetting(f"RealtimeSettings.{name}", audio_format, must)
        return _FORMATS[audio_format]
    if audio_format is not None and audio_format.get("type") == "audio/pcm":
        return {**_PCM, **audio_format}
    return None if audio_format is None else dict(audio_format)


def _function(tool: ToolSpec) -> dict[str, Any]:
    if tool.hosted is not None or tool.namespace is not None:
        kind = "hosted" if tool.hosted is not None else f"in the namespace {tool.namespace!r}"
        raise InvalidSetting("a tool of a realtime model", f"{tool.name}, {kind}", "a function")
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }


def _tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> Any:
    if choice is None or choice in {"auto", "required", "none"}:
        return choice
    names = [tool.name for tool in tools]
    if choice not in names:
        must = f"auto, required, none, or the name of a tool: {', '.join(names)}"
        raise InvalidSetting("RealtimeSettings.tool_choice", choice, must)
    return {"type": "function", "name": choice}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both, also within fields; those of `over` win."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping) and name != "format"
        result[name] = merged(old, value) if both and old is not None else value
    return result


def with_defaults(session: Session, sent: Session, defaults: Session) -> Session:
    """The session, with the server's defaults in place of earlier settings that it leaves out.

    A `session.update` changes nothing but what is in it. So a setting of the agent before would
    hold for this one, too.
    """
    result = dict(session)
    for name, value in sent.items():
        if name == "audio" or (name in {"input", "output"} and isinstance(value, dict)):
            inner = defaults.get(name) or {}
            result[name] = with_defaults(session.get(name) or {}, value or {}, inner)
        elif name not in result and name not in _KEPT and name in defaults:
            result[name] = defaults[name]
    return result


class _Update:
    """An update that the server has not answered."""

    def __init__(self, session: Session, answer: asyncio.Future[None] | None) -> None:
        self.session = session
        self.answer = answer
        """None if nobody waits for it, or not any more."""

    def is_answered_by(self, session: Session) -> bool:
        """Whether this is the session that the update asked for, as far as the server tells."""
        for name in ("instructions", "tools"):
            asked, told = self.session.get(name), session.get(name)
            if asked is not None and told is not None and _told(asked) != _told(told):
                return False
        return True


def _told(value: Any) -> Any:
    """What a server repeats as it was told: the instructions, the names of the tools."""
    if not isinstance(value, list):
        return value
    return [tool.get("name") for tool in value if isinstance(tool, dict)]


class Updates:
    """The updates of a session, and the answers to them.

    An answer may come when nobody waits for it any more. It is not taken for the answer to the
    next update; and an update that is never answered does not take the answer of the next one.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._unanswered: dict[str, _Update] = {}
        self._ever_sent: Session = {}
        self.defaults: Session = {}
        """The session as the server has made it."""

    def session_of(self, agent: AgentSettings, *, is_first: bool = False) -> Session:
        """The session for an update, which takes back settings of the updates before it."""
        session = session_of(agent, self._model, is_first=is_first)
        session = with_defaults(session, self._ever_sent, self.defaults)
        self._ever_sent = merged(self._ever_sent, session)
        return session

    @property
    def is_waited(self) -> bool:
        """Whether anybody waits for an answer."""
        return any(update.answer is not None for update in self._unanswered.values())

    def sent(self, event_id: str, session: Session, answer: asyncio.Future[None] | None) -> None:
        self._unanswered[event_id] = _Update(session, answer)

    def give_up(self, event_id: str) -> None:
        """Nobody waits for the answer any more."""
        if event_id in self._unanswered:
            self._unanswered[event_id].answer = None

    def accepted(self, session: Session) -> None:
        """The server has applied an update: the oldest one that asked for such a session."""
        event_ids = list(self._unanswered)
        fitting = (
            place
            for place, event_id in enumerate(event_ids)
            if self._unanswered[event_id].is_answered_by(session)
        )
        place = next(fitting, 0)  # the oldest one, if the server changes what it is told
        for event_id in event_ids[:place]:
            # Answers come in order: one to an earlier update is not going to come.
            if self._unanswered[event_id].answer is None:
                del self._unanswered[event_id]
        for event_id in event_ids[place : place + 1]:
            _answer(self._unanswered.pop(event_id), None)

    def refused(self, event_id: str | None, reason: str, code: str | None) -> bool:
        """The server has refused a message; whether somebody waited for the answer."""
        update = self._unanswered.pop(event_id or "", None)
        error = RealtimeRefused("the settings", reason, code)
        return update is not None and _answer(update, error)

    def lost(self, error: Exception) -> None:
        """The connection is gone, and no answer comes."""
        for update in self._unanswered.values():
            _answer(update, error)
        self._unanswered.clear()


def _answer(update: _Update, error: Exception | None) -> bool:
    """Tell whoever waits; whether anybody does."""
    if update.answer is None or update.answer.done():
        return False
    if error is None:
        update.answer.set_result(None)
    else:
        update.answer.set_exception(error)
        update.answer.exception()  # whoever waits may have failed at the write already
    return True
