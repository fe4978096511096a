"""Operations without I/O: which scripts to call, repeat and abandon, in which order.

An operation is a generator. It yields calls, pauses and abandons, and is sent the outcome of each.
Two drivers carry them out, one for asyncio and one for threads, so each operation is written once.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from capsule_tasks.errors import (
    CapsuleError,
    InternalError,
    StorageClosed,
    StorageError,
    StorageForgotten,
    StorageNotReady,
    StorageUnavailable,
)
from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.scripts import Call, Code, script

T = TypeVar("T")
Reply = list[Any]

_REPEATABLE = (StorageUnavailable, StorageNotReady)
_random = random.Random()  # noqa: S311  spreads load, and leaves the program's own chance alone


@script("operation_abandon")
def operation_abandon(operations: str, *, operation_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next attempt."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """Make this call although the caller was cancelled; its outcome is ignored."""

    call: Call


Operation = Generator[Call | Pause | Abandon, Any, T]


def new_operation() -> str:
    """An id that no other write has."""
    return os.urandom(12).hex()


def named(kind: str, operation: str | None) -> str:
    """The name in the operation log: one id may name an append and a pop."""
    if operation is None:
        return f"{kind}:{new_operation()}"
    escaped("operation", operation)
    return f"{kind}:{operation}"


def call_script(call: Call, retry: RetrySettings) -> Operation[Reply]:
    """Call a script, repeat the call if its reply is lost, and return the reply.

    A repeat carries the same operation id, so the operation is done once. If the caller is
    cancelled or interrupted in between, the operation is abandoned: it was done already, or it
    will never be done.
    """
    return (yield from call_script_named(call, retry))[1]


def call_script_named(call: Call, retry: RetrySettings) -> Operation[tuple[str | None, Reply]]:
    """As `call_script`, with the name under which the operation was done."""
    while True:
        started_at = time.monotonic()
        try:
            reply = yield from _attempts(call, retry, started_at)
        except (CapsuleError, GeneratorExit):
            raise
        except BaseException:
            if call.operation_id is not None:
                yield _abandoning(call, started_at)
            raise
        if reply[0] == Code.FORGOTTEN:
            raise StorageForgotten(
                f"a repeat of operation {_as_given(call)} came too late for Redis to know it",
                may_have_written=True,
                operation_id=_as_given(call),
            )
        if reply[0] != Code.ABANDONED or call.operation_id is None:
            return call.operation_id, reply
        # An earlier caller abandoned this operation. Its command may still wait in a socket, so
        # that name stays refused; every repeat goes on under the same next name.
        kind, _, operation = call.operation_id.partition(":")
        call = Call(call.script, call.keys, [f"{kind}~:{operation}", 0, *call.args[2:]])


def _abandoning(call: Call, started_at: float) -> Abandon:
    operations = call.keys[call.script.keys.index("operations")]
    abandon = operation_abandon.call(operations, operation_id=str(call.operation_id))
    return Abandon(abandon.repeated(_age_ms(started_at)))


def _attempts(call: Call, retry: RetrySettings, started_at: float) -> Operation[Reply]:
    may_have_written = False
    lost: StorageError | None = None
    for attempt in itertools.count(1):
        try:
            reply: Reply = yield call
            return reply
        except StorageClosed:
            # Closed in the middle of a call: report what is known of the call.
            if lost is None:
                raise
            lost.may_have_written, lost.operation_id = may_have_written, _as_given(call)
            raise lost from None
        except StorageError as error:
            lost = error
            may_have_written |= error.may_have_written and call.operation_id is not None
            if attempt >= retry.attempts or not isinstance(error, _REPEATABLE):
                error.may_have_written = may_have_written
                error.operation_id = _as_given(call)
                raise
        yield Pause(delay_s(attempt, retry))
        call = call.repeated(_age_ms(started_at))
    raise AssertionError("unreachable")


def _as_given(call: Call) -> str | None:
    """The operation id as the caller of a method gives it."""
    return call.operation_id and call.operation_id.partition(":")[2]


def closed() -> StorageClosed:
    return StorageClosed("these connections to Redis are closed; make new ones")


def reply_of(answer: object) -> Reply:
    """The reply of a script; raises StorageNotReady for an answer that no script gives."""
    if not isinstance(answer, list):
        raise no_reply(answer)
    return answer


def no_reply(answer: object) -> StorageNotReady:
    error = f"Redis: a script was answered with {answer!r}"
    return StorageNotReady(error, may_have_written=True)


def refused(reply: Reply, call: str) -> InternalError:
    return InternalError(f"{call} was answered {reply!r}, which it cannot be")


def _age_ms(started_at: float) -> int:
    """At least 1: zero means that a call was never sent before."""
    return int((time.monotonic() - started_at) * 1000) + 1


def delay_s(attempt: int, retry: RetrySettings) -> float:
    """How long to wait after that many attempts, from 1 on.

    Jitter keeps callers that lost the same server from retrying at the same time.
    """
    max_s = min(retry.max_delay_s, retry.first_delay_s * 2 ** min(attempt - 1, 30))
    return _random.uniform(max_s / 10, max_s)
