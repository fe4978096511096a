"""Questions of the child: asked in order with the output, answered once, never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.protocol.messages import InputClosed, InputRequest, InputResponse, Message
from tests.sessions import HANG_S
from tests.unit.sinks import Bench


class Desk:
    """A desk whose execution is the bench's."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.bench = Bench()
        outbox: Any = self.bench.outbox
        self.desk = InputRequests(outbox, lambda: self.bench.sink, timeout_s)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [m for m in self.bench.outbox.messages if isinstance(m, kind)]

    def answering(self, text: str = "", *, eof: bool = False) -> None:
        """Answer the next question as soon as it is sent."""

        def answer(message: Message) -> None:
            if isinstance(message, InputRequest):
                self.desk.respond(
                    InputResponse(execution_id="e", request_id=message.id, text=text, eof=eof)
                )

        self.bench.outbox.on_message = answer

    def asked(self, ask: Callable[[], object]) -> tuple[threading.Thread, InputRequest]:
        """Ask on a thread, and wait until the question is out."""
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self.bench.outbox.wait_for(lambda: bool(self.sent(InputRequest)))
        return thread, self.sent(InputRequest)[-1]


def test_an_answer_is_what_input_returns() -> None:
    desk = Desk()
    desk.answering("Ada")
    desk.bench.stdout.write("Hello! ")
    assert desk.desk.input("Name? ") == "Ada"
    output, request, closed = desk.bench.outbox.messages
    assert (output.data, request.prompt, request.password) == ("Hello! ", "Name? ", False)
    assert (closed.request_id, closed.reason) == (request.id, "answered")


def test_a_password_is_marked_as_one() -> None:
    desk = Desk()
    desk.answering("secret")
    assert desk.desk.getpass() == "secret"
    (request,) = desk.sent(InputRequest)
    assert (request.prompt, request.password) == ("Password: ", True)


def test_a_prompt_may_be_anything_that_has_text() -> None:
    desk = Desk()
    desk.answering("")
    assert desk.desk.input(42) == ""
    assert desk.desk.input("\ud800?") == ""
    assert [request.prompt for request in desk.sent(InputRequest)] == ["42", "\\ud800?"]


def test_a_password_prompt_that_is_no_text_is_the_callers_error() -> None:
    desk = Desk()
    with pytest.raises(TypeError):
        desk.desk.getpass(5)  # type: ignore[arg-type]
    assert desk.bench.outbox.messages == []


def test_of_a_long_prompt_the_end_is_sent() -> None:
    """A prompt of megabytes once was more than the parent allows, and ended the session."""
    desk = Desk()
    desk.answering("")
    desk.desk.input("x" * 10_000_000 + "name? ")
    (request,) = desk.sent(InputRequest)
    assert request.prompt.endswith("xxxname? ")
    assert len(request.prompt) < 5000


def test_when_input_ends_it_is_an_eof_error_that_names_the_question() -> None:
    desk = Desk()
    desk.answering(eof=True)
    with pytest.raises(EOFError) as caught:
        desk.desk.input()
    (request,) = desk.sent(InputRequest)
    assert request.id in caught.value.__notes__[0]
    assert "execution e" in caught.value.__notes__[0]
    assert desk.sent(InputClosed)[0].reason == "eof"


def test_when_the_time_is_up_it_is_a_timeout_error() -> None:
    desk = Desk(timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"no input within 0\.01 s"):
        desk.desk.input()
    assert desk.sent(InputRequest)[0].timeout_s == 0.01
    assert desk.sent(InputClosed)[0].reason == "timeout"


def test_an_answer_for_another_execution_or_question_is_nobodys() -> None:
    desk, lines = Desk(), list[str]()
    thread, request = desk.asked(lambda: lines.append(desk.desk.input()))
    for execution_id, request_id in (("f", request.id), ("e", "another")):
        wrong = InputResponse(execution_id=execution_id, request_id=request_id, text="wrong")
        assert not desk.desk.respond(wrong)
    right = InputResponse(execution_id="e", request_id=request.id, text="right")
    assert desk.desk.respond(right)
    thread.join(HANG_S)
    assert lines == ["right"]
    assert not desk.desk.respond(right)


@pytest.mark.parametrize(
    "close",
    [lambda desk: desk.close(), lambda desk: desk.close_execution("e")],
    ids=["the session", "the execution"],
)
def test_who_still_asks_when_it_is_over_gets_an_eof(
    close: Callable[[InputRequests], object],
) -> None:
    desk, ends = Desk(), list[str]()

    def ask() -> None:
        try:
            desk.desk.input()
        except EOFError as error:
            ends.append(type(error).__name__)

    thread, _ = desk.asked(ask)
    desk.desk.close_execution("another")
    assert thread.is_alive()
    close(desk.desk)
    thread.join(HANG_S)
    assert ends == ["EOFError"]


def test_after_the_end_of_the_session_nobody_is_asked() -> None:
    desk = Desk()
    desk.desk.close()
    with pytest.raises(EOFError):
        desk.desk.input()
    assert desk.bench.outbox.messages == []


def test_a_thread_that_outlives_its_execution_does_not_wait_for_an_answer() -> None:
    """It once did, for ever: the parent does not show questions of an execution that is over."""
    desk = Desk()
    desk.bench.sink.finish()
    with pytest.raises(EOFError):
        desk.desk.input()
    assert desk.bench.outbox.messages == []


def test_outside_of_an_execution_there_is_nobody_to_ask() -> None:
    desk = Desk()
    desk.bench.sink = desk.bench.session
    with pytest.raises(EOFError, match="no execution is running"):
        desk.desk.input()
