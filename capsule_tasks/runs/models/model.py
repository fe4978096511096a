"""The port to a model: the question that it is asked, and its reply.

Items are those of OpenAI's Responses: messages, function calls and their outputs, reasoning. A
model that speaks another protocol translates them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.records import Item, Spent


class ModelRetries(msgspec.Struct, frozen=True, kw_only=True):
    """How often a failed model call is made again, and how long it waits before that.

    Only failures that another attempt may mend are tried again: timeouts, lost connections, and a
    server that is busy or failed.
    """

    attempts: int = 3
    """At most so many calls, the first one among them."""
    pause_s: float = 0.5
    """Before the second attempt; twice as long before each one after it, with jitter."""
    max_pause_s: float = 30.0
    """A server that asks for a longer pause is not asked again."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidSetting("ModelRetries.attempts", self.attempts, "1 or more")
        for name in ("pause_s", "max_pause_s"):
            if getattr(self, name) < 0:
                raise InvalidSetting(f"ModelRetries.{name}", getattr(self, name), "0 or more")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a model call. None leaves the choice to the model's server."""

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tool_choice: str | None = None
    """`auto`, `required`, `none`, or the name of a tool."""
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    verbosity: str | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    timeout_s: float | None = None
    """The time limit of one attempt."""
    retries: ModelRetries | None = None
    """None for those of `ModelRetries()`."""
    extra: dict[str, Any] | None = None
    """More arguments of the provider's client."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise InvalidSetting("ModelSettings.timeout_s", self.timeout_s, "more than 0, or None")

    def over(self, base: ModelSettings) -> ModelSettings:
        """These settings, with those of `base` where they leave the choice open."""
        return replace(base, **msgspec.structs.asdict(self) | _given(base, self))


def _given(base: ModelSettings, over: ModelSettings) -> dict[str, Any]:
    names = ModelSettings.__struct_fields__
    return {name: getattr(base, name) for name in names if getattr(over, name) is None}


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, or a handoff, as a model is told of it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """A JSON schema."""
    strict: bool = True
    namespace: str | None = None
    hosted: dict[str, Any] | None = None
    """A tool that the model's server runs itself, in the words of that server; it has no call."""


class OutputSchema(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON schema of an agent's final output."""

    name: str
    parameters: dict[str, Any]
    strict: bool = True


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a model."""

    input: Sequence[Item]
    """Not to be changed by the model."""
    instructions: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    output_schema: OutputSchema | None = None
    settings: ModelSettings = ModelSettings()
    conversation_id: str | None = None
    """The conversation, or the response, that the server keeps and goes on with."""
    previous_response_id: str | None = None


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """A complete reply of a model."""

    items: list[Item]
    spent: Spent = Spent(requests=1)
    response_id: str | None = None
    request_id: str | None = None


class ModelDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a reply that is still being made. It is shown to people, and not acted on."""

    kind: Literal["text", "refusal", "reasoning", "arguments"]
    text: str
    call_id: str | None = None
    """The call whose arguments these are."""


@runtime_checkable
class Model(Protocol):
    """Something that answers questions.

    Raises `ModelFailed` (or an error of its own) for a call without a complete reply.
    """

    async def get_response(self, request: ModelRequest) -> ModelReply: ...

    def stream_response(self, request: ModelRequest) -> AsyncIterator[ModelDelta | ModelReply]:
        """The pieces of the reply as they come, and at the end the reply."""
        ...
