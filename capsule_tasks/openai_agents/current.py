"""The turn that the running code works for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from capsule_tasks.durable import Ledger, OnUncertain, ToolCall
from capsule_tasks.openai_agents import outputs
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.storage.keys import MAX_ID_BYTES

UNCERTAIN = (
    "This call was started before and was interrupted. Whether it took effect is unknown. Find out "
    "before you make it again."
)
"""The text for the model about an uncertain call of a tool whose policy is `tell`."""


@dataclass
class Causes:
    """Errors that models and tools raised, by which a failed run is told from a faulty one."""

    of_models: list[BaseException] = field(default_factory=list)
    of_tools: list[BaseException] = field(default_factory=list)


@dataclass(frozen=True)
class CurrentTurn:
    """The ledger of the turn, and the ids of the tool calls within which the code runs."""

    ledger: Ledger
    on_uncertain: Callable[[str], OnUncertain]
    causes: Causes
    path: tuple[str, ...] = ()

    def key(self, call_id: str) -> str:
        """The id of a call in the ledger: different for calls with one id in different agents."""
        key = "/".join((*self.path, call_id))
        if len(key.encode()) > _MAX_KEY_BYTES:
            key = sha256(key.encode()).hexdigest()
        return key


_MAX_KEY_BYTES = MAX_ID_BYTES - 64
"""A request to settle a call has the key in its id."""

_current: ContextVar[CurrentTurn | None] = ContextVar("capsule_current_turn", default=None)


def current_turn() -> CurrentTurn | None:
    """The turn of the running code; None outside of durable runs."""
    return _current.get()


@contextmanager
def working_for(turn: CurrentTurn | None) -> Iterator[None]:
    token = _current.set(turn)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def within(turn: CurrentTurn, call_id: str) -> Iterator[None]:
    """The code of a tool call: model calls and tool calls in it have keys of their own."""
    with working_for(replace(turn, path=(*turn.path, call_id))):
        yield


async def recorded(
    turn: CurrentTurn,
    call: PendingCall,
    make: Callable[[], Awaitable[Any]],
    *,
    part: str = "",
) -> Any:
    """The output of a tool call: recorded by the ledger, or made now and recorded.

    `part` names one of several effects of the call.
    """
    made: list[Any] = []

    async def make_and_encode() -> bytes:
        with within(turn, call.call_id):
            try:
                made.append(await _usable(make()))
            except (Exception, asyncio.CancelledError) as error:
                turn.causes.of_tools.append(error)
                raise
        return outputs.encoded(made[0])

    planned = ToolCall(
        turn.key(call.call_id + part),
        call.tool.text,
        call.agent.text,
        call.arguments,
        turn.on_uncertain(call.tool.text),
    )
    outcome = await turn.ledger.tool_call(planned, make_and_encode)
    if not outcome.is_known:
        return UNCERTAIN
    return made[0] if made else outputs.decoded(outcome.output)


async def _usable(making: Awaitable[Any]) -> Any:
    """The output that is awaited; text in a form that can be stored.

    A tool that exits fails, and does not end the process of all other runs.
    """
    try:
        output = await making
        return sendable(output) if isinstance(output, str) else output
    except (SystemExit, KeyboardInterrupt) as exit_:
        raise RuntimeError(f"the tool raised {exit_!r}") from exit_
