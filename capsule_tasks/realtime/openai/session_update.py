"""`session.update`: the settings of an agent in the words of the server, and the server's answers.

The server answers each update in turn, with a `session.updated` that has the whole session but does
not say which update it answers, or with an `error` that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

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
_GROUPS = frozenset({"audio", "input", "output"})
"""Fields of a session whose own fields are settings."""


def session_of(agent: AgentSettings, model: str) -> Session:
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
        "tracing": settings.tracing,
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
    return merged(_switched_off(session), dict(settings.extra or {}))


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


def merged(base: Session, over: Session) -> Session:
    """The fields of both; those of `over` win. Audio is merged field by field, too."""
    result = dict(base)
    for name, value in over.items():
        is_group = name in _GROUPS and isinstance(value, Mapping)
        result[name] = merged(result.get(name) or {}, value) if is_group else value
    return result


def _defaults_of(sent: Session, defaults: Session) -> Session:
    """The server's defaults of settings that were sent."""
    result: Session = {}
    for name, value in sent.items():
        if name in _GROUPS:
            result[name] = _defaults_of(value or {}, defaults.get(name) or {})
        elif name in defaults and name not in _KEPT:
            result[name] = defaults[name]
    return result


class _Update(NamedTuple):
    """An update that the server has not answered."""

    session: Session
    answer: asyncio.Future[None] | None
    """None if nobody has ever waited for it."""

    @property
    def is_awaited(self) -> bool:
        return self.answer is not None and not self.answer.done()

    def is_answered_by(self, session: Session) -> bool:
        """Whether this is the session that the update asked for, as far as the server tells."""
        names = [name for name in ("instructions", "tools") if name in self.session]
        told = [(name, session[name]) for name in names if session.get(name) is not None]
        return all(_identity(self.session[name]) == _identity(value) for name, value in told)

    def end(self, error: Exception | None) -> bool:
        """Tell whoever waits how the server has answered; whether anybody does."""
        if self.answer is None or self.answer.done():
            return False
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # whoever waits may have failed at the write already
        return True


def _identity(value: Any) -> Any:
    """The part of a value that a server repeats unchanged: instructions, or names of tools."""
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

    def next_session(self, agent: AgentSettings) -> Session:
        """The session for an update. It takes back what updates before it have set.

        A `session.update` changes nothing but what is in it. So a setting of the agent before would
        hold for this one, too.
        """
        session = session_of(agent, self._model)
        if self._ever_sent:
            session.pop("tracing", None)  # it cannot change
        session = merged(_defaults_of(self._ever_sent, self.defaults), session)
        self._ever_sent = merged(self._ever_sent, session)
        return session

    def sent(self, event_id: str, session: Session, answer: asyncio.Future[None] | None) -> None:
        self._unanswered[event_id] = _Update(session, answer)

    def accepted(self, session: Session) -> None:
        """The server has applied an update: the oldest one that asked for such a session.

        If none did, the server changes what it is told, and has applied the oldest one.
        """
        updates = self._unanswered
        fitting = [each for each in updates if updates[each].is_answered_by(session)]
        answered = next(iter(fitting or updates), None)
        for event_id in list(updates):
            if event_id == answered:
                updates.pop(event_id).end(None)
                return
            if not updates[event_id].is_awaited:
                # Answers come in order: one to an earlier update is not going to come.
                del updates[event_id]

    def refused(self, event_id: str | None, reason: str, code: str | None) -> bool:
        """The server has refused a message; whether somebody waited for the answer."""
        update = self._unanswered.pop(event_id or "", None)
        return update is not None and update.end(RealtimeRefused("the settings", reason, code))

    def lost(self, error: Exception) -> None:
        """The connection is gone, and no answer comes."""
        for update in self._unanswered.values():
            update.end(error)
        self._unanswered.clear()
