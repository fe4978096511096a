"""Settings of realtime sessions: of the model, of the connection, and of the session itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from capsule_tasks.runs.agents.checking import check_fields
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail
from capsule_tasks.settings import ByteCount, PositiveCount, PositiveSeconds

Modality = Literal["text", "audio"]
AudioFormat = str | Mapping[str, Any]
"""`pcm16`, `g711_ulaw`, `g711_alaw`, or a format in the words of the server."""


class RealtimeSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a realtime model. None leaves the choice to the server."""

    model: str | None = None
    """The name of the model."""
    modalities: tuple[Modality, ...] | list[Modality] | None = None
    """The form of the answers: `["text"]` or `["audio"]`."""
    voice: str | Mapping[str, Any] | None = None
    speed: int | float | None = None
    input_format: AudioFormat | None = None
    output_format: AudioFormat | None = None
    transcription: Mapping[str, Any] | Literal["off"] | None = None
    """How audio of the user is transcribed. Without a transcript the history has no text of it."""
    turn_detection: Mapping[str, Any] | Literal["off"] | None = None
    """How the server finds the ends of the user's turns; `off` leaves them to `send_audio`."""
    noise_reduction: Mapping[str, Any] | Literal["off"] | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    reasoning: Mapping[str, Any] | None = None
    prompt: Mapping[str, Any] | None = None
    tracing: Mapping[str, Any] | Literal["auto", "off"] | None = None
    """Tracing by the model's server."""
    extra: Mapping[str, Any] | None = None
    """More fields of the session, in the words of the server."""

    def __post_init__(self) -> None:
        check_fields(RealtimeSettings, self)

    def over(self, base: RealtimeSettings) -> RealtimeSettings:
        """These settings, with those of `base` where they leave the choice open."""
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(base, **given)


@runtime_checkable
class Playback(Protocol):
    """Knows how much audio was played to the user; `PlaybackTracker` is one."""

    def set_audio_format(self, audio_format: AudioFormat) -> None: ...

    def state(self) -> tuple[str, int, float] | None:
        """The item that is being played, its content's index, and the ms played; None if none."""
        ...

    def on_interrupted(self) -> None: ...


@dataclass(kw_only=True, frozen=True, eq=False)
class RealtimeModelConfig:
    """How to reach a realtime model, for one session."""

    url: str | None = None
    """The URL of the server; None for that of OpenAI."""
    api_key: str | Callable[[], str | Awaitable[str]] | None = None
    """None for OPENAI_API_KEY of the environment."""
    headers: Mapping[str, str] | None = None
    """In place of the `Authorization` that the key makes."""
    settings: RealtimeSettings = field(default_factory=RealtimeSettings)
    """Over those of `RealtimeConfig`."""
    playback_tracker: Playback | None = None
    """None if audio is played at once, at its own speed."""

    def __post_init__(self) -> None:
        check_fields(RealtimeModelConfig, self)


@dataclass(kw_only=True, frozen=True, eq=False)
class RealtimeConfig:
    """Settings of a realtime session that hold for all of its agents."""

    settings: RealtimeSettings = field(default_factory=RealtimeSettings)
    """Over those in the `model_settings` of the agents."""
    input_guardrails: list[InputGuardrail] = field(default_factory=list)
    """Run with those of the current agent, on what the user writes and says."""
    output_guardrails: list[OutputGuardrail] = field(default_factory=list)
    """Run with those of the agent that answers."""
    guardrail_debounce_chars: PositiveCount = 100
    """Output guardrails look at an answer whenever it has grown by so many characters, and at its
    end."""
    open_approvals: Literal["return", "abandon"] = "return"
    """Calls that wait for a decision when the session closes: `RealtimeSession.state` returns them,
    to go on from; or the history records that they were not made."""
    raw_model_events: bool = True
    """Whether the events of the model are among those of the session."""
    raw_server_events: bool = False
    """Whether each message of the server is, too."""
    event_limit: PositiveCount = 10_000
    """Events that wait for a slow consumer. After that raw events are dropped, and the model is not
    read; other events are never dropped."""
    audio_limit_bytes: ByteCount = 16 * 1024 * 1024
    """Audio that waits for a slow consumer; audio that comes then is dropped, and counted."""
    close_timeout_s: PositiveSeconds = 10.0
    """How long the tools and guardrails of a session that closes may take to end, and then the last
    write to its history."""

    def __post_init__(self) -> None:
        check_fields(RealtimeConfig, self)
