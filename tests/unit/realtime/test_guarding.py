"""Guardrails of a session: what they look at, what a trip stops, and what the model is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.realtime.events import RealtimeGuardrailTripped
from capsule_tasks.realtime.guarding import Guarding
from capsule_tasks.realtime.model import (
    Command,
    Interrupt,
    ResponseEnded,
    ResponseStarted,
    SendMessage,
    TextDelta,
)
from capsule_tasks.realtime.responses import Responses
from capsule_tasks.realtime.settings import RealtimeConfig
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail, Verdict
from tests.unit.realtime.hosts import FakeHost, snapshot_of
from tests.unit.realtime.noted_guardrails import Guardrail


class Session:
    """Calls a `Guarding` as a session does, on a host that notes the effects."""

    def __init__(self, agent: Agent | None = None, every: int = 5, **config: Any) -> None:
        self.host = FakeHost(agent or Agent(name="Agent"))
        self.responses = Responses(every)
        self.guarding = Guarding(self.host, RealtimeConfig(**config), self.responses)

    def start(self, response_id: str = "one") -> None:
        self.guarding.started(ResponseStarted(response_id))

    def say(self, text: str, response_id: str = "one", item_id: str | None = None) -> None:
        item_id = item_id or f"item of {response_id}"
        self.guarding.text(TextDelta(text, response_id, item_id))

    def end(self, response_id: str = "one", status: Any = "completed") -> None:
        self.guarding.ended(ResponseEnded(response_id, status))

    async def settled(self) -> list[str]:
        """The effects once all checks have ended, in words and in order."""
        await self.host.settle()
        return [spelled(each) for each in self.host.order]

    @property
    def trips(self) -> list[RealtimeGuardrailTripped]:
        return [each for each in self.host.events if isinstance(each, RealtimeGuardrailTripped)]

    @property
    def told(self) -> list[str]:
        sent = [each for each in self.host.commands if isinstance(each, SendMessage)]
        return [each.content[0]["text"] for each in sent]


def spelled(done: object) -> str:
    match done:
        case RealtimeGuardrailTripped(response_id=response_id):
            return f"tripped {response_id}"
        case Interrupt(response_id=response_id):
            return f"interrupt {response_id}"
        case SendMessage():
            return "message"
    return repr(done)


STOPPED = ["tripped one", "interrupt one", "message"]


# --- answers -------------------------------------------------------------------------------------


async def test_a_trip_is_shown_then_stops_the_answer_and_tells_the_model_why() -> None:
    guardrail = Guardrail()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    session.say("a secret")
    assert await session.settled() == STOPPED
    (trip,) = session.trips
    (result,) = trip.results
    assert (trip.agent.name, trip.message) == ("Agent", "a secret")
    assert (result.kind, result.name, result.info) == ("output", "no_secrets", {"about": "Agent"})
    assert "guardrail: no_secrets" in session.told[0]
    assert session.responses.is_stopped("one")


async def test_guardrails_look_at_thresholds_and_at_the_tail() -> None:
    guardrail = Guardrail()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    for piece in ("1234", "5", "67890abcde", "f"):
        session.say(piece)
    session.end()
    assert await session.settled() == []
    assert guardrail.texts == ["12345", "1234567890abcde", "1234567890abcdef"]
    assert not session.responses.is_stopped("one")


@pytest.mark.parametrize("status", ["completed", "cancelled", "incomplete", "failed"])
async def test_a_trip_on_the_tail_stops_what_is_still_played(status: str) -> None:
    session = Session(every=100, output_guardrails=[Guardrail().of_output()])
    session.start()
    session.say("a secret")
    session.end(status=status)
    assert await session.settled() == STOPPED
    assert session.responses.is_stopped("one")


async def test_a_stopped_answer_is_not_checked_any_more() -> None:
    guardrail = Guardrail()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    session.say("a secret")
    await session.settled()
    session.say("and more of it")
    session.end()
    assert await session.settled() == STOPPED
    assert guardrail.texts == ["a secret"]


async def test_checks_of_an_answer_that_trip_together_stop_it_once() -> None:
    guardrail = Guardrail().held()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    session.say("a secret")
    session.say(", and another secret")
    session.end()
    await guardrail.was_asked()
    guardrail.may_answer.set()
    assert await session.settled() == STOPPED


async def test_an_older_answer_is_stopped_without_touching_the_newer_one() -> None:
    guardrail = Guardrail().held()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    session.say("a secret")
    await guardrail.was_asked()
    session.end()
    session.start("two")
    session.say("good", "two")
    guardrail.may_answer.set()
    assert await session.settled() == ["tripped one", "interrupt one"]
    assert not session.responses.is_stopped("two")
    assert "one" not in session.responses.answers


async def test_the_model_is_told_although_the_answer_ends_by_the_interruption() -> None:
    session = Session(output_guardrails=[Guardrail().of_output()])
    session.start()
    session.say("a secret")

    def end(command: Command) -> None:
        if isinstance(command, Interrupt):
            session.end()

    session.host.on_command = end
    assert await session.settled() == STOPPED


@pytest.mark.parametrize("has_ended", [False, True])
async def test_the_model_is_not_told_once_a_newer_answer_has_begun(has_ended: bool) -> None:
    session = Session(output_guardrails=[Guardrail().of_output()])

    def go_on(command: Command) -> None:
        if isinstance(command, Interrupt):
            session.end()
            session.start("two")
            if has_ended:
                session.end("two")

    session.host.on_command = go_on
    session.start()
    session.say("a secret")
    assert await session.settled() == ["tripped one", "interrupt one"]


async def test_the_agent_that_began_the_answer_is_asked_after_a_handoff() -> None:
    first, second = Guardrail("first"), Guardrail("second")
    session = Session(Agent(name="First", output_guardrails=[first.of_output()]))
    session.start()
    session.say("123")
    session.host.snapshot = snapshot_of(
        Agent(name="Second", output_guardrails=[second.of_output()])
    )
    session.start()
    session.say(" a secret")
    assert await session.settled() == STOPPED
    assert (first.asked, second.asked) == ([("First", "123 a secret")], [])
    assert session.trips[0].agent.name == "First"


async def test_a_text_without_a_start_begins_an_answer() -> None:
    session = Session(output_guardrails=[Guardrail().of_output()])
    session.say("a secret")
    assert await session.settled() == STOPPED


async def test_a_start_that_comes_after_the_text_changes_nothing() -> None:
    guardrail = Guardrail().held()
    session = Session(Agent(name="First", output_guardrails=[guardrail.of_output()]))
    session.say("a secret")
    await guardrail.was_asked()
    session.host.snapshot = snapshot_of(Agent(name="Second"))
    session.start()
    guardrail.may_answer.set()
    assert await session.settled() == STOPPED
    assert session.trips[0].agent.name == "First"


async def test_a_guardrail_of_agent_and_session_is_asked_once() -> None:
    guardrail = Guardrail()
    shared = guardrail.of_output()
    session = Session(Agent(name="Agent", output_guardrails=[shared]), output_guardrails=[shared])
    session.start()
    session.say("hello")
    assert await session.settled() == []
    assert guardrail.texts == ["hello"]


async def test_all_guardrails_that_trip_at_once_are_named() -> None:
    def refuse(_run: Any, _agent: Agent, _text: str) -> Verdict:
        return Verdict(True)

    guardrails = [OutputGuardrail(refuse, name) for name in ("first", "second")]
    session = Session(output_guardrails=guardrails)
    session.start()
    session.say("hello")
    assert await session.settled() == STOPPED
    assert [each.name for each in session.trips[0].results] == ["first", "second"]
    assert "first, second" in session.told[0]


async def test_a_slow_guardrail_does_not_delay_the_trip_of_another() -> None:
    slow, fast = Guardrail("slow").held(), Guardrail("fast")
    session = Session(output_guardrails=[slow.of_output(), fast.of_output()])
    session.start()
    session.say("a secret")
    assert await session.settled() == STOPPED
    assert [each.name for each in session.trips[0].results] == ["fast"]


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def __call__(self, _run: Any, _agent: Agent, _text: Any) -> Verdict:
        raise self.error


def wrong(_run: Any, _agent: Agent, _text: str) -> Any:
    return True


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (Broken(ValueError("no model")), "no model"),
        (Broken(SystemExit(3)), "SystemExit"),
        (Broken(asyncio.CancelledError()), "cancelled"),
        (wrong, "returned True"),
    ],
)
async def test_a_guardrail_that_fails_is_logged_and_skipped(
    check: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    guardrails = [OutputGuardrail(check, "broken"), Guardrail().of_output()]
    session = Session(output_guardrails=guardrails)
    session.start()
    with caplog.at_level(logging.WARNING):
        session.say("hello")
        assert await session.settled() == []
        session.say("a secret")
        assert await session.settled() == STOPPED
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "output guardrail 'broken' of agent 'Agent' was skipped" in lines[0]
    assert reason in lines[0]
    assert session.host.errors == []


async def test_an_error_of_the_connection_leaves_the_task() -> None:
    session = Session(output_guardrails=[Guardrail().of_output()])

    def lose(_command: Command) -> None:
        raise ConnectionError("lost")

    session.host.on_command = lose
    session.start()
    session.say("a secret")
    session.end()
    await session.settled()
    assert [str(error) for error in session.host.errors] == ["lost"]


async def test_checks_that_are_cancelled_at_the_close_do_nothing_more() -> None:
    guardrail = Guardrail().held()
    session = Session(output_guardrails=[guardrail.of_output()])
    session.start()
    session.say("a secret")
    await guardrail.was_asked()
    session.say(" and more")
    session.end()
    await session.host.cancel()
    assert session.host.order == []


async def test_nothing_is_kept_of_a_long_session() -> None:
    session = Session(output_guardrails=[Guardrail().of_output()])
    for number in range(50):
        session.guarding.heard(f"question {number}")
        session.start(f"answer {number}")
        session.say("hello, and more", f"answer {number}")
        session.end(f"answer {number}")
        await session.settled()
        session.guarding.said("a question", f"question {number}")
    answers = [f"answer {number}" for number in range(50)]
    assert [each for each in answers if each in session.responses.answers] == ["answer 49"]
    questions = [f"question {number}" for number in range(50)]
    assert [each for each in questions if session.responses.listener(each)] == ["question 49"]


# --- inputs of the user --------------------------------------------------------------------------


async def test_a_message_is_refused_before_it_is_sent() -> None:
    guardrail = Guardrail()
    session = Session(input_guardrails=[guardrail.of_input(parallel=False)])
    assert not await session.guarding.allows("a secret")
    assert await session.guarding.allows("hello")
    assert await session.settled() == ["tripped None"]
    (trip,) = session.trips
    assert (trip.message, trip.results[0].kind) == ("a secret", "input")


async def test_each_guardrail_sees_a_message_once() -> None:
    before, beside = Guardrail("before"), Guardrail("beside")
    guardrails = [before.of_input(parallel=False), beside.of_input()]
    session = Session(Agent(name="Agent", input_guardrails=guardrails), input_guardrails=guardrails)
    assert await session.guarding.allows("hello")
    session.guarding.said("hello", None)
    assert await session.settled() == []
    assert (before.texts, beside.texts) == (["hello"], ["hello"])


async def test_a_message_without_text_is_not_checked() -> None:
    guardrails = [Guardrail().of_input(parallel) for parallel in (True, False)]
    session = Session(input_guardrails=[Guardrail(word="").of_input(), *guardrails])
    assert await session.guarding.allows("")
    session.guarding.said("", None)
    assert await session.settled() == []


async def test_a_transcript_is_seen_by_all_input_guardrails() -> None:
    before, beside = Guardrail("before"), Guardrail("beside")
    guardrails = [before.of_input(parallel=False), beside.of_input()]
    session = Session(input_guardrails=guardrails)
    session.guarding.heard("item")
    session.guarding.said("hello", "item")
    await session.settled()
    assert (before.texts, beside.texts) == (["hello"], ["hello"])


async def test_the_answer_to_a_refused_message_is_stopped() -> None:
    guardrail = Guardrail().held()
    session = Session(input_guardrails=[guardrail.of_input()])
    session.guarding.said("a secret", None)
    await guardrail.was_asked()
    session.start()
    assert not session.responses.is_stopped("one")
    guardrail.may_answer.set()
    assert await session.settled() == STOPPED
    assert "The last message of the user" in session.told[0]
    assert session.responses.is_stopped("one")


async def test_the_answer_to_a_message_that_is_refused_already_is_stopped_as_it_begins() -> None:
    session = Session(input_guardrails=[Guardrail().of_input()])
    session.start("zero")
    session.guarding.said("a secret", None)
    assert await session.settled() == ["tripped None"]
    assert not session.responses.is_stopped("zero")
    session.start()
    assert session.responses.is_stopped("one")
    assert await session.settled() == ["tripped None", "interrupt one", "message"]
    session.start("two")
    assert not session.responses.is_stopped("two")


async def test_a_transcript_that_comes_after_the_answer_stops_its_playback() -> None:
    session = Session(input_guardrails=[Guardrail().of_input()])
    session.guarding.heard("item")
    session.start()
    session.end()
    session.guarding.said("a secret", "item")
    assert await session.settled() == STOPPED


async def test_a_late_transcript_does_not_touch_the_answer_to_a_newer_input() -> None:
    session = Session(input_guardrails=[Guardrail().of_input()])
    session.guarding.heard("old")
    session.start()
    session.end()
    session.guarding.heard("new")
    session.start("two")
    session.guarding.said("a secret", "old")
    assert await session.settled() == ["tripped None"]
    assert not session.responses.is_stopped("two")


async def test_an_answer_to_several_refused_inputs_is_stopped_once() -> None:
    guardrail = Guardrail().held()
    session = Session(input_guardrails=[guardrail.of_input()])
    session.guarding.said("a secret", None)
    session.guarding.said("another secret", None)
    session.start()
    guardrail.may_answer.set()
    assert await session.settled() == ["tripped one", "tripped None", "interrupt one", "message"]
    assert [trip.message for trip in session.trips] == ["a secret", "another secret"]


async def test_the_agent_that_was_spoken_to_is_asked_although_it_has_handed_over() -> None:
    guardrail = Guardrail()
    session = Session(Agent(name="First", input_guardrails=[guardrail.of_input()]))
    session.guarding.heard("item")
    session.start()
    session.host.snapshot = snapshot_of(Agent(name="Second"))
    session.guarding.said("a secret", "item")
    assert await session.settled() == STOPPED
    assert guardrail.asked == [("First", "a secret")]


async def test_an_input_guardrail_that_fails_lets_the_message_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = Broken(ValueError("no model"))
    guardrails = [InputGuardrail(check, "broken", parallel) for parallel in (True, False)]
    session = Session(input_guardrails=guardrails)
    with caplog.at_level(logging.WARNING):
        assert await session.guarding.allows("a secret")
        session.guarding.said("a secret", None)
        assert await session.settled() == []
    assert len(caplog.records) == 2
