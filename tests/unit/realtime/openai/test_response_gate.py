"""When `response.create` is sent: one response at a time, and no wish is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capsule_tasks.realtime.openai.response_gate import FREE_CHOICE, ResponseGate, Wish

BUSY = "conversation_already_has_active_response"
PLAIN = {"type": "response.create", "event_id": "create_1"}


def test_a_wish_is_sent_at_once_if_no_response_is_made() -> None:
    gate = ResponseGate()
    assert gate.wish() == [PLAIN]
    assert gate.state == "requested"


def test_wishes_during_a_response_become_one_after_it() -> None:
    gate = ResponseGate()
    gate.wish()
    gate.created("resp_1")
    assert [gate.wish(), gate.wish(), gate.wish()] == [[], [], []]
    assert gate.done("resp_1") == [{"type": "response.create", "event_id": "create_2"}]
    gate.created("resp_2")
    assert gate.done("resp_2") == []
    assert gate.state == "free"


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("wishes", "is_free"),
    [
        ([FREE_CHOICE, FREE_CHOICE], True),
        ([FREE_CHOICE, None], False),
        ([None, FREE_CHOICE], False),
    ],
)
def test_the_model_is_free_to_call_no_tool_if_nothing_else_was_said(
    wishes: list[Wish], is_free: bool, refused: bool
) -> None:
    gate = ResponseGate()
    first, second = wishes
    gate.wish(first if refused else None)
    gate.wish(first)
    gate.wish(second)
    if refused:
        gate.refused("create_1", BUSY, "busy")
    else:
        gate.created("resp_1")
    [asked] = gate.done(None)
    assert asked.get("response") == ({"tool_choice": "auto"} if is_free else None)


def test_a_wish_after_a_create_was_sent_is_another_turn() -> None:
    gate = ResponseGate()
    gate.wish()
    assert gate.wish() == []
    gate.created("resp_1")
    assert len(gate.done("resp_1")) == 1


def test_a_create_of_the_users_own_waits_its_turn_with_its_fields() -> None:
    gate = ResponseGate()
    gate.wish()
    gate.wish()
    gate.wish({"type": "response.create", "response": {"instructions": "Hum."}})
    gate.wish()
    gate.created("resp_1")
    assert gate.done("resp_1") == [{"type": "response.create", "event_id": "create_2"}]
    gate.created("resp_2")
    own = {"type": "response.create", "event_id": "create_3", "response": {"instructions": "Hum."}}
    assert gate.done("resp_2") == [own]
    gate.created("resp_3")
    assert len(gate.done("resp_3")) == 1, "the wish that came after it is not part of it"


def test_a_create_of_the_users_own_keeps_its_id() -> None:
    assert ResponseGate().wish({"event_id": "mine"})[0]["event_id"] == "mine"


def test_a_refused_create_frees_the_gate() -> None:
    gate = ResponseGate()
    gate.wish()
    gate.wish()
    is_handled, messages = gate.refused("create_1", "invalid_value", "no")
    assert not is_handled, "somebody has to know of it"
    assert messages == [{"type": "response.create", "event_id": "create_2"}]


def test_errors_about_something_else_free_nothing() -> None:
    gate = ResponseGate()
    gate.wish()
    for error in (("other", None, "response.create"), (None, None, "no such item")):
        assert gate.refused(*error) == (False, [])
    assert gate.state == "requested"


def test_a_create_is_refused_by_an_error_without_an_id() -> None:
    for code, text in (("bad_response_create", ""), (None, "invalid response.create")):
        gate = ResponseGate()
        gate.wish()
        assert gate.refused(None, code, text) == (False, [])
        assert gate.state == "free"


def test_a_create_that_crosses_a_response_of_the_server_is_sent_again_after_it() -> None:
    gate = ResponseGate()
    gate.wish()
    gate.created("of_the_server")
    assert gate.refused("create_1", BUSY, "busy") == (True, [])
    assert gate.done("of_the_server") == [{"type": "response.create", "event_id": "create_2"}]


def test_a_refusal_may_come_after_the_response_that_was_in_the_way() -> None:
    gate = ResponseGate()
    gate.wish({"response": {"instructions": "Hum."}})
    gate.created("of_the_server")
    gate.done("of_the_server")
    [second] = gate.wish()
    assert gate.refused("create_1", BUSY, "busy") == (True, [])
    assert gate.state == "requested", "the second create has no answer yet"
    gate.created("resp_2")
    [third] = gate.done("resp_2")
    assert (second["event_id"], third["response"]) == ("create_2", {"instructions": "Hum."})


def test_a_busy_server_that_told_of_no_response_is_asked_again_after_it() -> None:
    gate = ResponseGate()
    gate.wish()
    assert gate.refused("create_1", BUSY, "busy") == (True, [])
    assert gate.wish() == []
    assert len(gate.done("unknown")) == 1


def test_only_the_active_response_is_cancelled_and_once() -> None:
    gate = ResponseGate()
    assert gate.cancel() == []
    gate.created("resp_1")
    assert gate.cancel("resp_0") == []
    assert gate.cancel("resp_1") == [
        {"type": "response.cancel", "event_id": "cancel_1", "response_id": "resp_1"}
    ]
    assert gate.cancel() == []
    gate.done("resp_1")
    assert gate.cancel("resp_1") == []


def test_a_response_without_an_id_is_cancelled_without_one() -> None:
    gate = ResponseGate()
    gate.created(None)
    assert gate.cancel() == [{"type": "response.cancel", "event_id": "cancel_1"}]


def test_a_response_that_is_only_requested_is_cancelled_when_it_begins() -> None:
    gate = ResponseGate()
    gate.wish()
    assert gate.cancel() == []
    gate.wish()
    assert gate.created("resp_1")[0]["response_id"] == "resp_1"
    assert len(gate.done("resp_1")) == 1, "what was wished after the interruption is answered"
    assert gate.created("resp_2") == []


def test_a_refused_cancel_may_be_tried_again() -> None:
    gate = ResponseGate()
    gate.created("resp_1")
    gate.cancel()
    assert gate.refused("cancel_1", "server_error", "no") == (False, [])
    assert gate.cancel()[0]["event_id"] == "cancel_2"


def test_a_response_that_cannot_be_cancelled_any_more_is_over() -> None:
    gate = ResponseGate()
    gate.created("resp_1")
    gate.cancel()
    gate.wish()
    is_handled, messages = gate.refused("cancel_1", "response_cancel_not_active", "none")
    assert is_handled
    assert len(messages) == 1


def test_a_cancel_that_came_too_late_is_nobodys_business() -> None:
    gate = ResponseGate()
    gate.created("resp_1")
    gate.cancel()
    gate.done("resp_1")
    assert gate.refused("cancel_1", "response_cancel_not_active", "none") == (True, [])
    assert gate.state == "free"


def test_the_end_of_another_response_changes_nothing() -> None:
    gate = ResponseGate()
    gate.created("resp_2")
    gate.done("resp_1")
    assert gate.response_id == "resp_2"


class Server(RuleBasedStateMachine):
    """A server that makes one response at a time, and whose answers come late but in order."""

    @initialize()
    def begin(self) -> None:
        self.gate = ResponseGate()
        self.to_server: list[dict[str, Any]] = []
        self.to_client: list[tuple[str, Any]] = []
        self.active: str | None = None
        self.made = 0
        self.wished: list[int] = []
        self.answered: set[int] = set()
        self.written = 0
        self.creates_since_done = 0

    def write(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["type"] == "response.create":
                self.creates_since_done += 1
                # The response to this create answers all that was said before it.
                self.to_server.append({**message, "answers": set(self.wished)})
            else:
                self.to_server.append(message)

    @rule(is_own=st.booleans())
    def wish(self, is_own: bool) -> None:
        number = len(self.wished)
        self.wished.append(number)
        self.write(self.gate.wish({"response": {"number": number}} if is_own else None))

    @rule()
    def cancel(self) -> None:
        self.write(self.gate.cancel())

    @rule()
    @precondition(lambda self: self.to_server)
    def server_reads(self) -> None:
        message = self.to_server.pop(0)
        if message["type"] == "response.cancel":
            self.server_cancels(message)
        elif self.active is not None:
            self.to_client.append(("error", (message["event_id"], BUSY)))
        else:
            self.server_begins()
            self.answered |= message["answers"]

    def server_cancels(self, message: dict[str, Any]) -> None:
        if self.active is not None and message.get("response_id") in {None, self.active}:
            self.server_ends()
        else:
            error = (message["event_id"], "response_cancel_not_active")
            self.to_client.append(("error", error))

    @rule()
    @precondition(lambda self: self.active is None)
    def server_begins(self) -> None:
        self.made += 1
        self.active = f"resp_{self.made}"
        self.to_client.append(("created", self.active))

    @rule()
    @precondition(lambda self: self.active is not None)
    def server_ends(self) -> None:
        self.to_client.append(("done", self.active))
        self.active = None

    @rule()
    @precondition(lambda self: self.to_client)
    def client_reads(self) -> None:
        kind, value = self.to_client.pop(0)
        if kind == "created":
            self.write(self.gate.created(value))
        elif kind == "done":
            self.creates_since_done = 0
            self.write(self.gate.done(value))
        elif value[1] == BUSY:
            self.creates_since_done = max(self.creates_since_done - 1, 0)
            self.write(self.gate.refused(*value, "busy")[1])
        else:
            self.write(self.gate.refused(*value, "nothing to cancel")[1])

    @invariant()
    def there_are_never_two_creates_without_a_done_between_them(self) -> None:
        assert getattr(self, "creates_since_done", 0) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "gate"):
            return
        for _ in range(20 * (len(self.wished) + 5)):
            if self.to_server:
                self.server_reads()
            elif self.to_client:
                self.client_reads()
            elif self.active is not None:
                self.server_ends()
        assert self.gate.state == "free"
        assert self.answered == set(self.wished), "a wish was lost"


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
