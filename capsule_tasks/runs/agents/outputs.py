"""Outputs: of tools, as a model gets them, and of agents, as their authors want them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from capsule_tasks.errors import InvalidSetting, ModelMisbehaved, OutputNotStorable
from capsule_tasks.runs.agents.schemas import (
    Codec,
    NotStrict,
    Unfit,
    as_json_text,
    codec_of,
    made_strict,
)
from capsule_tasks.runs.models.model import OutputSchema
from capsule_tasks.runs.records import Item

_read_parts = msgspec.json.Decoder(list[Item]).decode
_PARTS = frozenset({"input_text", "input_image", "input_file"})


def output_text(tool: str, value: Any) -> str | list[Item]:
    """The output of a tool as the model gets it: text as it is, anything else as JSON.

    A list of parts, as `{"type": "input_image", …}`, stays a list. Raises OutputNotStorable for
    what is not JSON.
    """
    if isinstance(value, str):
        return value
    try:
        text = as_json_text(value)
        return _read_parts(text) if _are_parts(value) else text
    except Exception as error:
        # An author's class may raise anything while it is encoded.
        raise OutputNotStorable(tool, f"{type(value).__qualname__}: {error}") from error


def _are_parts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and each.get("type") in _PARTS for each in value)
    )


class OutputType:
    """The type of an agent's final output.

    An agent's `output_type` may be one of these, for a type whose schema shall not be strict.
    """

    def __init__(self, kind: Any = str, *, strict: bool | None = None) -> None:
        """A schema is strict if it can be; `strict=True` refuses a type whose schema cannot."""
        self.kind = kind
        self.schema: OutputSchema | None = None
        if kind is str or kind is None:
            return
        self._codec = codec_of(kind, "output_type")
        made = self._codec.schema
        self._is_wrapped = "properties" not in made and made.get("type") != "object"
        if self._is_wrapped:  # servers accept objects only
            self._codec = Codec(msgspec.defstruct("Output", [("response", kind)]))
        try:
            made, is_strict = made_strict(self._codec.schema, strict)
        except NotStrict:
            must = "a type for a strict schema"
            raise InvalidSetting("output_type", kind, must) from None
        self.schema = OutputSchema(name="final_output", parameters=made, strict=is_strict)

    @property
    def is_text(self) -> bool:
        return self.schema is None

    def decode(self, text: str) -> Any:
        """The final output in a model's text. Raises ModelMisbehaved."""
        if self.schema is None:
            return text
        try:
            value = self._codec.decode(text)
        except Unfit as error:
            name = getattr(self.kind, "__qualname__", str(self.kind))
            raise ModelMisbehaved(f"its final output is not of type {name}: {error}") from None
        return value.response if self._is_wrapped else value


def output_type_of(kind: Any) -> OutputType:
    """The OutputType of an agent's `output_type`; made once for each type."""
    if isinstance(kind, OutputType):
        return kind
    try:
        return _output_type(kind)
    except TypeError:  # not hashable, as an Annotated with a list
        return OutputType(kind)


@lru_cache(maxsize=256)
def _output_type(kind: Any) -> OutputType:
    return OutputType(kind)
