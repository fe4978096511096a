"""Outputs of tools as bytes for the ledger, and back as the model would have got them."""

from __future__ import annotations

import json
from typing import Any

from agents import ShellCommandOutput, ShellResult, ToolOutputFileContent, ToolOutputImage
from agents.editor import ApplyPatchResult
from agents.tool import ToolOutputText
from pydantic import TypeAdapter

_TYPED: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ToolOutputText,
        ToolOutputImage,
        ToolOutputFileContent,
        ShellResult,
        ShellCommandOutput,
        ApplyPatchResult,
    )
}
"""Outputs that the SDK treats by their type."""


def encoded(value: Any) -> bytes:
    return json.dumps(_tagged(value)).encode()


def decoded(stored: bytes) -> Any:
    return _untagged(json.loads(stored))


def _tagged(value: Any) -> list[Any]:
    """A pair of a tag and JSON. What is of no known type is kept as the text the model gets."""
    name = type(value).__name__
    if _TYPED.get(name) is type(value):
        return [name, TypeAdapter(type(value)).dump_python(value, mode="json")]
    if isinstance(value, list):
        return ["list", [_tagged(each) for each in value]]
    try:
        if json.loads(json.dumps(value)) == value:
            return ["json", value]
    except (TypeError, ValueError, RecursionError):
        pass
    return ["json", str(value)]


def _untagged(pair: list[Any]) -> Any:
    tag, value = pair
    if tag == "list":
        return [_untagged(each) for each in value]
    if tag == "json":
        return value
    return TypeAdapter(_TYPED[tag]).validate_python(value)
