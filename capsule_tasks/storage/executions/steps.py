"""The ledger of an execution's steps, as generators without I/O."""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from capsule_tasks.errors import (
    CallChanged,
    EffectUncertain,
    InvalidSetting,
    OutputNotStorable,
    StepMisused,
    StorageError,
)
from capsule_tasks.protocol.values import NotCarried, revive, sendable, to_wire
from capsule_tasks.settings import StepSettings
from capsule_tasks.storage.keys import StepKeys, escaped
from capsule_tasks.storage.operations import (
    Abandon,
    Operation,
    Reply,
    call_script,
    named,
    refused,
)
from capsule_tasks.storage.runs.types import time_of
from capsule_tasks.storage.scripts import Call, Code, script

Outcome = Literal["output", "undone", "failed"]
_VALUE, _NO_VALUE = b"v", b"-"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ext_hook=revive).decode


@script("executions/step_start")
def step_start(
    keys: StepKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    step: str,
    fingerprint: str,
    retry: int,
) -> None: ...


@script("executions/step_end")
def step_end(
    keys: StepKeys,
    *,
    operation_id: str,
    ttl_ms: int,
    start_operation: str,
    step: str,
    outcome: Outcome,
    value: bytes,
) -> None: ...


@dataclass(frozen=True)
class StepStarted:
    """A step that has been started. Only the holder of this object may run it."""

    name: str
    operation_id: str


@dataclass(frozen=True)
class StepDone:
    """A step that was made before."""

    value: Any


class StepCore:
    """The steps of one execution."""

    def __init__(self, execution_id: str, settings: StepSettings) -> None:
        self._settings = settings
        self._keys = StepKeys(execution_id, settings.prefix)
        self._ttl_ms = int(settings.ttl_s * 1000)

    def start(
        self, name: str, fingerprint: str, *, retry: bool
    ) -> Operation[StepStarted | StepDone]:
        """Record that a step is about to run.

        Raises EffectUncertain if the step was started and did not finish (unless `retry`),
        CallChanged if the step was started with other arguments, and OutputNotStorable if it was
        done but its output could not be stored.
        """
        escaped("step name", name)
        operation_id = named("start", None)
        call = step_start.call(
            self._keys,
            operation_id=operation_id,
            ttl_ms=self._ttl_ms,
            step=name,
            fingerprint=fingerprint,
            retry=int(retry),
        )
        try:
            reply = yield from call_script(call, self._settings.retry)
        except GeneratorExit:
            raise
        except BaseException as error:
            # The step will not run, so it must not count as uncertain later.
            if not isinstance(error, StorageError) or error.may_have_written:
                yield Abandon(self._end_call(StepStarted(name, operation_id), "undone", b""))
            raise
        match reply[0]:
            case Code.DONE:
                return StepStarted(name, operation_id)
            case Code.FINISHED:
                return StepDone(decoded(name, reply[1]))
            case Code.UNCERTAIN:
                began_at = time_of(int(reply[1])).isoformat(timespec="milliseconds")
                why = reply[2].decode() or "its process was lost, or is still at it"
                raise EffectUncertain(name, began_at, why)
            case Code.CHANGED:
                why = "it had other arguments; give each step of an execution a name of its own"
                raise CallChanged(name, why)
        raise refused(reply, f"step {name!r:.100}")

    def finish(self, started: StepStarted, value: Any) -> Operation[Any]:
        """Keep what a step gave, and return what counts: what was kept first."""
        record, why = _encoded(value, self._settings.max_output_bytes)
        reply = yield from self._end(started, "output", record)
        if why:
            raise OutputNotStorable(started.name, why)
        return decoded(started.name, reply[1])

    def undo(self, started: StepStarted) -> Operation[None]:
        """Record that the step was not done, so that it may be started again."""
        yield from self._end(started, "undone", b"")

    def fail(self, started: StepStarted, reason: str) -> Operation[None]:
        """Record that the step failed midway: whether it took effect is unknown."""
        yield from self._end(started, "failed", sendable(reason)[:500].encode())

    def _end(self, started: StepStarted, outcome: Outcome, value: bytes) -> Operation[Reply]:
        return call_script(self._end_call(started, outcome, value), self._settings.retry)

    def _end_call(self, started: StepStarted, outcome: Outcome, value: bytes) -> Call:
        return step_end.call(
            self._keys,
            operation_id=named("end", None),
            ttl_ms=self._ttl_ms,
            start_operation=started.operation_id,
            step=started.name,
            outcome=outcome,
            value=value,
        )


def fingerprint_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Equal in every process for equal arguments.

    What is neither JSON nor one of a few values with one spelling counts by its type only.
    """
    try:
        spelled = json.dumps([_plain(args), _plain(kwargs)])
    except (RecursionError, ValueError):
        return "unknown"
    return hashlib.sha256(spelled.encode()).hexdigest()[:32]


_SPELLED: dict[type, Callable[[Any], str]] = {
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    complex: repr,
    dt.date: dt.date.isoformat,
    dt.datetime: dt.datetime.isoformat,
    dt.time: dt.time.isoformat,
    dt.timedelta: repr,
    decimal.Decimal: str,
    uuid.UUID: str,
}


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if issubclass(kind, dict):
        pairs = [(k if type(k) is str else json.dumps([_plain(k)]), v) for k, v in value.items()]
        return {key: _plain(each) for key, each in sorted(pairs, key=lambda pair: pair[0])}
    if issubclass(kind, (list, tuple)):
        return [_plain(each) for each in value]
    spell = _SPELLED.get(kind)
    named = f"{kind.__module__}.{kind.__qualname__}"
    return f"<{named} {spell(value)}>" if spell else f"<{named}>"


def check_name(name: object) -> None:
    if not isinstance(name, str):
        raise StepMisused(name, "its name comes first, and is text: step('charge', charge, 42)")


def decoded(name: str, record: bytes) -> Any:
    if record[:1] == _NO_VALUE:
        raise OutputNotStorable(name, record[1:].decode())
    return _decode(record[1:])


def _encoded(value: Any, max_size: int) -> tuple[bytes, str]:
    """The record of an output; and why there is none, which is kept in its place."""
    why = ""
    try:
        record = _VALUE + _encode(to_wire(value))
        if len(record) > max_size:
            why = f"it has {len(record)} bytes, over the limit of {max_size}"
    except (NotCarried, TypeError, ValueError, OverflowError, InvalidSetting) as error:
        why = f"it is of type {type(value).__qualname__}: {error}"
    return (_NO_VALUE + sendable(why).encode(), why) if why else (record, "")
