"""Conversations over histories in Redis: what a process sees that takes a run over."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks import History, SyncHistory
from capsule_tasks.runs import AgentId, RunState
from capsule_tasks.runs.conversation import Conversation, conversation_of
from capsule_tasks.runs.items import digest
from capsule_tasks.runs.preparing import prepare_input_with_session
from capsule_tasks.runs.records import Item
from tests.integration.histories import own_settings

AGENT = AgentId("support")
BEFORE = [{"role": "user", "content": f"question {number}"} for number in range(5)]
FOREIGN = {"role": "user", "content": "By the way …"}


def turn(number: int) -> list[Item]:
    call_id = f"call_{number}"
    return [
        {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call_id, "output": "\ud800 ü 1.0"},
    ]


async def after_turn(
    conversation: Conversation, state: RunState, history: History
) -> tuple[Conversation, RunState]:
    """The conversation once its turn is stored, and the state as another process reads it."""
    await history.add_items(conversation.new)
    conversation = conversation.stored()
    state = conversation.in_state(state.after_turn())
    return conversation, RunState.from_string(state.to_string())


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("is_filtered", [False, True])
async def test_a_run_is_seen_by_another_process_as_by_its_own(
    valkey_url: str, limit: int | None, is_filtered: bool
) -> None:
    """With the limit of the history's settings, and after items of others at any place."""
    settings: Any = {"settings": own_settings(), "session_settings": {"limit": limit}}
    async with History("s", valkey_url, **settings) as history:
        await history.add_items(BEFORE)
        state = RunState(run_id="r", start_agent=AGENT, agent=AGENT, input="Hello")
        conversation = await conversation_of(state, history)
        first = BEFORE if limit is None else BEFORE[-limit:]
        assert conversation.view == [*first, {"role": "user", "content": "Hello"}]
        conversation = conversation.with_turn(turn(1))
        if is_filtered:
            conversation = conversation.with_view(BEFORE[:1])
        conversation, state = await after_turn(conversation, state, history)
        await history.add_items([FOREIGN])
        conversation, state = await after_turn(conversation.with_turn(turn(2)), state, history)
        with SyncHistory("s", valkey_url, **settings) as of_another:
            again = await conversation_of(state, of_another)
        seen = [item for item in again.view if item != FOREIGN]
        assert seen == conversation.view
        assert again.view.index(FOREIGN) == len(again.view) - 3
        assert digest((await history.get_items(1))[0]) == state.last_item

        # Many items of others, after which a limited read does not reach the run.
        await history.add_items([FOREIGN] * 9)
        again = await conversation_of(state, history)
        assert [item for item in again.view if item != FOREIGN] == conversation.view

        # And without the run's items.
        await history.clear_session()
        await history.add_items([FOREIGN])
        assert (await conversation_of(state, history)).view == [FOREIGN]


async def test_the_first_input_is_prepared_of_a_history_of_either_kind(valkey_url: str) -> None:
    settings = own_settings()
    async with History("s", valkey_url, settings=settings) as history:
        await history.add_items([*BEFORE, turn(1)[0]])
        prepared = await prepare_input_with_session("Hello", history, lambda h, n: h[-1:] + n)
        assert prepared.to_store == [{"role": "user", "content": "Hello"}]
        assert prepared.input == prepared.to_store, "the last call of the history has no output"
        with SyncHistory("s", valkey_url, settings=settings) as blocking:
            prepared = await prepare_input_with_session("Hello", blocking, limit=3)
        assert prepared.input == [*BEFORE[-2:], {"role": "user", "content": "Hello"}]
