"""Any message of an honest or hostile child is routed, bounded, or a bad frame."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import BadFrame, FrameTooLarge, SessionLost
from capsule_tasks.protocol.codec import Unknown, message_types
from capsule_tasks.protocol.messages import (
    Ack,
    Cancel,
    CancelReply,
    Checkpoint,
    Checkpointed,
    CheckpointPiece,
    Credit,
    Error,
    Gap,
    InputClosed,
    InputRequest,
    Interrupt,
    Message,
    NamespaceRequest,
    Output,
    Progress,
    ReplyTooLarge,
    Restore,
    Result,
    StackReply,
    StackRequest,
    Started,
    Terminal,
    ToParent,
    Unsupported,
)
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.listeners import Interceptors
from capsule_tasks.sessions.router import _MAX_PENDING_INPUTS, _REPLIES, Router
from capsule_tasks.sessions.stream import ExecutionStream, Streams
from capsule_tasks.settings import MIB, OutputSettings, RoutingSettings
from tests.unit.strategies import CEILING, messages_of

GENERAL = 20
GENERAL_BYTES = 100_000


class Parent:
    """A router and two executions, without a child."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.sent: list[Any] = []
        interceptors = Interceptors(RoutingSettings(), self.counters)
        channel: Any = SimpleNamespace(
            send_control=self.sent.append, catch_up_raw=list, resume_raw=list
        )
        self.streams = Streams(OutputSettings(), channel)
        self.ends: list[tuple[str, Terminal]] = []
        nothing: Any = lambda _: None  # noqa: E731
        child: Any = SimpleNamespace(
            streams=self.streams,
            channel=channel,
            on_ready=nothing,
            on_heartbeat=nothing,
            on_session_output=nothing,
            on_stream_end=self.on_stream_end,
            on_fault=self.on_fault,
        )
        routing = RoutingSettings(
            session_queue=GENERAL, session_queue_bytes=GENERAL_BYTES, log_output=True
        )
        self.router = Router(child, "s", routing, self.counters, interceptors)
        for name in ("e", "f"):
            self.streams.open(name)

    def on_stream_end(self, stream: ExecutionStream, terminal: Terminal) -> None:
        self.ends.append((stream.execution_id, terminal))
        stream.finish(terminal)

    def on_fault(self, fault: BadFrame) -> None:
        raise fault

    def stream(self, name: str) -> ExecutionStream:
        return self.streams[name]


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


KINDS = message_types(ToParent)
anything = st.one_of(*map(messages_of, KINDS)) | st.builds(
    Unknown, st.text(max_size=9), st.text(max_size=9)
)


def addressed(message: Any, name: str | None) -> Any:
    """The same message about an execution that exists, or the session."""
    if hasattr(message, "execution_id") and (name or isinstance(message, (Output, Gap))):
        message.execution_id = name
    return message


@settings(max_examples=300)
@given(st.lists(st.tuples(anything, st.sampled_from(["e", "f", "over", None])), max_size=30))
def test_any_message_is_routed_or_a_bad_frame(story: list[tuple[Any, str | None]]) -> None:
    async def scene() -> None:
        parent = Parent()
        requests = [Cancel(execution_id="e", seq=1), StackRequest(), Checkpoint(max_bytes=MIB)]
        replies = [parent.router.expect(request) for request in requests]
        for message, name in story:
            try:
                parent.router.route(addressed(message, name))
            except BadFrame:
                break
        assert len(parent.router.session_messages) <= GENERAL
        assert len({name for name, _ in parent.ends}) == len(parent.ends)
        parent.router.fail_replies("the end")
        for reply in replies:
            assert reply.done()
            reply.exception()

    play(scene())


def test_every_message_of_a_child_has_a_place() -> None:
    async def scene() -> None:
        assert set(Parent().router._handlers) == {*KINDS, Unknown}

    play(scene())


def test_every_request_has_a_kind_of_reply() -> None:
    asked = {Cancel, Interrupt, StackRequest, NamespaceRequest, Checkpoint, Restore}
    assert set(_REPLIES) == asked
    replies = {kind for kind in KINDS if "in_reply_to" in kind.__struct_fields__}
    assert set(_REPLIES.values()) == replies - {Unsupported, ReplyTooLarge}


async def test_a_reply_goes_to_its_caller() -> None:
    parent, request = Parent(), Checkpoint(max_bytes=MIB)
    reply = parent.router.expect(request)
    answer = Checkpointed(in_reply_to=request.id)
    parent.router.route(answer)
    assert await reply is answer
    await asyncio.sleep(0)
    assert parent.router._replies == {}


async def test_a_reply_of_another_kind_is_a_bad_frame() -> None:
    parent, request = Parent(), Checkpoint(max_bytes=MIB)
    reply = parent.router.expect(request)
    with pytest.raises(BadFrame, match="answered with a StackReply"):
        parent.router.route(StackReply(in_reply_to=request.id, stacks=[]))
    assert not reply.done()


async def test_pieces_of_a_checkpoint_are_collected_in_order_and_later_ones_are_dropped() -> None:
    parent, request = Parent(), Checkpoint(max_bytes=100)

    def arrive(offset: int, data: bytes, of: str = request.id) -> None:
        parent.router.route(CheckpointPiece(checkpoint_id=of, offset=offset, data=data))

    with parent.router.collecting(request, 4) as arriving:
        arrive(0, b"old.")
        arrive(4, b"old.")
        arrive(0, b"new.")  # the child begins again
        arrive(0, b"else", of="?")
        arrive(4, b"er")
        assert (arriving.pieces, arriving.size) == ([b"new.", b"er"], 6)
    arrive(6, b"late")
    assert arriving.size == 6
    assert len(parent.router.session_messages) == 0


@pytest.mark.parametrize(
    ("offset", "data", "fault"),
    [
        (4, b"xx", "offset 4"),
        (8, b"xx", "offset 8"),
        (6, b"xx", "offset 6"),  # the piece before it was not full
        (0, b"", "size 0"),
        (0, b"x" * 11, "more than 10 bytes"),
    ],
)
async def test_a_child_cannot_make_its_parent_keep_more_than_was_allowed(
    offset: int, data: bytes, fault: str
) -> None:
    parent, request = Parent(), Checkpoint(max_bytes=10)
    with parent.router.collecting(request, 4):
        for at, piece in ((0, b"full"), (4, b"er")):
            parent.router.route(CheckpointPiece(checkpoint_id=request.id, offset=at, data=piece))
        with pytest.raises(BadFrame, match=fault):
            parent.router.route(CheckpointPiece(checkpoint_id=request.id, offset=offset, data=data))


async def test_a_reply_without_a_waiter_is_kept_among_the_session_messages() -> None:
    parent = Parent()
    late = CancelReply(in_reply_to="?", execution_id="e", done="not_running")
    parent.router.route(late)
    assert await parent.router.receive() is late


async def test_a_request_unknown_to_the_child_fails_with_the_reason() -> None:
    parent, request = Parent(), NamespaceRequest()
    reply = parent.router.expect(request)
    parent.router.route(Unsupported(what="namespace_request", in_reply_to=request.id))
    with pytest.raises(SessionLost, match="does not know 'namespace_request'"):
        await reply


async def test_a_request_with_too_large_a_reply_fails_with_the_reason() -> None:
    parent, request = Parent(), NamespaceRequest()
    reply = parent.router.expect(request)
    parent.router.route(ReplyTooLarge(in_reply_to=request.id, size=200, ceiling=100))
    parent.router.route(ReplyTooLarge(in_reply_to="of none", size=200, ceiling=100))
    with pytest.raises(FrameTooLarge, match="200 bytes is over the ceiling of 100"):
        await reply


async def test_an_unknown_message_is_answered() -> None:
    parent = Parent()
    parent.router.route(Unknown("from_the_future", "x-1"))
    (answer,) = parent.sent
    assert isinstance(answer, Unsupported)
    assert (answer.what, answer.in_reply_to) == ("from_the_future", "x-1")


def test_the_answer_to_any_unknown_message_fits_into_a_frame() -> None:
    """The longest name that the decoder lets through."""
    from capsule_tasks.protocol.codec import encode_frame

    encode_frame(Unsupported(what="x" * 200, in_reply_to="y" * 200), CEILING)


async def test_an_execution_that_is_acknowledged_twice_is_a_bad_frame() -> None:
    """Acks cost nothing, so a flood of them would fill memory."""
    parent, ack = Parent(), Ack(ack_of="x", execution_id="e", accepted_at=0.0)
    parent.router.route(ack)
    with pytest.raises(BadFrame, match="acknowledged twice"):
        parent.router.route(ack)


async def test_an_ack_that_comes_after_the_end_is_no_fault() -> None:
    """An execution that is ended before it has started keeps its id until the child reports it."""
    parent = Parent()
    stream = parent.stream("e")
    stream.finish(Error(execution_id="e", kind="cancelled", type="X", message="before it began"))
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    assert isinstance(await stream.next(), Error)
    assert stream.buffered_messages == 0


async def test_output_before_the_ack_is_delivered_after_it() -> None:
    parent = Parent()
    stream = parent.stream("e")
    parent.router.route(Output(execution_id="e", stream="stdout", data="early"))
    assert stream.buffered_messages == 0
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    assert isinstance(await stream.next(), Ack)
    assert (await stream.next()).data == "early"


async def test_messages_of_an_ended_execution_of_the_same_name_are_dropped() -> None:
    """The end of the first one came on the other channel, and overtook these."""
    parent = Parent()
    stream = parent.stream("e")
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0, seq=stream.seq - 1))
    parent.router.route(Started(execution_id="e", seq=stream.seq - 1))
    assert not stream.acked
    assert not stream.is_running
    parent.router.route(
        Ack(ack_of="y", execution_id="e", accepted_at=0.0, seq=stream.seq, queued=True)
    )
    parent.router.route(Started(execution_id="e", seq=stream.seq))
    assert stream.acked
    assert stream.is_running


async def test_output_of_the_session_is_credited_at_once() -> None:
    parent = Parent()
    parent.router.route(Output(stream="stdout", data="abc"))
    (credit,) = parent.sent
    assert isinstance(credit, Credit)
    assert (credit.execution_id, credit.bytes) == (None, 256 + 3)


async def test_late_output_is_the_sessions_also_if_an_execution_of_that_name_runs() -> None:
    parent = Parent()
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    late = Output(execution_id="e", stream="stdout", data="żż", late=True)
    parent.router.route(late)
    assert parent.stream("e").buffered_messages == 1
    assert list(parent.router.session_messages) == [late]
    assert parent.counters.late_output_bytes == 4


async def test_messages_of_no_execution_are_kept_up_to_a_number_and_the_loss_is_counted() -> None:
    parent = Parent()
    for number in range(GENERAL + 5):
        parent.router.route(Output(stream="stdout", data=str(number)))
    assert [message.data for message in parent.router.session_messages] == [
        str(number) for number in range(5, GENERAL + 5)
    ]
    assert parent.router.session_messages.dropped == 5


async def test_large_messages_of_no_execution_do_not_fill_the_memory() -> None:
    parent = Parent()
    for number in range(4):
        parent.router.route(Output(stream="stdout", data=str(number) * (GENERAL_BYTES // 3)))
        parent.router.route(Checkpointed(in_reply_to="?", error="x" * (GENERAL_BYTES // 3)))
    assert len(parent.router.session_messages) == 2
    assert parent.router.session_messages.dropped == 6
    largest = Output(stream="stdout", data="x" * 2 * GENERAL_BYTES)
    parent.router.route(largest)
    assert list(parent.router.session_messages) == [largest]


async def test_a_flood_of_unknown_messages_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = Parent()
    for _ in range(1000):
        parent.router.route(Unsupported(what="x" * 1000))
    assert 0 < len(caplog.records) <= 10
    assert max(len(record.getMessage()) for record in caplog.records) < 200


async def test_an_end_for_an_execution_that_is_over_changes_nothing() -> None:
    parent = Parent()
    for message in (Result(execution_id="e"), Result(execution_id="e"), Result(execution_id="?")):
        parent.router.route(message)
    assert [name for name, _ in parent.ends] == ["e"]


# --- input -------------------------------------------------------------------------------------


def question(name: str = "e") -> InputRequest:
    return InputRequest(execution_id=name, prompt="?")


async def test_questions_are_counted_with_their_high_water_mark_and_how_they_ended() -> None:
    parent = Parent()
    asked = [question() for _ in range(4)]
    for request in asked:
        parent.router.route(request)
    assert (parent.counters.inputs.pending, parent.counters.inputs.high_water) == (
        4,
        4,
    )
    reasons: list[Any] = ["answered", "timeout", "cancelled", "eof"]
    for request, reason in zip(asked, reasons, strict=True):
        closed = InputClosed(execution_id="e", request_id=request.id, reason=reason)
        parent.router.route(closed)
        parent.router.route(closed)
    stats = parent.counters.inputs
    assert (stats.pending, stats.high_water) == (0, 4)
    assert (stats.answered, stats.timeouts, stats.cancels) == (1, 1, 2)


async def test_a_question_takes_one_answer_of_its_own_execution() -> None:
    parent, request = Parent(), question()
    parent.router.route(request)
    assert not parent.router.take_answer(request.id, "f")
    assert not parent.router.take_answer("another", "e")
    assert parent.router.take_answer(request.id, "e")
    assert not parent.router.take_answer(request.id, "e")
    parent.router.return_answer(request.id)
    assert parent.router.take_answer(request.id, "e")


async def test_a_question_of_an_execution_that_is_over_is_not_kept() -> None:
    parent = Parent()
    parent.router.route(question("over"))
    assert parent.router.inputs == {}
    assert list(parent.router.session_messages) == []


async def test_a_flood_of_questions_is_a_bad_frame() -> None:
    parent = Parent()
    parent.router.inputs = {str(n): "e" for n in range(_MAX_PENDING_INPUTS)}
    with pytest.raises(BadFrame, match="input requests are open"):
        parent.router.route(question())


# --- raw bytes ---------------------------------------------------------------------------------


async def test_raw_bytes_belong_to_the_only_execution_that_runs() -> None:
    parent = Parent()
    router = parent.router
    assert parent.streams.raw_owner is None  # e and f have been sent
    router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    assert parent.streams.raw_owner is parent.stream("e")
    router.route(Ack(ack_of="x", execution_id="f", accepted_at=0.0, queued=True))
    assert parent.streams.raw_owner is parent.stream("e")
    router.route(Result(execution_id="e"))
    assert parent.streams.raw_owner is None
    assert router.on_raw("stderr", "of none", 9)
    assert list(router.session_messages)[-1].data == "of none"


async def test_raw_bytes_that_overtake_the_ack_follow_it() -> None:
    parent = Parent()
    del parent.streams["f"]
    assert parent.router.on_raw("stdout", "early", 5)
    assert parent.stream("e").buffered_messages == 0
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    said = [await parent.stream("e").next() for _ in range(2)]
    assert [type(message) for message in said] == [Ack, Output]
    assert said[1].data == "early"
    assert parent.stream("e").raw_waiting == 0


async def test_raw_bytes_ask_for_a_pause_when_a_window_of_them_waits() -> None:
    parent = Parent()
    parent.router.route(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
    window = OutputSettings().window_bytes
    assert parent.router.on_raw("stdout", "x" * 10, 10)
    assert not parent.router.on_raw("stdout", "x" * window, window)
    assert parent.stream("e").buffered_bytes == window + 10


# --- waiting -----------------------------------------------------------------------------------


async def test_each_waiter_for_a_message_gets_one_in_order() -> None:
    parent = Parent()
    waiting = [asyncio.ensure_future(parent.router.receive()) for _ in range(3)]
    await asyncio.sleep(0)
    for number in range(3):
        parent.router.route(Output(stream="stdout", data=str(number)))
    assert [message.data for message in await asyncio.gather(*waiting)] == ["0", "1", "2"]


async def test_a_waiter_cancelled_as_it_is_woken_leaves_the_message_to_the_next() -> None:
    parent = Parent()
    first, second = (asyncio.ensure_future(parent.router.receive()) for _ in range(2))
    await asyncio.sleep(0)
    parent.router.route(Output(stream="stdout", data="x"))
    first.cancel()
    assert (await second).data == "x"
    assert first.cancelled()


async def test_when_the_child_is_gone_every_waiter_is_woken() -> None:
    parent = Parent()
    waiting = asyncio.ensure_future(parent.router.receive())
    reply = parent.router.expect(Checkpoint(max_bytes=MIB))
    await asyncio.sleep(0)
    assert parent.router.fail_receivers("gone") == 1
    parent.router.fail_replies("gone")
    for wait in (waiting, reply):
        with pytest.raises(SessionLost, match="gone"):
            await wait


def test_errors_and_progress_have_no_other_way_than_their_execution() -> None:
    async def scene() -> None:
        parent = Parent()
        messages: list[Message] = [
            Ack(ack_of="x", execution_id="e", accepted_at=0.0),
            Progress(execution_id="e", done=1),
            Error(execution_id="e", kind="raised", type="ValueError", message="odd"),
        ]
        stream = parent.stream("e")
        for message in messages:
            parent.router.route(message)
        assert [await stream.next() for _ in messages] == messages
        assert list(parent.router.session_messages) == []

    play(scene())
