"""Output that is not read: the writer waits, or the oldest text is dropped and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.flow import OVERHEAD, message_cost
from capsule_tasks.protocol.messages import Gap, InputRequest, Output, Progress, RunEvent
from tests.sessions import HANG_S
from tests.unit.child.io.sinks import Bench

QUESTION = InputRequest(execution_id="e", prompt="?")
HALF_WAY = Progress(execution_id="e", done=0.5)


def blocking() -> Bench:
    bench = Bench(backpressure="block", window_bytes=1000, chunk_bytes=100)
    bench.spend_credit()
    return bench


def dropping(**settings: int) -> Bench:
    given = {"window_bytes": 2000, "chunk_bytes": 100} | settings
    bench = Bench(backpressure="drop_oldest", **given)
    bench.spend_credit()
    return bench


def test_output_that_is_sent_uses_credit() -> None:
    bench = Bench(window_bytes=10_000)
    before = bench.sink.credit
    bench.stdout.write("żółć")
    bench.flush_all()
    (message,) = bench.outbox.messages
    assert before - bench.sink.credit == message_cost(message) == OVERHEAD + len("żółć".encode())
    bench.sink.add_credit(500)
    assert bench.sink.credit == before - message_cost(message) + 500


# --- block -------------------------------------------------------------------------------------


def test_without_credit_a_writer_waits_and_goes_on_when_it_comes() -> None:
    bench = blocking()
    text = "".join(f"{number:09}\n" for number in range(1000))
    thread = bench.in_thread(lambda: bench.stdout.write(text))
    assert bench.outbox.messages == []
    while thread.is_alive():
        bench.condition.blocked.clear()
        bench.sink.add_credit(3 * (OVERHEAD + 100))
        while thread.is_alive() and not bench.condition.blocked.wait(0.01):
            pass
    assert bench.outbox.text() == text
    assert not any(isinstance(m, Gap) for m in bench.outbox.messages)


def test_a_little_credit_sends_one_message_and_no_more() -> None:
    bench = blocking()
    thread = bench.in_thread(lambda: bench.stdout.write("y" * 300))
    bench.condition.blocked.clear()
    bench.sink.add_credit(1 - bench.sink.credit)
    assert bench.condition.blocked.wait(HANG_S)
    assert bench.outbox.sent == [("stdout", "y" * 100)]
    bench.sink.add_credit(10_000)
    thread.join(HANG_S)
    assert bench.outbox.text() == "y" * 300


def test_less_than_a_chunk_waits_for_the_pump_and_not_the_writer() -> None:
    bench = blocking()
    bench.stdout.write("small")
    bench.stdout.flush()
    assert not bench.sink.flush_from_pump(), "without credit there is nothing to come back for"
    assert bench.outbox.messages == []
    calls = len(bench.pump.calls)
    bench.sink.add_credit(10_000)
    assert len(bench.pump.calls) == calls + 1
    bench.flush_all()
    assert bench.outbox.sent == [("stdout", "small")]


def test_credit_for_a_sink_without_output_calls_no_listener() -> None:
    bench = Bench()
    bench.sink.add_credit(1)
    assert bench.pump.calls == []


def test_the_end_waits_for_the_consumer() -> None:
    bench = blocking()
    bench.stdout.write("last")
    assert not bench.sink.try_finish()
    assert not bench.sink.is_closed
    thread = bench.in_thread(bench.sink.finish)
    assert bench.outbox.messages == []
    bench.sink.add_credit(10_000)
    thread.join(HANG_S)
    assert bench.outbox.sent == [("stdout", "last")]
    assert bench.sink.is_closed


def test_a_sink_that_ends_on_an_event_loop_reports_new_credit() -> None:
    bench, granted = blocking(), []
    bench.sink.on_credit = lambda: granted.append(bench.sink.credit)
    bench.sink.add_credit(5000)
    assert granted == [bench.sink.credit]


class CancellingGate(InterruptibleCondition):
    """Raises a cancel where a writer waits."""

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        raise ExecutionCancelled


def test_a_writer_that_is_cancelled_keeps_what_came_before_and_counts_what_it_lost() -> None:
    bench = blocking()
    bench.stdout.write("before ")
    bench.sink._condition = CancellingGate()
    with pytest.raises(ExecutionCancelled):
        bench.stdout.write("z" * 500)
    bench.sink._condition = InterruptibleCondition()
    bench.stdout.write("from finally")
    bench.sink.add_credit(100_000)
    bench.sink.finish()
    kept = "before " + "z" * (100 - len("before "))
    assert bench.outbox.sent == [
        ("stdout", kept),
        ("stdout", 7 + 500 - 100),
        ("stdout", "from finally"),
    ]


def test_progress_waits_for_credit_and_keeps_its_place() -> None:
    bench = blocking()
    bench.stdout.write("before")
    thread = bench.in_thread(lambda: bench.sink.send(HALF_WAY))
    assert bench.outbox.messages == []
    bench.sink.add_credit(10_000)
    thread.join(HANG_S)
    assert bench.outbox.sent == [("stdout", "before"), HALF_WAY]


def test_an_event_of_a_run_that_finds_no_credit_is_not_sent_unless_it_is_the_last() -> None:
    bench = Bench(window_bytes=4096, backpressure="drop_oldest")
    event = RunEvent.of("turn", "support", {"turn": 1})
    event.execution_id = "e"
    sent = 0
    while bench.sink.send(event):
        sent += 1
    assert sent == -(-4096 // message_cost(event))
    assert bench.sink.credit <= 0
    assert bench.sink.send(event, needs_credit=False)
    assert bench.outbox.messages == [event] * (sent + 1)
    bench.sink.add_credit(2000)
    assert bench.sink.send(event)


def test_a_question_goes_out_behind_the_text_before_it() -> None:
    bench = Bench()
    bench.stdout.write("Who are you?\n")
    bench.sink.send_question(QUESTION)
    assert bench.outbox.sent == [("stdout", "Who are you?\n"), QUESTION]


def test_a_question_needs_no_credit_but_uses_some() -> None:
    bench = blocking()
    credit = bench.sink.credit
    bench.sink.send_question(QUESTION)
    assert bench.outbox.sent == [QUESTION]
    assert bench.sink.credit == credit - message_cost(QUESTION)


def test_credit_given_while_many_threads_write_is_never_lost() -> None:
    """Credit once was lost: a writer's subtraction could overwrite a concurrent addition."""
    bench = Bench(window_bytes=1 << 40, chunk_bytes=1)
    rounds, added = 2000, 7

    def write() -> None:
        for _ in range(rounds):
            bench.stdout.write("x")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        bench.sink.add_credit(added)
    for thread in threads:
        thread.join(HANG_S)
    bench.sink.finish()
    spent = sum(message_cost(message) for message in bench.outbox.messages)
    assert bench.sink.credit == (1 << 40) + rounds * added - spent
    assert len(bench.outbox.text()) == 3 * rounds


# --- drop_oldest -------------------------------------------------------------------------------


def lost_and_sent(bench: Bench, stream: str = "stdout") -> tuple[int, int]:
    lost = sum(
        m.lost_bytes for m in bench.outbox.messages if isinstance(m, Gap) and m.stream == stream
    )
    return lost, len(bench.outbox.text(stream).encode())


def test_without_credit_the_oldest_text_goes_and_the_gap_counts_its_bytes() -> None:
    bench = dropping()
    lines = [f"line {number:04}\n" for number in range(1000)]
    for line in lines:
        bench.stdout.write(line)
    assert bench.outbox.messages == []
    bench.sink.finish()
    text = bench.outbox.text()
    assert "".join(lines).endswith(text)
    lost, sent = lost_and_sent(bench)
    assert lost + sent == len("".join(lines))
    assert isinstance(bench.outbox.messages[0], Gap), "the gap is where the text is missing"


@pytest.mark.parametrize("text", ["x" * 50, "żółć" * 12, "😀" * 12, "\ud800" * 8], ids=ascii)
def test_the_kept_output_costs_at_most_a_window_and_at_least_half_of_it(text: str) -> None:
    bench = dropping(window_bytes=20_000, chunk_bytes=1000)
    for _ in range(3000):
        bench.stdout.write(text)
    bench.sink.finish()
    outputs = [m for m in bench.outbox.messages if isinstance(m, Output)]
    cost = sum(map(message_cost, outputs))
    assert 20_000 // 2 <= cost <= 20_000
    travelled = text.encode("utf-8", "backslashreplace")
    assert sum(lost_and_sent(bench)) == 3000 * len(travelled)


def test_each_stream_has_a_gap_of_its_own() -> None:
    bench = dropping()
    for _ in range(200):
        bench.stdout.write("o" * 30)
        bench.stderr.write("")
        bench.stdout.write("")
        bench.stderr.write("e" * 20)
    bench.sink.finish()
    assert sum(lost_and_sent(bench)) == 200 * 30
    assert sum(lost_and_sent(bench, "stderr")) == 200 * 20
    assert {m.stream for m in bench.outbox.messages if isinstance(m, Gap)} == {"stdout", "stderr"}


def test_many_small_texts_do_not_outgrow_the_window() -> None:
    """Each is a message with a price of its own, so far fewer of them are kept."""
    bench = dropping()
    for _ in range(5000):
        bench.stdout.write("o")
        bench.stderr.write("e")
    bench.sink.finish()
    outputs = [m for m in bench.outbox.messages if isinstance(m, Output)]
    assert 0 < sum(map(message_cost, outputs)) <= 2000
    assert sum(lost_and_sent(bench)) == sum(lost_and_sent(bench, "stderr")) == 5000


def test_one_text_larger_than_the_window_keeps_its_end() -> None:
    bench = dropping()
    bench.stdout.write("a" * 100_000 + "the end")
    bench.sink.finish()
    assert bench.outbox.text().endswith("aaathe end")
    assert sum(lost_and_sent(bench)) == 100_007


def test_the_writer_never_waits() -> None:
    bench = dropping()
    bench.sink._condition = CancellingGate()
    bench.stdout.write("x" * 10_000)
    bench.sink.send(HALF_WAY)
    bench.stdout.flush()
    bench.sink.finish()


def test_progress_that_cannot_be_sent_is_superseded_by_the_next() -> None:
    bench = dropping()
    bench.sink.send(HALF_WAY)
    assert bench.outbox.messages == []
    bench.sink.add_credit(10_000)
    bench.sink.send(HALF_WAY)
    assert bench.outbox.sent == [HALF_WAY]


def test_text_that_continues_when_there_is_credit_again_follows_the_gap() -> None:
    bench = dropping()
    for number in range(1000):
        bench.stdout.write(f"{number} ")
    bench.sink.add_credit(100_000)
    bench.flush_all()
    bench.stdout.write("and on")
    bench.flush_all()
    kinds = [type(m) for m in bench.outbox.messages]
    assert kinds[0] is Gap
    assert kinds.count(Gap) == 1
    assert bench.outbox.text().endswith("998 999 and on")


@pytest.mark.parametrize("mode", ["block", "drop_oldest"])
def test_the_smallest_window_still_lets_one_message_through_at_a_time(mode: Any) -> None:
    bench = Bench(backpressure=mode, window_bytes=1, chunk_bytes=1)
    bench.stdout.write("a")
    assert bench.outbox.sent == [("stdout", "a")]
    assert bench.sink.credit <= 0
    bench.sink.add_credit(message_cost(bench.outbox.messages[0]))
    bench.stdout.write("b")
    assert bench.outbox.sent[1:] == [("stdout", "b")]
