"""The items of a realtime conversation, as they are now and as they are handed out to be stored."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.realtime.conversation import ConversationLog
from capsule_tasks.realtime.conversation.versions import WITHOUT_TRANSCRIPT, Correction
from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioInterrupted,
    InputTranscribed,
    ItemChanged,
    ItemDeleted,
    ItemTruncated,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    TextDelta,
)
from capsule_tasks.runs.records import Item

# --- items of the server, and as they are stored -------------------------------------------------


def text(item_id: str, said: str = "", role: str = "user", **fields: Any) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": said}]
    return {"id": item_id, "type": "message", "role": role, "content": content, **fields}


def audio(item_id: str, transcript: str | None = None, role: str = "user", **fields: Any) -> Item:
    kind = "output_audio" if role == "assistant" else "input_audio"
    content = [{"type": kind, "transcript": transcript}]
    return {"id": item_id, "type": "message", "role": role, "content": content, **fields}


def begun(item_id: str) -> Item:
    """An answer as it is announced."""
    message = {"id": item_id, "object": "realtime.item", "type": "message", "role": "assistant"}
    return {**message, "status": "in_progress", "content": []}


def answer(item_id: str, transcript: str | None, status: str = "completed") -> Item:
    return audio(item_id, transcript, "assistant", status=status)


def call(call_id: str, item_id: str = "", **fields: Any) -> Item:
    own = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    return {**({"id": item_id} if item_id else {}), **own, **fields}


def output(call_id: str, said: str = "sunny") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def kept(role: str, said: str, **fields: Any) -> Item:
    """A message as it is stored."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}], **fields}


def done(item: Item, after: str | None = None) -> ItemChanged:
    return ItemChanged(item, after, is_final=True)


def delta(item_id: str, said: str, response_id: str = "r1", at: int = 0) -> TextDelta:
    return TextDelta(said, response_id, item_id, at, is_transcript=True)


def log_of(*events: ModelEvent) -> ConversationLog:
    log = ConversationLog()
    for event in events:
        log.apply(event)
    return log


def texts(log: ConversationLog) -> list[str | None]:
    """The text of the first part of each item, as it is now."""
    return [
        part.get("transcript") or part.get("text")
        for item in log.items()
        for part in (item.get("content") or [{}])[:1]
    ]


# --- the live items ------------------------------------------------------------------------------


def test_an_item_is_added_once_and_then_updated_if_it_says_something_new() -> None:
    log = ConversationLog()
    assert log.apply(ItemChanged(text("u1", "hello"))) == "added"
    assert log.last_added == text("u1", "hello")
    assert log.apply(ItemChanged(text("u1", "hello"))) is None
    assert log.apply(done(text("u1", "hello!"))) == "updated"
    assert log.items() == [text("u1", "hello!")]
    assert log.apply(AudioDelta(b"", "r1", "a1")) is None


def test_items_are_in_the_order_of_the_conversation() -> None:
    log = log_of(
        ItemChanged(text("a")),
        ItemChanged(text("c")),
        ItemChanged(text("b"), after="a"),
        ItemChanged(text("d"), after="b"),
        ItemChanged(text("e"), after="nobody knows it"),
        ItemChanged(text("f"), after="e"),
        ItemChanged(text("b", "later"), after="e"),
    )
    assert [item["id"] for item in log.items()] == ["a", "b", "d", "c", "e", "f"]


def test_a_version_without_text_erases_no_text() -> None:
    log = log_of(
        ItemChanged(audio("u1", "hello")),
        ItemChanged(audio("u1")),
        done(answer("a1", "good day")),
        ItemChanged(answer("a1", None)),
        ItemChanged(answer("a1", "")),
        ItemChanged({**answer("a1", ""), "content": []}),
        ItemChanged(call("c1", "f1", arguments="{1}")),
        ItemChanged(call("c1", "f1", arguments="")),
    )
    assert texts(log)[:2] == ["hello", "good day"]
    assert log.items()[2]["arguments"] == "{1}"


def test_images_stay_where_the_server_repeats_a_message_without_them() -> None:
    look = {"type": "input_text", "text": "look"}
    images = [{"type": "input_image", "image_url": f"data:{n}"} for n in range(2)]
    message = {"id": "u1", "type": "message", "role": "user"}
    log = log_of(
        ItemChanged({**message, "content": [images[0], look, images[1]]}),
        ItemChanged({**message, "content": [look]}),
        done({**message, "content": [{"type": "input_image"}, look]}),
    )
    assert log.items()[0]["content"] == [images[0], look, images[1]]
    assert log.take_final()[0]["content"] == [images[0], look, images[1]]


def test_text_grows_without_events_and_a_whole_version_replaces_it() -> None:
    log = log_of(ItemChanged(begun("a1")))
    assert log.apply(delta("a1", "good ")) is None
    assert log.apply(delta("a1", "day")) is None
    assert texts(log) == ["good day"]
    assert log.apply(delta("a1", ", sir")) is None
    assert texts(log) == ["good day, sir"]
    log.apply(done(answer("a1", "Good day, sir.")))
    log.apply(delta("a1", "late"))
    assert texts(log) == ["Good day, sir."]


def test_text_of_an_item_that_was_not_announced_adds_it() -> None:
    log = ConversationLog()
    assert log.apply(delta("a1", "good", at=1)) == "added"
    assert log.last_added["content"][1] == {"type": "output_audio", "transcript": "good"}
    assert log.apply(ItemChanged(answer("a1", None))) == "updated"
    assert log.apply(TextDelta("x", "r1", "a2")) == "added"
    assert log.last_added["content"] == [{"type": "output_text", "text": "x"}]


def test_a_transcript_goes_to_its_part_and_to_no_other() -> None:
    parts: list[Item] = [
        {"type": "input_text", "text": "before"},
        {"type": "input_audio", "transcript": None},
        {"type": "input_audio", "transcript": "second"},
    ]
    log = log_of(
        ItemChanged(text("u0")),
        ItemChanged({"id": "u1", "type": "message", "role": "user", "content": parts}),
    )
    assert log.apply(InputTranscribed("u1", 1, "first")) == "updated"
    assert log.items()[1]["content"] == [parts[0], {**parts[1], "transcript": "first"}, parts[2]]
    log.apply(InputTranscribed("u1", 0, "wrong index"))
    assert log.items()[1]["content"][0] == parts[0]
    assert parts[1]["transcript"] is None, "an item of an event was changed"


def test_a_transcript_of_an_unknown_item_adds_it() -> None:
    log = ConversationLog()
    assert log.apply(InputTranscribed("u1", 0, "hello")) == "added"
    assert log.last_added == audio("u1", "hello")
    assert log.take_final() == [kept("user", "hello")]
    assert log.apply(ItemChanged(audio("u1"))) is None


def test_a_deleted_item_is_gone_and_late_events_do_not_bring_it_back() -> None:
    log = log_of(ItemChanged(audio("u1")), ItemChanged(begun("a1")))
    assert log.apply(ItemDeleted("u1")) == "updated"
    assert log.apply(ItemDeleted("u1")) is None
    assert log.apply(InputTranscribed("u1", 0, "late")) is None
    assert log.apply(AudioInterrupted("u1", 0, 1, 2)) is None
    log.apply(ItemDeleted("a1"))
    assert log.apply(delta("a1", "late")) is None
    assert log.items() == []
    assert log.apply(done(text("u1", "made anew"))) == "added"
    assert log.take_final(at_end=True) == [kept("user", "made anew")]


# --- interruptions -------------------------------------------------------------------------------

SAID = "one two three four five"


@pytest.mark.parametrize(
    ("played_ms", "heard"),
    [(0, None), (300, "one"), (500, "one two"), (520, "one two"), (999, "one two three four")],
)
def test_an_interrupted_answer_has_the_words_that_were_heard(
    played_ms: int, heard: str | None
) -> None:
    log = log_of(ResponseStarted("r1"), ItemChanged(begun("a1")), delta("a1", SAID))
    assert log.apply(AudioInterrupted("a1", 0, played_ms, 1000)) == "updated"
    assert texts(log) == [heard]
    log.apply(delta("a1", " six"))
    log.apply(done(answer("a1", SAID + " six seven", status="completed")))
    log.apply(ResponseEnded("r1", "cancelled"))
    assert texts(log) == [heard]
    incomplete = [kept("assistant", heard, status="incomplete")] if heard else []
    assert log.take_final() == incomplete


def test_text_that_comes_after_the_interruption_is_cut_too() -> None:
    log = log_of(ItemChanged(begun("a1")), AudioInterrupted("a1", 0, 500, 1000), delta("a1", SAID))
    log.apply(done(answer("a1", SAID, status="incomplete")))
    assert texts(log) == ["one two"]


def test_the_first_interruption_of_an_answer_counts() -> None:
    log = log_of(ItemChanged(begun("a1")), delta("a1", SAID), AudioInterrupted("a1", 0, 500, 1000))
    log.apply(delta("a1", " six seven"))
    assert log.apply(ItemTruncated("a1", 0, 500, 1000)) is None
    assert log.apply(ItemTruncated("a1", 1, 100, 1000)) is None
    assert texts(log) == ["one two"]


def test_a_truncation_cuts_as_an_interruption_does() -> None:
    log = log_of(done(answer("a1", SAID)))
    assert log.apply(ItemTruncated("a1", 0, 500, 1000)) == "updated"
    assert log.items()[0]["status"] == "incomplete"
    assert log.apply(ItemTruncated("a1", 0, 500, 1000)) is None
    assert texts(log) == ["one two"]
    log = log_of(done(answer("a1", SAID)))
    log.apply(ItemTruncated("a1", 0, 500, None))
    log.apply(ItemChanged(answer("a1", SAID + " six")))
    assert (texts(log), log.items()[0]["status"]) == ([SAID + " six"], "incomplete")


@pytest.mark.parametrize("played_ms", [None, 1000, 2000])
def test_an_answer_that_was_heard_to_its_end_is_whole(played_ms: int | None) -> None:
    log = log_of(done(answer("a1", SAID)))
    assert log.apply(AudioInterrupted("a1", 0, played_ms, 1000)) is None
    assert log.take_final() == [kept("assistant", SAID)]


def test_an_answer_that_is_interrupted_after_it_was_handed_out_is_corrected() -> None:
    log = log_of(done(answer("a1", SAID)))
    assert log.take_final() == [kept("assistant", SAID)]
    half = kept("assistant", "one two", status="incomplete")
    log.apply(AudioInterrupted("a1", 0, 500, 1000))
    log.apply(ItemTruncated("a1", 0, 500, 1000))
    log.apply(done(text("u1", "stop")))
    stop = kept("user", "stop")
    assert log.take_final() == [Correction(kept("assistant", SAID), half), stop]
    log.apply(done(answer("a2", SAID)))
    assert log.take_final() == [kept("assistant", SAID)]
    log.apply(AudioInterrupted("a2", 0, 0, 1000))
    assert log.take_final() == [Correction(kept("assistant", SAID), None)]
    assert log.take_final() == []


def test_an_answer_of_an_earlier_session_is_not_corrected() -> None:
    log = ConversationLog()
    [told] = log.load([kept("assistant", SAID)])
    assert log.apply(ItemTruncated(told["id"], 0, 500, 1000)) == "updated"
    assert log.take_final(at_end=True) == []


def test_audio_without_a_transcript_that_was_heard_in_part_is_stored() -> None:
    log = log_of(ItemChanged(begun("a1")), AudioInterrupted("a1", 0, 500, 1000))
    log.apply(done(answer("a1", None)))
    heard = kept("assistant", WITHOUT_TRANSCRIPT, status="incomplete")
    assert log.take_final(at_end=True) == [heard]


# --- what is stored, and when --------------------------------------------------------------------


def test_an_item_waits_for_those_before_it() -> None:
    log = log_of(
        done(audio("u1")), ResponseStarted("r1"), ItemChanged(begun("a1")), delta("a1", "fine")
    )
    log.apply(done(answer("a1", "fine")))
    assert log.take_final() == []
    log.apply(ResponseEnded("r1"))
    assert log.take_final() == []
    log.apply(InputTranscribed("u1", 0, "how are you"))
    assert log.take_final() == [kept("user", "how are you"), kept("assistant", "fine")]
    assert log.take_final() == log.take_final(at_end=True) == []


def test_an_answer_is_final_when_its_response_has_ended() -> None:
    log = log_of(ResponseStarted("r1"), ItemChanged(begun("a1")), delta("a1", "a"))
    log.apply(done(answer("a1", "a")))
    assert log.take_final() == []
    log.apply(ResponseEnded("r0"))
    assert log.take_final() == []
    log.apply(ResponseEnded("r1"))
    assert log.take_final() == [kept("assistant", "a")]


def test_a_response_that_ends_releases_what_the_server_never_finished() -> None:
    log = log_of(
        ItemChanged(text("u1", "hello")),
        ResponseStarted("r1"),
        ItemChanged(begun("a1")),
        delta("a1", "half an ans"),
        ItemChanged(call("c1", "f1", status="in_progress")),
    )
    assert log.apply(ResponseEnded("r1", "cancelled")) == "updated"
    assert log.take_final() == [
        kept("user", "hello"),
        kept("assistant", "half an ans", status="incomplete"),
        call("c1", status="incomplete"),
    ]


def test_a_transcript_that_fails_or_is_empty_is_not_waited_for() -> None:
    log = log_of(done(audio("u1")), done(audio("u2")))
    assert log.apply(InputTranscribed("u1", error={"message": "noise"})) is None
    assert log.take_final() == [kept("user", WITHOUT_TRANSCRIPT)]
    log.apply(InputTranscribed("u2", 0, ""))
    assert log.take_final() == [kept("user", WITHOUT_TRANSCRIPT)]


def test_a_transcript_that_comes_before_the_item_is_done_is_enough() -> None:
    log = log_of(ItemChanged(audio("u1")), InputTranscribed("u1", 0, "hello"))
    assert log.take_final() == [kept("user", "hello")]
    log.apply(done(audio("u1")))
    assert log.take_final() == []


@pytest.mark.parametrize("next_item", [done(text("u2", "so")), InputTranscribed("u2", 0, "so")])
def test_the_next_input_that_is_final_releases_audio_without_a_transcript(
    next_item: ModelEvent,
) -> None:
    log = log_of(done(audio("u1")), done(answer("a1", "yes")))
    assert log.take_final() == []
    log.apply(next_item)
    first = [kept("user", WITHOUT_TRANSCRIPT), kept("assistant", "yes")]
    assert log.take_final() == [*first, kept("user", "so")]


def test_transcripts_are_waited_for_no_more_where_nobody_makes_them() -> None:
    log = ConversationLog()
    for number, stored in enumerate([0, 0, 6, 2, 2, 2]):
        log.apply(done(audio(f"u{number}")))
        log.apply(done(answer(f"a{number}", str(number))))
        assert len(log.take_final()) == stored
    log.apply(InputTranscribed("u5", 0, "late"))
    log.apply(done(audio("u6")))
    assert log.take_final() == []
    log.apply(InputTranscribed("u6", 0, "in time"))
    assert log.take_final() == [kept("user", "in time")]


def test_the_output_of_a_tool_is_stored_when_it_is_made_and_the_servers_echo_is_ignored() -> None:
    log = log_of(done(call("c1", "f1", object="realtime.item", status="completed")))
    log.add(output("c1"))
    assert log.last_added == output("c1")
    assert log.take_final() == [call("c1"), output("c1")]
    log.add(output("c1", "again"))
    assert log.apply(done({**output("c1"), "id": "o1", "status": "completed"}, "f1")) == "updated"
    assert [item.get("id") for item in log.items()] == ["f1", "o1"]
    log.apply(done(text("u1", "thanks"), "f1"))
    log.apply(done(answer("a1", "welcome"), "o1"))
    assert [item["id"] for item in log.items()] == ["f1", "u1", "o1", "a1"]
    assert log.take_final() == [kept("user", "thanks"), kept("assistant", "welcome")]


@pytest.mark.parametrize("arguments", ["{}", '{"at": "dogs"}'])
def test_a_call_that_the_server_repeats_as_another_item_does_not_take_the_output_of_the_first(
    arguments: str,
) -> None:
    log = log_of(done(call("c1", "f1")))
    assert log.apply(done(call("c1", "f2", arguments=arguments))) is None
    log.add(output("c1"))
    assert log.apply(done(call("c1", "f3", arguments=arguments))) is None
    assert log.take_final() == [call("c1"), output("c1")]


def test_a_call_with_the_id_of_an_earlier_one_has_an_output_of_its_own() -> None:
    log = ConversationLog()
    loaded = log.load([call("c1"), output("c1", "of yesterday")])
    log.apply(done(call("c1", "f1"), loaded[-1]["id"]))
    log.add(output("c1", "of today"))
    assert log.take_final() == [call("c1"), output("c1", "of today")]


def test_a_deleted_item_is_not_stored_unless_it_was_already() -> None:
    log = log_of(done(text("u1", "one")))
    assert log.take_final() == [kept("user", "one")]
    log.apply(done(audio("u2")))
    log.apply(done(text("u3", "three")))
    for item_id in ("u1", "u2"):
        log.apply(ItemDeleted(item_id))
    assert log.take_final(at_end=True) == [kept("user", "three")]
    assert [item["id"] for item in log.items()] == ["u3"]


def test_items_that_were_loaded_are_not_stored_again() -> None:
    log = ConversationLog()
    earlier = [{"role": "user", "content": "hi"}, {**kept("assistant", "hello"), "id": "msg_1"}]
    told = log.load(earlier)
    assert [{**item, "id": None} for item in told] == [{**item, "id": None} for item in earlier]
    assert len({item["id"] for item in told}) == 2
    assert max(len(item["id"]) for item in told) <= 32
    for item in told:
        assert log.apply(ItemChanged({**item, "status": "completed"})) is None
        assert log.apply(done({**item, "status": "completed"})) is None
    log.apply(done(text("u1", "more"), told[1]["id"]))
    assert log.items() == [*told, text("u1", "more")]
    assert log.take_final(at_end=True) == [kept("user", "more")]


def test_all_that_is_left_is_stored_at_the_end_as_it_is() -> None:
    log = log_of(
        done(audio("u1")),
        ResponseStarted("r1"),
        ItemChanged(begun("a1")),
        delta("a1", "half an ans"),
        ItemChanged(begun("a2")),
    )
    assert log.take_final(at_end=True) == [
        kept("user", WITHOUT_TRANSCRIPT),
        kept("assistant", "half an ans", status="incomplete"),
    ]


def test_text_that_utf8_lacks_is_escaped() -> None:
    log = log_of(done(call("c1", "f1")))
    log.add(output("c1", "\ud800"))
    assert log.take_final()[1]["output"] == "\\ud800"
