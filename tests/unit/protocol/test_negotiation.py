"""What two sides agree on, and what a message costs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import (
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
)
from capsule_tasks.protocol.negotiation import (
    CAPABILITIES,
    VERSIONS,
    choose_version,
    common_capabilities,
)
from capsule_tasks.settings import SessionConfig


@pytest.mark.parametrize(
    ("offered", "spoken", "chosen"),
    [
        ((1,), (1,), 1),
        ((3, 2, 1), (1, 2), 2),
        ((1, 2, 3), (3, 2, 1), 1),
        ((9, 1), (1,), 1),
        ((2, 2), (2,), 2),
        ((2,), (1,), None),
        ((), (1,), None),
        ((1,), (), None),
    ],
)
def test_the_version_is_the_one_the_offering_side_likes_best_of_those_both_speak(
    offered: tuple[int, ...], spoken: tuple[int, ...], chosen: int | None
) -> None:
    assert choose_version(offered, spoken) == chosen


def test_a_session_offers_what_this_code_speaks() -> None:
    assert SessionConfig().protocol_versions == VERSIONS
    assert choose_version(VERSIONS) == VERSIONS[0]
    assert len(set(VERSIONS)) == len(VERSIONS)


def test_capabilities_are_those_of_both_sides_in_order_and_once() -> None:
    assert common_capabilities(CAPABILITIES) == tuple(sorted(CAPABILITIES)) == CAPABILITIES
    assert common_capabilities(["stack", "telepathy", "ack", "stack"]) == ("ack", "stack")
    assert common_capabilities([]) == ()


@given(st.text())
def test_the_size_of_text_is_that_of_its_utf8(text: str) -> None:
    assert utf8_size(text) == len(text.encode())


@pytest.mark.parametrize(
    ("message", "cost"),
    [
        (Output(stream="stdout", data="żółć", execution_id="e"), OVERHEAD + 8),
        (Progress(execution_id="e", done=1.0, note="½ done"), OVERHEAD + 7),
        (Gap(stream="stdout", lost_bytes=10**9, lost_messages=1), OVERHEAD),
        (InputRequest(execution_id="e", prompt="Name? "), 2 * OVERHEAD + 6),
        (InputClosed(execution_id="e", request_id="r", reason="answered"), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_a_message_costs_its_text_and_a_little_and_a_question_pays_for_its_end(
    message: Message, cost: int
) -> None:
    assert message_cost(message) == cost


@given(st.text(max_size=2000))
def test_a_message_costs_no_less_than_the_bytes_it_has_on_the_wire(text: str) -> None:
    """So that a window of credit bounds the memory of both sides."""
    output = Output(stream="stdout", data=text, execution_id="e" * 64)
    assert message_cost(output) >= len(msgspec.msgpack.encode(output))
