"""From `write` to frames: what is sent, when, in which order, and under whose name."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.child.io.capture import CapturedStream
from capsule_tasks.child.io.sink import OutputLimitReached, OutputSink
from capsule_tasks.child.outbox import OutputPump
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.messages import Gap, Output, Progress
from tests.unit.child.io.sinks import Bench, FakeOutbox


def test_the_first_text_calls_the_pump_and_the_next_one_does_not() -> None:
    bench = Bench()
    bench.stdout.write("a")
    bench.stdout.write("b")
    assert bench.pump.calls == [bench.sink.flush_from_pump]
    assert bench.outbox.messages == []
    bench.flush_all()
    assert bench.outbox.sent == [("stdout", "ab")]


def test_after_a_pause_the_pump_is_called_again() -> None:
    bench = Bench()
    for text in ("a", "b", "c"):
        bench.stdout.write(text)
        bench.flush_all()
    assert len(bench.pump.calls) == 3
    assert bench.outbox.sent == [("stdout", "a"), ("stdout", "b"), ("stdout", "c")]


def test_the_pump_comes_back_once_after_it_sent_something() -> None:
    """So that text which keeps coming gathers, instead of going out piece by piece."""
    bench = Bench()
    bench.stdout.write("a")
    assert bench.sink.flush_from_pump()
    bench.stdout.write("b")
    bench.stdout.write("c")
    assert bench.sink.flush_from_pump()
    assert not bench.sink.flush_from_pump()
    assert bench.outbox.sent == [("stdout", "a"), ("stdout", "bc")]


class RacingSink(OutputSink):
    """A writer appends while the pump lowers `flush_at_chars`: it has compared the old value."""

    slip = ""

    @property
    def flush_at_chars(self) -> int:  # type: ignore[override]
        return self._flush_at_chars

    @flush_at_chars.setter
    def flush_at_chars(self, value: int) -> None:
        if value == 1 and self.slip:
            text, self.slip = self.slip, ""
            self.parts.append(text)
            self.size += len(text)
        self._flush_at_chars = value


def test_text_written_while_the_pump_goes_to_sleep_is_not_forgotten() -> None:
    bench = Bench()
    bench.sink.__class__ = RacingSink
    bench.sink.flush_at_chars = 1
    bench.stdout.write("a")
    assert bench.sink.flush_from_pump()
    bench.sink.slip = "slipped in"
    assert bench.sink.flush_from_pump(), "the pump would sleep over text that only it can send"
    bench.flush_all()
    assert bench.outbox.text() == "aslipped in"


def test_a_full_chunk_is_sent_by_the_writer() -> None:
    bench = Bench(chunk_bytes=4)
    bench.stdout.write("abc")
    assert bench.outbox.messages == []
    bench.stdout.write("d")
    assert bench.outbox.sent == [("stdout", "abcd")]


def test_a_long_text_is_sent_in_chunks() -> None:
    bench = Bench(chunk_bytes=4)
    bench.stdout.write("abcdefghij")
    assert bench.outbox.sent == [("stdout", "abcd"), ("stdout", "efgh"), ("stdout", "ij")]


def test_both_streams_keep_their_order_and_runs_of_one_are_joined() -> None:
    bench = Bench()
    for stream, text in (
        (bench.stdout, "1"),
        (bench.stdout, "2"),
        (bench.stderr, "3"),
        (bench.stderr, "4"),
        (bench.stdout, "5"),
        (bench.stderr, "6"),
    ):
        stream.write(text)
    bench.flush_all()
    assert bench.outbox.sent == [
        ("stdout", "12"),
        ("stderr", "34"),
        ("stdout", "5"),
        ("stderr", "6"),
    ]


def test_a_flush_sends_a_partial_line_at_once() -> None:
    bench = Bench()
    bench.stdout.write("50 %\r")
    bench.stdout.flush()
    assert bench.outbox.sent == [("stdout", "50 %\r")]


def test_the_bytes_of_each_stream_are_counted_as_they_travel() -> None:
    bench = Bench()
    bench.stdout.write("żółć")
    bench.stderr.write("\ud800!")
    bench.sink.finish()
    assert bench.outbox.sent == [("stdout", "żółć"), ("stderr", "\\ud800!")]
    assert bench.sink.sent == {"stdout": len("żółć".encode()), "stderr": len("\\ud800!")}


def test_text_without_length_sends_nothing() -> None:
    bench = Bench()
    assert bench.stdout.write("") == 0
    bench.stdout.flush()
    bench.sink.finish()
    assert bench.outbox.messages == []


def test_only_text_can_be_written_and_a_kind_of_text_is_text() -> None:
    class Loud(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    bench = Bench()
    for stream in (bench.stdout, bench.stderr):
        with pytest.raises(TypeError, match="must be str, not bytes"):
            stream.write(b"x")  # type: ignore[arg-type]
        assert stream.write(Loud("loud")) == 4
    bench.flush_all()
    assert bench.outbox.sent == [("stdout", "loud"), ("stderr", "loud")]


def test_bytes_written_to_the_buffer_are_text_also_when_a_character_is_cut() -> None:
    bench = Bench()
    data = "aż\n".encode() + b"\xff"
    for index in range(len(data)):
        assert bench.stdout.buffer.write(data[index : index + 1]) == 1
    bench.stdout.buffer.flush()
    assert bench.outbox.text() == "aż\n\\xff"


def test_a_stream_is_no_terminal_and_survives_being_closed() -> None:
    bench = Bench()
    assert (bench.stdout.fileno(), bench.stderr.fileno()) == (1, 2)
    assert not bench.stdout.isatty()
    bench.stdout.close()
    bench.stdout.buffer.close()
    print("still here", file=bench.stdout, flush=True)
    assert bench.outbox.text() == "still here\n"


# --- the end -----------------------------------------------------------------------------------


def test_the_end_sends_the_remaining_output_as_its_own() -> None:
    bench = Bench()
    bench.stdout.write("last words")
    bench.sink.finish()
    (message,) = bench.outbox.messages
    assert isinstance(message, Output)
    assert (message.execution_id, message.data, message.late) == ("e", "last words", False)
    assert bench.sink.is_closed


def test_text_after_the_end_is_the_sessions_under_the_old_name() -> None:
    bench = Bench()
    bench.stdout.write("before")
    bench.sink.finish()
    bench.stdout.write("late")
    bench.stderr.write("later")
    late = bench.outbox.messages[1:]
    assert [(m.execution_id, m.stream, m.data, m.late) for m in late] == [
        ("e", "stdout", "late", True),
        ("e", "stderr", "later", True),
    ]
    assert bench.sink.sent == {"stdout": 6, "stderr": 0}


def test_late_text_is_paid_by_the_session_and_not_by_the_execution() -> None:
    bench = Bench()
    bench.sink.finish()
    own, session = bench.sink.credit, bench.session.credit
    bench.stdout.write("late")
    assert bench.sink.credit == own
    assert bench.session.credit < session


def test_late_text_keeps_its_place_behind_earlier_session_output() -> None:
    bench = Bench()
    bench.sink.finish()
    bench.session.parts.append("first ")
    bench.session.size = 6
    bench.stdout.write("second")
    assert [m.data for m in bench.outbox.messages] == ["first ", "second"]


def test_output_of_a_thread_at_the_very_end_is_late_but_not_lost() -> None:
    bench = Bench()
    bench.sink.__class__ = RacingSink
    bench.sink.flush_at_chars = 100
    bench.sink.slip = "slipped in"
    bench.sink.finish()
    (message,) = bench.outbox.messages
    assert (message.data, message.late, message.execution_id) == ("slipped in", True, "e")


def test_the_pump_finds_nothing_to_do_for_an_execution_that_is_over() -> None:
    bench = Bench()
    bench.stdout.write("a")
    bench.sink.finish()
    bench.sink.parts.append("late")
    bench.sink.size = 4
    assert not bench.sink.flush_from_pump()
    assert bench.outbox.text() == "alate"


def test_progress_after_the_end_is_dropped() -> None:
    bench = Bench()
    bench.sink.finish()
    bench.sink.send(Progress(execution_id="e", done=1))
    assert bench.outbox.messages == []


# --- the limit ---------------------------------------------------------------------------------


def test_an_execution_may_write_up_to_its_limit_and_is_stopped_at_the_next_byte() -> None:
    bench = Bench(limit_bytes=10)
    bench.stdout.write("12345")
    bench.stderr.write("67890")
    with pytest.raises(OutputLimitReached, match="output limit of 10 bytes: 13 were written"):
        bench.stdout.write("abc")
    bench.sink.finish()
    assert bench.outbox.sent == [("stdout", "12345"), ("stderr", "67890"), ("stdout", 3)]
    assert bench.sink.over_limit


def test_the_limit_counts_bytes_and_not_characters() -> None:
    bench = Bench(limit_bytes=10)
    with pytest.raises(OutputLimitReached, match="12 were written"):
        bench.stdout.write("żółćżó")


def test_one_text_far_over_the_limit_is_cut_at_the_limit() -> None:
    bench = Bench(limit_bytes=10)
    with pytest.raises(ExecutionCancelled):
        bench.stdout.write("x" * 1000)
    bench.sink.finish()
    assert bench.outbox.sent == [("stdout", "x" * 10), ("stdout", 990)]


@pytest.mark.parametrize("flush", [True, False])
def test_output_in_drops_is_stopped_at_the_limit_though_the_pump_never_runs(flush: bool) -> None:
    """On a busy machine the pump may come late, and a flush leaves nothing that adds up."""
    bench = Bench(limit_bytes=1000)

    def write_drops() -> None:
        for _ in range(1000):
            bench.stdout.write("é" * 49)
            if flush:
                bench.stdout.flush()

    with pytest.raises(OutputLimitReached, match="1078 were written"):
        write_drops()
    bench.sink.finish()
    assert len(bench.outbox.text().encode()) == 1000


def test_the_pump_sends_nothing_beyond_the_limit() -> None:
    """A writer may append while the pump takes what was written: it has compared the old value."""
    bench = Bench(limit_bytes=9)
    bench.stdout.write("é")
    bench.sink.parts.append("é" * 5)
    bench.flush_all()
    assert bench.outbox.text() == "é" * 4
    with pytest.raises(OutputLimitReached, match="13 were written"):
        bench.stdout.write("x")


# --- around it ---------------------------------------------------------------------------------


def test_the_context_decides_whose_output_it_is_and_else_the_owner() -> None:
    named, first, second = Bench(), Bench(), Bench()
    context_sink, owner = None, first.sink
    stream = CapturedStream(2, lambda: context_sink, lambda: owner)
    stream.write("one")
    owner = second.sink
    stream.write("two")
    context_sink = named.sink
    stream.write("three")
    for bench, text in ((first, "one"), (second, "two"), (named, "three")):
        assert bench.pump.calls == [bench.sink.flush_from_pump]
        bench.sink.flush_ready()
        assert bench.outbox.sent == [("stderr", text)]


def test_the_pump_sends_output_that_was_not_flushed() -> None:
    outbox: Any = FakeOutbox()
    outbox.pump = OutputPump(0.001)
    outbox.pump.start()
    bench = Bench()
    sink = OutputSink("e", outbox, bench.settings, late=bench.session)
    bench.sink = sink
    text = ""
    for number in range(50):
        bench.stdout.write(f"{number} ")
        text += f"{number} "
        outbox.wait_for(lambda expected=text: outbox.text() == expected)


def test_a_gap_states_how_much_of_which_stream_is_missing() -> None:
    bench = Bench(limit_bytes=1)
    with pytest.raises(OutputLimitReached):
        bench.stderr.write("żó")
    bench.sink.finish()
    gaps = [m for m in bench.outbox.messages if isinstance(m, Gap)]
    assert [(g.execution_id, g.stream, g.lost_messages) for g in gaps] == [("e", "stderr", 1)]
    written = len("żó".encode())
    assert gaps[0].lost_bytes + len(bench.outbox.text("stderr").encode()) == written
