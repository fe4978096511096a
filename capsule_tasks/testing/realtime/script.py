"""The replies of a script: what the model says, where the server waits, how a response ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from capsule_tasks.runs.records import Item

Scripted = Any
"""One reply of a script: a text, `speaks(…)`, `writes(…)`, an item of `says`, `calls` or
`hands_over` of `capsule_tasks.testing.models`, a `Hold`, a list of these, an `Answer`, or a
function of the connection that returns one of these, or an awaitable of it."""

DELTA_CHARS = 16
AUDIO_MS_PER_CHAR = 10
"""Silence that is sent for each character where a script gives no audio."""


class Hold:
    """Holds a response open at one place of a script, until the test lets the response go on."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self, timeout_s: float = 5.0) -> None:
        """Wait until the response has come to this place."""
        async with asyncio.timeout(timeout_s):
            await self._reached.wait()

    def release(self) -> None:
        self._released.set()

    async def wait(self) -> None:
        """Wait, in the server, until the test lets the response go on."""
        self._reached.set()
        await self._released.wait()


@dataclass(frozen=True)
class Message:
    """A message of the model, piece by piece."""

    pieces: tuple[str | Hold, ...]
    audio: bytes | Literal["silence"] | None = None
    """None for a message in text."""

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    def deltas(self) -> Iterator[str | Hold]:
        for piece in self.pieces:
            if isinstance(piece, Hold):
                yield piece
            else:
                yield from chunks(piece)


def writes(*pieces: str | Hold) -> Message:
    """A message in text. A `Hold` among the pieces holds the response open there."""
    return Message(pieces)


def speaks(*pieces: str | Hold, audio: bytes | None = None) -> Message:
    """A message in audio, whose transcript is `pieces`. A `Hold` holds the response open there.

    `audio` is spread evenly over the deltas of the transcript; without it there is silence, 10 ms
    for each character.
    """
    return Message(pieces, "silence" if audio is None else audio)


@dataclass(frozen=True)
class Answer:
    """A response as a whole, where a script says more than what the model says."""

    output: Scripted = ()
    status: Literal["completed", "incomplete", "failed"] = "completed"
    reason: str | None = None
    """Why it is incomplete: `max_output_tokens` or `content_filter`."""
    error: Mapping[str, Any] | None = None
    """Why it has failed."""
    usage: Mapping[str, Any] | None = field(default_factory=lambda: USAGE)
    """None for a response without usage."""

    def parts(self) -> list[Message | Hold | Item]:
        output = self.output if isinstance(self.output, (list, tuple)) else [self.output]
        return [_part(each) for each in output]


def fails(message: str, code: str = "server_error", *, after: Scripted = ()) -> Answer:
    """A response that fails, after the model has said `after`."""
    error = {"type": "server_error", "code": code, "message": message}
    return Answer(after, status="failed", error=error)


USAGE: Mapping[str, Any] = {
    "total_tokens": 15,
    "input_tokens": 10,
    "output_tokens": 5,
    "input_token_details": {
        "text_tokens": 7,
        "audio_tokens": 3,
        "image_tokens": 0,
        "cached_tokens": 4,
        "cached_tokens_details": {"text_tokens": 3, "audio_tokens": 1, "image_tokens": 0},
    },
    "output_token_details": {"text_tokens": 2, "audio_tokens": 3},
}


def as_answer(scripted: Scripted) -> Answer:
    return scripted if isinstance(scripted, Answer) else Answer(scripted)


def chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), DELTA_CHARS):
        yield text[start : start + DELTA_CHARS]


def spread(audio: bytes, count: int) -> Iterator[bytes]:
    """The audio in so many parts of nearly one size, each of whole samples."""
    ends = [len(audio) * number // count // 2 * 2 for number in range(1, count)] + [len(audio)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield audio[start:end]


def _part(scripted: Any) -> Message | Hold | Item:
    if isinstance(scripted, str):
        return writes(scripted)
    if isinstance(scripted, (Message, Hold)):
        return scripted
    kind = scripted.get("type") if isinstance(scripted, Mapping) else None
    if kind == "message":
        return writes(*(part.get("text") or part["refusal"] for part in scripted["content"]))
    if kind == "function_call":
        return dict(scripted)
    raise TypeError(
        f"a scripted response is made of texts, messages, calls and holds, and not of {scripted!r}"
    )
