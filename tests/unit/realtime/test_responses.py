"""The answers of a session: which texts are checked, and which answers are stopped."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capsule_tasks.realtime.responses import Check, Responses
from capsule_tasks.runs.agents.agent import Agent
from tests.unit.realtime.hosts import snapshot_of

ONE, TWO = snapshot_of(Agent(name="One")), snapshot_of(Agent(name="Two"))


def answers(*, every: int = 10, **texts: str) -> Responses:
    responses = Responses(every)
    for response_id, text in texts.items():
        responses.started(response_id, ONE, is_checked=True)
        responses.text(response_id, "item", text)
    return responses


def texts(checks: Sequence[Check | None]) -> list[str | None]:
    return [None if check is None else check.text for check in checks]


def test_a_text_is_checked_whenever_it_has_grown_past_a_threshold() -> None:
    responses = answers(every=5, a="")
    found = [responses.text("a", "item", piece) for piece in ("1234", "5", "6789", "0")]
    assert texts(found) == [None, "12345", None, "1234567890"]
    assert [check.text for check in responses.ended("a")] == []


def test_a_piece_across_several_thresholds_is_checked_once() -> None:
    responses = answers(every=5, a="")
    found = [responses.text("a", "item", piece) for piece in ("123456789012", "3", "45")]
    assert texts(found) == ["123456789012", None, "123456789012345"]


def test_texts_of_two_items_are_not_mixed() -> None:
    responses = answers(every=10, a="")
    found = [
        responses.text("a", item, piece)
        for item, piece in [("x", "12345678"), ("y", "abcdefgh"), ("x", "90ab"), ("y", "i")]
    ]
    assert texts(found) == [None, None, "1234567890ab", None]
    assert [check.text for check in responses.ended("a")] == ["abcdefghi"]


def test_the_tail_is_checked_once_at_the_end() -> None:
    responses = answers(every=5, a="1234567")
    (tail,) = answers(every=10, a="1234567").ended("a")
    assert (tail.answer.response_id, tail.answer.speaker, tail.text) == ("a", ONE, "1234567")
    assert responses.ended("a") == []


def test_the_end_of_an_older_answer_leaves_the_newer_one_as_it_is() -> None:
    responses = answers(a="old", b="new")
    assert texts(responses.ended("a")) == ["old"]
    assert responses.latest == "b"
    assert responses.speaker("b") is ONE
    assert texts([responses.text("b", "item", " answer")]) == ["new answer"]


def test_the_last_check_of_an_answer_may_stop_it_once_a_newer_one_has_begun() -> None:
    responses = answers(every=10, a="1234567890")
    responses.text("a", "item", "a tail")
    responses.started("b", TWO, is_checked=True)
    (tail,) = responses.ended("a")
    assert "a" not in responses.answers
    assert responses.speaker("a") is None
    assert tail.answer.speaker is ONE
    assert [tail.answer.stop(), tail.answer.stop()] == [True, False]
    assert not responses.is_stopped("b")


def test_the_latest_answer_is_kept_until_a_newer_one_begins() -> None:
    responses = answers(a="")
    responses.ended("a")
    assert responses.answers["a"].stop()
    assert responses.is_stopped("a")
    responses.started("b", ONE, is_checked=True)
    assert "a" not in responses.answers


def test_an_answer_is_stopped_once_and_not_checked_any_more() -> None:
    responses = answers(a="1234567890")
    assert [responses.answers["a"].stop(), responses.answers["a"].stop()] == [True, False]
    assert responses.text("a", "item", "1234567890") is None
    assert responses.ended("a") == []


def test_a_text_that_no_guardrail_wants_is_not_kept() -> None:
    responses = Responses(2)
    responses.started("a", ONE, is_checked=False)
    assert responses.text("a", "item", "1234567890") is None
    assert responses.ended("a") == []


def test_a_start_that_comes_twice_changes_nothing() -> None:
    responses = answers(a="", b="")
    responses.started("a", TWO, is_checked=False)
    assert responses.speaker("a") is ONE
    assert responses.latest == "b"


def test_a_server_without_ids_of_answers_is_checked_all_the_same() -> None:
    responses = Responses(5)
    for text in ("secret", "hello"):
        responses.started("", ONE, is_checked=True)
        assert texts([responses.text("", "item", text)]) == [text]
        assert responses.answers[""].stop()
        responses.ended("")


def test_a_refused_input_stops_the_answer_that_began_after_it() -> None:
    responses = answers(a="")
    responses.heard("question", ONE)
    responses.started("b", ONE, is_checked=False)
    assert responses.refused("question", ["check"]) == "b"
    assert [responses.is_stopped(each) for each in "ab"] == [False, True]


def test_a_refused_input_stops_the_next_answer_as_it_begins() -> None:
    responses = answers(a="")
    for question in ("first", "second"):
        responses.heard(question, ONE)
        assert responses.refused(question, ["check"]) is None
    assert not responses.is_stopped("a")
    assert responses.started("b", ONE, is_checked=True) == ("check",)
    assert responses.is_stopped("b")
    assert responses.started("c", ONE, is_checked=True) == ()


def test_a_refused_input_does_not_touch_the_answer_to_a_newer_one() -> None:
    responses = Responses(10)
    responses.heard("old", ONE)
    responses.started("a", ONE, is_checked=False)
    responses.heard("new", ONE)
    responses.started("b", ONE, is_checked=False)
    assert responses.refused("old", ["check"]) is None
    assert not responses.is_stopped("b")
    assert responses.refused("new", ["check"]) == "b"


def test_what_a_tool_call_leads_to_answers_the_same_input() -> None:
    responses = Responses(10)
    responses.heard("question", ONE)
    responses.started("a", ONE, is_checked=False)
    responses.ended("a")
    responses.started("b", TWO, is_checked=False)
    assert responses.listener("question") is ONE
    assert responses.refused("question", ["check"]) == "b"


def test_an_input_that_passed_still_begins_a_turn() -> None:
    responses = Responses(10)
    responses.heard("old", ONE)
    responses.started("a", ONE, is_checked=False)
    responses.heard("new", ONE)
    responses.started("b", ONE, is_checked=False)
    assert responses.refused("old", ["check"]) is None


def test_an_answer_that_is_stopped_already_is_not_stopped_for_an_input() -> None:
    responses = Responses(10)
    responses.heard("question", ONE)
    responses.started("a", ONE, is_checked=True)
    assert responses.answers["a"].stop()
    assert responses.refused("question", ["check"]) is None


class Sessions(RuleBasedStateMachine):
    """Answers that overlap, checks that end in any order, and inputs that are judged late."""

    EVERY = 4

    def __init__(self) -> None:
        super().__init__()
        self.responses = Responses(self.EVERY)
        self.said: dict[str, dict[str, str]] = {}
        """The texts of all answers, by item."""
        self.seen: dict[str, list[str]] = {}
        """The texts that checks have seen, in order."""
        self.open: list[str] = []
        self.running: list[Check] = []
        self.stopped: set[str] = set()
        self.story: list[tuple[str, str]] = []
        """The inputs and answers in order: ("input", id) and ("answer", id)."""
        self.waiting: list[str] = []
        """Inputs that are not judged yet."""
        self.refused = False

    @rule()
    def start(self) -> None:
        response_id = f"answer{len(self.said)}"
        refused_by = self.responses.started(response_id, ONE, is_checked=True)
        assert refused_by == (("refuses",) if self.refused else ())
        if self.refused:
            self.stopped.add(response_id)
            self.refused = False
        self.said[response_id] = {}
        self.seen[response_id] = []
        self.open.append(response_id)
        self.story.append(("answer", response_id))
        assert self.responses.latest == response_id

    @precondition(lambda self: self.open)
    @rule(data=st.data(), item=st.sampled_from("xy"), length=st.integers(0, 3 * EVERY))
    def text(self, data: st.DataObject, item: str, length: int) -> None:
        response_id = data.draw(st.sampled_from(self.open))
        known = self.said[response_id]
        delta = "".join(chr(ord("a") + (len(known.get(item, "")) + n) % 26) for n in range(length))
        known[item] = known.get(item, "") + delta
        check = self.responses.text(response_id, item, delta)
        assert check is None or (length and check.text == known[item])
        self.take([check] if check else [])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        response_id = data.draw(st.sampled_from(self.open))
        self.open.remove(response_id)
        self.take(self.responses.ended(response_id))
        if response_id not in self.stopped:
            for text in filter(None, self.said[response_id].values()):
                assert text in self.seen[response_id]

    def take(self, checks: list[Check]) -> None:
        for check in checks:
            assert check.answer.response_id not in self.stopped
            self.running.append(check)
            self.seen[check.answer.response_id].append(check.text)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_tripped=st.booleans())
    def end_check(self, data: st.DataObject, has_tripped: bool) -> None:
        check = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        answer = check.answer
        assert answer.speaker is ONE
        if has_tripped:
            assert answer.stop() == (answer.response_id not in self.stopped)
            self.stopped.add(answer.response_id)

    @rule()
    def hear(self) -> None:
        input_id = f"input{len(self.story)}"
        self.responses.heard(input_id, ONE)
        self.story.append(("input", input_id))
        self.waiting.append(input_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_refused=st.booleans())
    def judge(self, data: st.DataObject, is_refused: bool) -> None:
        input_id = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(input_id)
        if is_refused:
            stopped = self.responses.refused(input_id, ["refuses"])
            assert stopped == self.answer_to(input_id)
            if stopped is not None:
                self.stopped.add(stopped)

    def answer_to(self, input_id: str) -> str | None:
        """The answer that is to be stopped for an input; None also if the next one is."""
        after = self.story[self.story.index(("input", input_id)) + 1 :]
        kinds = [kind for kind, _ in after]
        if "answer" not in kinds:
            self.refused = True
            return None
        latest = len(kinds) - 1 - kinds[::-1].index("answer")
        if "input" in kinds[kinds.index("answer") : latest] or after[latest][1] in self.stopped:
            return None
        return after[latest][1]

    @invariant()
    def an_answer_is_kept_as_long_as_it_matters(self) -> None:
        kept = set(self.open)
        if self.responses.latest is not None:
            kept.add(self.responses.latest)
        assert {each for each in self.said if each in self.responses.answers} == kept
        assert {each for each in kept if self.responses.is_stopped(each)} == kept & self.stopped


test_sessions = Sessions.TestCase
