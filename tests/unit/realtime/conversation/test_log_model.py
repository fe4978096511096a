"""Whatever the order of its events, a realtime conversation is stored once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.realtime.conversation import ConversationLog
from capsule_tasks.realtime.conversation.versions import (
    WITHOUT_TRANSCRIPT,
    Correction,
    stored,
)
from capsule_tasks.realtime.model import (
    AudioInterrupted,
    InputTranscribed,
    ItemChanged,
    ItemDeleted,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
)
from capsule_tasks.runs.records import Item
from tests.unit.realtime.conversation.test_log import (
    answer,
    audio,
    begun,
    call,
    delta,
    done,
    kept,
    text,
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[ModelEvent]], list[Item]]:
    """For each item, its events in the order in which they come; and what is stored at the end."""
    events: list[list[ModelEvent]] = []
    expected: list[Item] = []
    before: str | None = None
    for number in range(draw(st.integers(1, 8))):
        item_id, said, own = f"i{number}", f"words of {number}", list[ModelEvent]()
        match draw(st.sampled_from(["text", "audio", "answer", "call"])):
            case "text":
                own = [ItemChanged(text(item_id, said), before), done(text(item_id, said))]
                expected.append(kept("user", said))
            case "audio":
                ways = ["never", "fails", "comes"]
                own = [ItemChanged(audio(item_id), before), done(audio(item_id))]
                if (way := draw(st.sampled_from(ways))) != "never":
                    heard = said if way == "comes" else None
                    own.insert(draw(st.integers(1, 2)), InputTranscribed(item_id, 0, heard))
                else:
                    heard = None
                expected.append(kept("user", heard or WITHOUT_TRANSCRIPT))
            case "answer":
                own = [ItemChanged(begun(item_id), before), delta(item_id, said, item_id)]
                is_done = draw(st.booleans())
                own += [done(answer(item_id, said))] if is_done else []
                ended = "completed" if draw(st.booleans()) else "cancelled"
                own.append(ResponseEnded(item_id, ended))  # type: ignore[arg-type]
                own.insert(0, ResponseStarted(item_id))
                is_cut = draw(st.booleans())
                if is_cut:
                    place = draw(st.integers(2, len(own)))
                    own.insert(place, AudioInterrupted(item_id, 0, 500, 1000))
                is_whole = not is_cut and (is_done or ended == "completed")
                status = {} if is_whole else {"status": "incomplete"}
                expected.append(kept("assistant", "words" if is_cut else said, **status))
            case "call":
                own = [
                    ItemChanged(call(item_id, item_id, status="in_progress"), before),
                    done(call(item_id, item_id, status="completed")),
                ]
                expected.append(call(item_id))
        events.append(own)
        before = item_id
    return events, expected


def take(taken: list[Item], found: list[Item | Correction]) -> None:
    for each in found:
        if isinstance(each, Correction):
            assert each.apply(taken)
        else:
            taken.append(each)


@given(conversations(), st.data())
def test_any_interleaving_is_stored_once_and_in_order(
    conversation: tuple[list[list[ModelEvent]], list[Item]], data: st.DataObject
) -> None:
    """Items are announced in order; what else the server says of them comes at any time.

    A transcript may come when its audio is stored already, as some later input was final.
    """
    events, expected = conversation
    log, taken = ConversationLog(), list[Item]()
    queues = [list(own) for own in events]
    announced = 0
    while any(queues):
        ready = [n for n, queue in enumerate(queues) if queue and n <= announced]
        chosen = data.draw(st.sampled_from(ready))
        event = queues[chosen].pop(0)
        log.apply(event)
        if isinstance(event, ItemChanged) and chosen == announced:
            announced += 1
        assert [item["id"] for item in log.items()] == [f"i{n}" for n in range(announced)]
        take(taken, log.take_final())
    take(taken, log.take_final(at_end=True))
    assert len(taken) == len(expected)
    for found, wanted, item in zip(taken, expected, log.items(), strict=True):
        if wanted["type"] == "function_call":
            # A response that ends waits for no call.
            assert found in (wanted, {**wanted, "status": "incomplete"})
        elif wanted["role"] == "user":
            assert found in (wanted, kept("user", WITHOUT_TRANSCRIPT))
            assert stored(item) == wanted
        else:
            assert found == wanted == stored(item)


@given(st.lists(st.integers(0, 12), max_size=30), st.lists(st.integers(0, 30), max_size=10))
def test_the_live_items_are_a_list_with_insertions(places: list[int], deleted: list[int]) -> None:
    log, model = ConversationLog(), list[str]()
    count = 0
    for number, place in enumerate(places):
        after = model[-1 - place] if place < len(model) else None
        model.insert(len(model) - place if after else len(model), f"i{number}")
        log.apply(done(text(f"i{number}", "x"), after))
        if number in deleted:
            log.apply(ItemDeleted(f"i{number}"))
            model.remove(f"i{number}")
        count += len(log.take_final()) if number % 3 == 0 else 0
        assert [item["id"] for item in log.items()] == model
    assert count + len(log.take_final()) == len(model)
