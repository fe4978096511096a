"""The state of a run as JSON, after each turn.

The SDK makes a state when a run waits for a person. A durable run needs one after each turn, which
would cost more than the rest of the turn: each item of the run is serialized and digested every
time, and each agent is described several times, with its tools and settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import agents._run_state_agent_identity as identity
import agents.result
from agents import RunState


class SerializedItems:
    """The items of a run as JSON, each serialized after its own turn only.

    An item is not changed any more once its turn is committed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._names: Mapping[int, str] | None = None

    def state_as_json(
        self, state: RunState[Any], serializer: Callable[[Any], Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """As `RunState.to_json`."""
        serialize = state._serialize_item

        def once(item: Any, *, agent_identity_keys_by_id: Mapping[int, str] | None = None) -> Any:
            if agent_identity_keys_by_id != self._names:  # the items contain the names of agents
                self._known.clear()
                self._names = agent_identity_keys_by_id
            known = self._known.get(id(item))
            if known is None:
                data = serialize(item, agent_identity_keys_by_id=agent_identity_keys_by_id)
                known = self._known[id(item)] = (item, data)
            return known[1]

        state._serialize_item = once  # type: ignore[method-assign]
        try:
            return state.to_json(context_serializer=serializer)
        finally:
            del state._serialize_item


# --- what the SDK does again and again -----------------------------------------------------------

_signature = identity._agent_identity_signature
_rebased = agents.result.rebase_nested_history_owned_item_refs  # type: ignore[attr-defined]
_signatures: ContextVar[dict[int, tuple[Any, str]] | None] = ContextVar(
    "capsule_signatures", default=None
)


@contextmanager
def agents_described_once() -> Iterator[None]:
    """Within the block, and in tasks that it starts, the SDK describes each agent once.

    It orders agents of one name by their descriptions.
    """
    token = _signatures.set({})
    try:
        yield
    finally:
        _signatures.reset(token)


@wraps(_signature)
def _signature_once(agent: Any) -> str:
    known = _signatures.get()
    if known is None:
        return _signature(agent)
    if id(agent) not in known:
        known[id(agent)] = (agent, _signature(agent))
    return known[id(agent)][1]


@wraps(_rebased)
def _rebased_if_any(given: Any, items: Sequence[Any], references: Sequence[Any]) -> list[Any]:
    """References to items of nested histories; without any, no item is digested to find them."""
    found: list[Any] = _rebased(given, items, references) if references else []
    return found


def replace_slow_parts() -> None:
    """Have the SDK do these things less often, with the same results; safe twice."""
    identity._agent_identity_signature = _signature_once
    agents.result.rebase_nested_history_owned_item_refs = _rebased_if_any  # type: ignore[attr-defined,assignment]
