"""The model's view of a run in memory, and the same view made again by another process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs import AgentId, FilteredInput, PendingCall, RunState, ServerConversation
from capsule_tasks.runs.compaction import summary_message
from capsule_tasks.runs.conversation import Conversation, View, conversation_of
from capsule_tasks.runs.identity import ToolKey
from capsule_tasks.runs.items import RunningDigest, deduplicated, digest, for_model
from capsule_tasks.runs.records import Item
from tests.unit.runs.test_preparing import REASONING, answer, call, output, user

TRIAGE = AgentId("triage")
EARLIER = [user("hi"), answer("hello")]


def state_of(given_items: Any = "bye", **fields: Any) -> RunState:
    return RunState(run_id="r", start_agent=TRIAGE, agent=TRIAGE, input=given_items, **fields)


def after(conversation: Conversation, state: RunState, stored: list[Item]) -> Any:
    """The conversation and the state after a turn whose items were stored, by whoever resumes."""
    stored += conversation.new if conversation.has_history else ()
    conversation = conversation.stored()
    state = conversation.in_state(state.after_turn())
    return conversation, RunState.from_string(state.to_string())


def turn(number: int) -> list[Item]:
    return [call(f"c{number}"), output(f"c{number}")]


async def test_a_new_run_sees_the_history_and_its_input_which_is_new() -> None:
    conversation = await conversation_of(state_of(), EARLIER)
    assert conversation.view == [*EARLIER, user("bye")]
    assert conversation.new == (user("bye"),)
    assert conversation.filtered is None


async def test_a_turn_is_stored_once_and_seen_ever_after() -> None:
    stored = list(EARLIER)
    conversation, state = await conversation_of(state_of(), stored), state_of()
    conversation, state = after(conversation.with_turn(turn(1)), state, stored)
    assert stored == [*EARLIER, user("bye"), *turn(1)]
    assert (state.stored_items, state.last_item) == (3, digest(stored[-1]))
    assert (state.input, state.held_items, conversation.new) == ("", [], ())
    again = await conversation_of(state, stored)
    assert (again.view, again.digest) == (conversation.view, conversation.digest)
    assert again.stored() is again


async def test_of_an_output_that_a_turn_has_twice_the_latest_is_stored() -> None:
    conversation = await conversation_of(state_of([]), [])
    conversation = conversation.with_turn([*turn(1), output("c1", "late")])
    assert list(conversation.new) == conversation.view == [call("c1"), output("c1", "late")]


async def test_items_appended_by_others_are_seen_after_a_resume() -> None:
    stored = list(EARLIER)
    conversation, state = await conversation_of(state_of(), stored), state_of()
    conversation, state = after(conversation.with_turn(turn(1)), state, stored)
    stored += [user("by the way"), call("foreign")]
    again = await conversation_of(state, stored)
    assert again.view == [*conversation.view, user("by the way")]


async def test_calls_that_wait_are_seen_and_orphans_are_not() -> None:
    stored = [call("lost"), *EARLIER]
    conversation, state = await conversation_of(state_of(), stored), state_of()
    state = state.with_calls(
        [PendingCall(call_id="c1", tool=ToolKey("look"), agent=TRIAGE, arguments="{}")]
    )
    reply = [REASONING, call("c1")]
    conversation, state = after(conversation.with_turn(reply), state, stored)
    again = await conversation_of(state, stored)
    assert again.view == [*EARLIER, user("bye"), *reply] == conversation.view
    assert again.with_turn([output("c1")]).view == [*again.view, output("c1")]


async def test_a_filter_narrows_the_view_for_good_and_the_history_keeps_everything() -> None:
    stored = list(EARLIER)
    conversation, state = await conversation_of(state_of(), stored), state_of()
    conversation = conversation.with_turn(turn(1)).with_view([user("in short"), call("lost")])
    assert conversation.view == [user("in short")]
    conversation, state = after(conversation, state, stored)
    assert stored == [*EARLIER, user("bye"), *turn(1)]
    assert state.filtered_input == FilteredInput([user("in short")], 3, digest(stored[-1]))
    stored.append(user("foreign"))  # in front of items of the run
    conversation, state = after(conversation.with_turn(turn(2)), state, stored)
    assert conversation.view == [user("in short"), *turn(2)]
    again = await conversation_of(state, stored)
    assert again.view == [user("in short"), user("foreign"), *turn(2)]


async def test_a_callback_is_called_once_and_its_view_is_kept() -> None:
    stored, calls = list(EARLIER), []

    def last_only(history: list[Item], new: list[Item]) -> list[Item]:
        calls.append(1)
        return history[-1:] + new

    conversation = await conversation_of(state_of(), stored, callback=last_only)
    assert (conversation.view, conversation.new) == ([EARLIER[1], user("bye")], (user("bye"),))
    conversation, state = after(conversation.with_turn(turn(1)), state_of(), stored)
    again = await conversation_of(state, stored, callback=last_only)
    assert again.view == conversation.view == [EARLIER[1], user("bye"), *turn(1)]
    assert len(calls) == 1


async def test_a_call_that_the_caller_has_given_stays_in_a_view_that_is_made_again() -> None:
    stored: list[Item] = []
    state = state_of([call("given")])
    conversation = await conversation_of(state, stored, callback=lambda _, new: new)
    conversation, state = after(conversation.with_turn(turn(1)), state, stored)
    again = await conversation_of(state, stored)
    assert again.view == conversation.view == [call("given"), *turn(1)]


async def test_a_limit_counts_items_from_before_the_run() -> None:
    stored = [*turn(0), *EARLIER]
    conversation = await conversation_of(state_of(), stored, limit=3)
    assert conversation.view == [*EARLIER, user("bye")]
    conversation, state = after(conversation.with_turn(turn(1)), state_of(), stored)
    assert (await conversation_of(state, stored, limit=3)).view == conversation.view


class LimitedHistory:
    """The part of a history that a conversation reads, with settings of its own."""

    def __init__(self, items: list[Item], limit: int | None) -> None:
        self.items, self.session_settings = items, {"limit": limit}
        self.read: list[int | None] = []

    async def get_items(self, limit: int | None = None) -> list[Item]:
        limit = self.session_settings["limit"] if limit is None else limit
        self.read.append(limit)
        return self.items if limit is None else self.items[-limit:]


@pytest.mark.parametrize("limit", [None, 1, 3])
async def test_the_limit_of_the_history_counts_too(limit: int | None) -> None:
    stored = [*turn(0), *EARLIER]
    conversation = await conversation_of(state_of(), LimitedHistory(stored, limit))
    conversation, state = after(conversation.with_turn(turn(1)), state_of(), stored)
    history = LimitedHistory(stored, limit)
    assert (await conversation_of(state, history)).view == conversation.view
    assert history.read == [limit and limit + 3], "more was read than the model sees"


async def test_of_a_compacted_history_everything_is_seen() -> None:
    stored = list(EARLIER)
    conversation = await conversation_of(state_of(), stored, callback=lambda _, n: n)
    _, state = after(conversation.with_turn(turn(1)), state_of(), stored)
    summary = [user("All that was.")]
    assert (await conversation_of(state, summary)).view == summary
    kept = [*summary, *stored[-2:]]
    assert (await conversation_of(state, kept)).view == kept


async def test_items_in_the_place_of_compacted_ones_are_not_taken_for_them() -> None:
    short = FilteredInput([user("short")], 1, last_item=digest(user("bye")))
    fields: Any = {"stored_items": 4, "last_item": digest(answer("d")), "filtered_input": short}
    state = state_of("", turn=3, **fields)
    compacted = [user("bye"), summary_message("so far"), answer("c"), answer("d")]
    assert (await conversation_of(state, compacted)).view == compacted


async def test_a_compaction_replaces_what_the_model_sees_and_the_run_goes_on() -> None:
    stored = list(EARLIER)
    conversation, state = await conversation_of(state_of(), stored), state_of()
    conversation, state = after(conversation.with_turn(turn(1)), state, stored)
    stored[:-2] = [user("In short.")]
    conversation = await conversation_of(state, stored)
    assert (conversation.view, conversation.new) == ([user("In short."), *turn(1)], ())
    state = conversation.in_state(state)
    assert (await conversation_of(state, stored)).digest == conversation.digest
    conversation, state = after(conversation.with_turn(turn(2)), state, stored)
    assert (await conversation_of(state, stored)).view == conversation.view == stored


async def test_a_run_without_a_session_keeps_its_items_in_its_state() -> None:
    conversation = await conversation_of(state_of())
    conversation, state = after(conversation.with_turn(turn(1)), state_of(), [])
    assert state.held_items == [user("bye"), *turn(1)] == list(conversation.new)
    assert state.stored_items == 0
    again = await conversation_of(state)
    assert (again.view, again.new) == (conversation.view, conversation.new)
    filtered, state = after(again.with_view([user("short")]).with_turn(turn(2)), state, [])
    assert (await conversation_of(state)).view == [user("short"), *turn(2)] == filtered.view
    assert len(state.held_items) == 5


async def test_an_old_state_without_a_digest_has_its_items_at_the_end_of_the_history() -> None:
    stored = [*EARLIER, user("bye"), *turn(1)]
    state = state_of("", turn=1, stored_items=3, filtered_input=FilteredInput([user("short")], 1))
    assert (await conversation_of(state, stored)).view == [user("short"), *turn(1)]


# --- conversations that the model's server keeps ------------------------------------------------


@pytest.mark.parametrize("server", [ServerConversation(), ServerConversation("conv_1")])
async def test_the_server_is_sent_only_what_it_does_not_know(server: ServerConversation) -> None:
    state = state_of(conversation=server)
    conversation = await conversation_of(state)
    assert conversation.view == [user("bye")]
    conversation = conversation.with_turn(turn(1), replied=1, response_id="resp_1")
    assert conversation.view == [output("c1")]
    assert conversation.new == (user("bye"), *turn(1))
    conversation, state = after(conversation, state, [])
    assert state.conversation == ServerConversation(
        server.conversation_id, None if server.conversation_id else "resp_1", 2
    )
    again = await conversation_of(state)
    assert again.view == [output("c1")]
    done = again.with_turn([answer("done")], replied=1, response_id="resp_2")
    _, state = after(done, state, [])
    assert (await conversation_of(state)).view == []
    assert state.conversation is not None
    assert state.conversation.acknowledged_items == 4


async def test_an_input_that_the_server_knows_is_not_sent_again() -> None:
    """A first turn that failed after its reply keeps the input, for guardrails to see it again."""
    state = state_of(conversation=ServerConversation(acknowledged_items=2))
    assert (await conversation_of(state)).view == []


async def test_a_filter_that_returns_no_items_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"the filtered input\[0\]"):
        (await conversation_of(state_of())).with_view(["text"])


async def test_a_reply_without_an_id_acknowledges_nothing() -> None:
    conversation = await conversation_of(state_of(conversation=ServerConversation()))
    conversation = conversation.with_turn(turn(1), replied=1)
    assert conversation.view == [user("bye"), *turn(1)]


async def test_a_history_beside_the_servers_conversation_is_refused() -> None:
    for history in ([], LimitedHistory([], None)):
        with pytest.raises(InvalidSetting, match=r"session.*server keeps"):
            await conversation_of(state_of(conversation=ServerConversation("conv_1")), history)


# --- views --------------------------------------------------------------------------------------


def test_views_that_go_different_ways_do_not_see_each_others_items() -> None:
    first = View([user("a")])
    one, other = first.with_items([user("b")]), first.with_items([user("c")])
    longer = one.with_items([user("d")])
    for view, texts in ((longer, "abd"), (first, "a"), (one, "ab"), (other, "ac"), (first, "a")):
        assert view.items == [user(text) for text in texts]
        assert view.digest == RunningDigest(view.items).hexdigest()
        assert len(view) == len(texts)
    first.items.append(user("x"))
    assert first.items == [user("a")]


def test_a_turn_encodes_only_its_own_items(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Item] = []
    update = RunningDigest.update

    def noted(self: RunningDigest, items: Any) -> None:
        items = list(items)
        encoded.extend(items)
        update(self, items)

    monkeypatch.setattr(RunningDigest, "update", noted)
    conversation = Conversation(seen=View([user(str(number)) for number in range(50)]))
    assert conversation.digest
    encoded.clear()
    for number in range(3):
        conversation = conversation.with_turn(turn(number))
        assert conversation.digest
        assert encoded == turn(number)
        encoded.clear()


# --- any run, beside a plain reference ----------------------------------------------------------

texts = st.sampled_from(["a", "b", "c"])
ids = st.sampled_from(["1", "2", "3", "4"])
pairs = st.builds(lambda i, t: [call(i), output(i, t)], ids, texts)
earlier = st.lists(pairs | st.builds(lambda t: [user(t), answer(t)], texts), max_size=3)
steps = st.lists(
    st.tuples(st.sampled_from(["turn", "filter", "foreign"]), pairs, st.integers(0, 4)),
    max_size=6,
)


@settings(max_examples=150)
@given(earlier, steps, st.sampled_from(["plain", "callback", "limit", "no history"]))
async def test_a_conversation_made_again_is_the_one_that_was_kept_in_memory(
    before: list[list[Item]], steps: list[Any], mode: str
) -> None:
    """Filters and turns in any order; foreign items, last, are what only a resume sees."""
    stored = [item for pair in before for item in pair]
    options: dict[str, Any] = {"limit": 2} if mode == "limit" else {}
    if mode == "callback":
        options["callback"] = lambda history, new: history[:1] + new
    history = None if mode == "no history" else stored
    state = state_of()
    kept = await conversation_of(state, history, **options)
    reference, foreign = kept.view, []
    for kind, items, count in steps:
        if kind == "foreign" and history is not None:
            foreign.append(user(f"foreign {count}"))
            continue
        if kind == "filter":
            narrowed = [each for each in reference[-count:] if "role" in each]
            kept, reference = kept.with_view(copy.deepcopy(narrowed)), narrowed
        kept = kept.with_turn(items)
        reference = deduplicated([*reference, *for_model(items)])
        kept, state = after(kept, state, stored)
    if not state.turn:
        return
    assert kept.view == reference
    options.pop("callback", None)
    again = await conversation_of(state, history, **options)
    assert again.view == reference
    assert again.digest == kept.digest == RunningDigest(reference).hexdigest()
    assert again.new == kept.new
    stored += foreign
    if history is not None:
        seen = await conversation_of(state, history, **options)
        assert seen.view == [*reference, *foreign]
