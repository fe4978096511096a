"""Questions of the child: asked in order with the output, answered once, never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.protocol.messages import InputClosed, InputRequest, InputResponse, Message
from tests.sessions import HANG_S
from tests.unit.child.io.sinks import Bench


class InputBench:
    """Input requests of the bench's execution."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.output = Bench()
        outbox: Any = self.output.outbox
        self.inputs = InputRequests(outbox, lambda: self.output.sink, timeout_s)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [m for m in self.output.outbox.messages if isinstance(m, kind)]

    def answering(self, text: str = "", *, eof: bool = False) -> None:
        """Answer the next question as soon as it is sent."""

        def answer(message: Message) -> None:
            if isinstance(message, InputRequest):
                self.inputs.respond(
                    InputResponse(execution_id="e", request_id=message.id, text=text, eof=eof)
                )

        self.output.outbox.on_message = answer

    def asked(self, ask: Callable[[], object]) -> tuple[threading.Thread, InputRequest]:
        """Ask on a thread, and wait until the question is out."""
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self.output.outbox.wait_for(lambda: bool(self.sent(InputRequest)))
        return thread, self.sent(InputRequest)[-1]


def test_an_answer_is_what_input_returns() -> None:
    bench = InputBench()
    bench.answering("Ada")
    bench.output.stdout.write("Hello! ")
    assert bench.inputs.input("Name? ") == "Ada"
    output, request, closed = bench.output.outbox.messages
    assert (output.data, request.prompt, request.password) == ("Hello! ", "Name? ", False)
    assert (closed.request_id, closed.reason) == (request.id, "answered")


def test_a_password_is_marked_as_one() -> None:
    bench = InputBench()
    bench.answering("secret")
    assert bench.inputs.getpass() == "secret"
    (request,) = bench.sent(InputRequest)
    assert (request.prompt, request.password) == ("Password: ", True)


def test_a_prompt_may_be_anything_that_has_text() -> None:
    bench = InputBench()
    bench.answering("")
    assert bench.inputs.input(42) == ""
    assert bench.inputs.input("\ud800?") == ""
    assert [request.prompt for request in bench.sent(InputRequest)] == ["42", "\\ud800?"]


def test_a_password_prompt_that_is_no_text_is_the_callers_error() -> None:
    bench = InputBench()
    with pytest.raises(TypeError):
        bench.inputs.getpass(5)  # type: ignore[arg-type]
    assert bench.output.outbox.messages == []


def test_a_long_prompt_is_cut_to_its_end() -> None:
    """A prompt of megabytes once was more than the parent allows, and ended the session."""
    bench = InputBench()
    bench.answering("")
    bench.inputs.input("x" * 10_000_000 + "name? ")
    (request,) = bench.sent(InputRequest)
    assert request.prompt.endswith("xxxname? ")
    assert len(request.prompt) < 5000


def test_when_input_ends_it_is_an_eof_error_that_names_the_question() -> None:
    bench = InputBench()
    bench.answering(eof=True)
    with pytest.raises(EOFError) as caught:
        bench.inputs.input()
    (request,) = bench.sent(InputRequest)
    assert request.id in caught.value.__notes__[0]
    assert "execution e" in caught.value.__notes__[0]
    assert bench.sent(InputClosed)[0].reason == "eof"


def test_when_the_time_is_up_it_is_a_timeout_error() -> None:
    bench = InputBench(timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"no input within 0\.01 s"):
        bench.inputs.input()
    assert bench.sent(InputRequest)[0].timeout_s == 0.01
    assert bench.sent(InputClosed)[0].reason == "timeout"


def test_an_answer_for_another_execution_or_question_is_refused() -> None:
    bench, lines = InputBench(), list[str]()
    thread, request = bench.asked(lambda: lines.append(bench.inputs.input()))
    for execution_id, request_id in (("f", request.id), ("e", "another")):
        wrong = InputResponse(execution_id=execution_id, request_id=request_id, text="wrong")
        assert not bench.inputs.respond(wrong)
    right = InputResponse(execution_id="e", request_id=request.id, text="right")
    assert bench.inputs.respond(right)
    thread.join(HANG_S)
    assert lines == ["right"]
    assert not bench.inputs.respond(right)


@pytest.mark.parametrize(
    "close",
    [lambda bench: bench.close(), lambda bench: bench.close_execution("e")],
    ids=["the session", "the execution"],
)
def test_code_that_still_asks_after_the_end_gets_an_eof(
    close: Callable[[InputRequests], object],
) -> None:
    bench, ends = InputBench(), list[str]()

    def ask() -> None:
        try:
            bench.inputs.input()
        except EOFError as error:
            ends.append(type(error).__name__)

    thread, _ = bench.asked(ask)
    bench.inputs.close_execution("another")
    assert thread.is_alive()
    close(bench.inputs)
    thread.join(HANG_S)
    assert ends == ["EOFError"]


def test_after_the_end_of_the_session_no_question_is_sent() -> None:
    bench = InputBench()
    bench.inputs.close()
    with pytest.raises(EOFError):
        bench.inputs.input()
    assert bench.output.outbox.messages == []


def test_a_thread_that_outlives_its_execution_does_not_wait_for_an_answer() -> None:
    """The parent shows no questions of an ended execution: the thread once waited for ever."""
    bench = InputBench()
    bench.output.sink.finish()
    with pytest.raises(EOFError):
        bench.inputs.input()
    assert bench.output.outbox.messages == []


def test_input_outside_of_an_execution_is_refused() -> None:
    bench = InputBench()
    bench.output.sink = bench.output.session
    with pytest.raises(EOFError, match="no execution is running"):
        bench.inputs.input()
