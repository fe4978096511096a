"""The first snapshot of a run: what it was given, in one schema for all engines.

A producer needs no engine to write it, so that it can start runs of agents it cannot import.
"""

from __future__ import annotations

from typing import Any

import msgspec

from capsule_tasks.errors import InvalidRunState, InvalidSetting

INPUT_SCHEMA = "capsule-run-input/1"
"""The schema of a run that has not made a turn."""


class RunInput(msgspec.Struct, frozen=True):
    """The input of a run, a text or a list of items, and its context."""

    input: str | list[Any]
    context: Any = None


def first_snapshot(given: Any, context: Any = None) -> bytes:
    """The snapshot of a new run under `INPUT_SCHEMA`.

    It was given a text, or a list of items, which may be models of pydantic.
    """
    if not isinstance(given, (str, list)) or not given:
        raise InvalidSetting("input", given, "a text or a list of items, not empty")
    for name, value in (("input", given), ("context", context)):
        try:
            msgspec.json.encode(value, enc_hook=_dumped)
        except (TypeError, ValueError, RecursionError) as fault:
            raise InvalidSetting(name, value, f"what JSON can write: {fault}") from fault
    return msgspec.json.encode(RunInput(given, context), enc_hook=_dumped)


def input_of(snapshot: bytes) -> RunInput:
    """The input in a snapshot under `INPUT_SCHEMA`."""
    try:
        return msgspec.json.decode(snapshot, type=RunInput)
    except msgspec.MsgspecError as fault:
        raise InvalidRunState("$", f"it is not the input of a run: {fault}") from fault


def _dumped(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"no value of type {type(value).__name__}")
