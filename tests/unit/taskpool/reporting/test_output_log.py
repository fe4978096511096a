"""Output of tasks on its way to the worker's own output and log."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from celery import Celery

from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import Gap, Output, TaskCall
from capsule_tasks.taskpool.reporting.output_log import FinishedTask, Lines, OutputLog

HANG_S = 30.0
SIZE = 60_000


class Heard(logging.Handler):
    """Lines that reached the log, without their tasks; while `gate` is not set it is stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stuck = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def handle(self, record: logging.LogRecord) -> bool:
        if not self.gate.is_set():
            self.stuck.set()
            assert self.gate.wait(HANG_S)
        self.records.append(record)
        self.lines.put(record.getMessage().partition("]: ")[2] or record.getMessage())
        return True

    def take(self, count: int) -> list[str]:
        return [self.lines.get(timeout=HANG_S) for _ in range(count)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    loggers = [logging.getLogger(name) for name in ("celery.redirected", "capsule_tasks.taskpool")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    handler.gate.set()
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def output_log(heard: Heard) -> Iterator[OutputLog]:
    output_log = OutputLog(Celery("shop", set_as_current=False))
    output_log.start()
    yield output_log
    heard.gate.set()
    output_log.stop()


def execution(task_id: str, pid: int = 17) -> Execution:
    call = TaskCall(name="shop.count", task_id=task_id, body=b"")
    origin = Origin(execution_id=task_id, task=call.name)
    execution = Execution(call, Lifecycle(origin), Mock())
    execution.pid, execution.child_execution_id = pid, task_id
    return execution


def text(data: str, *, late: bool = False) -> Output:
    return Output(execution_id="one", stream="stdout", data=data, late=late)


def test_each_task_has_its_lines_in_order_and_its_last_one_at_its_end(
    output_log: OutputLog, heard: Heard
) -> None:
    one, other = execution("one"), execution("other")
    for number in range(100):
        output_log.write(one, text(f"1.{number}"))
        output_log.write(other, text(f"2.{number}\n"))
        output_log.write(one, text("!\n"))
    output_log.write(one, text("the rest"))
    output_log.forget(one)
    lines = heard.take(201)
    assert [line for line in lines if line.startswith("2.")] == [f"2.{n}" for n in range(100)]
    ours = [line for line in lines if not line.startswith("2.")]
    assert ours == [*(f"1.{n}!" for n in range(100)), "the rest"]


def test_a_line_names_its_task_its_id_and_its_process_also_after_the_end(
    output_log: OutputLog, heard: Heard
) -> None:
    one = execution("one", 17)
    output_log.write(one, text("50 % done\n"))
    output_log.forget(one)
    output_log.write(FinishedTask("one", 17), text("late\n", late=True))
    output_log.write(FinishedTask("never heard of", 18), text("unknown\n", late=True))
    output_log.write(one, Gap(stream="stdout", lost_bytes=7, lost_messages=1))
    heard.take(4)
    records = [
        (record.processName, record.process, record.getMessage()) for record in heard.records
    ]
    assert records[:3] == [
        ("Session-17", 17, "shop.count[one]: 50 % done"),
        ("Session-17", 17, "shop.count[one]: late"),
        ("Session-18", 18, "???[never heard of]: unknown"),
    ]
    assert records[3][2] == "7 bytes of the output of task shop.count[one] were dropped"
    assert vars(heard.records[0])["task_id"] == "one"


def test_a_writer_never_waits_for_the_log_and_drops_are_counted(
    output_log: OutputLog, heard: Heard
) -> None:
    heard.gate.clear()
    one = execution("one")
    output_log.write(one, text("first\n"))
    assert heard.stuck.wait(HANG_S)
    count = 1000
    begun = time.monotonic()
    for number in range(count):
        output_log.write(one, text(f"{number}" + " " * SIZE + "\n"))
    assert time.monotonic() - begun < HANG_S / 3
    heard.gate.set()
    kept, dropped = [], 0
    assert heard.take(1) == ["first"]
    while not dropped:
        (line,) = heard.take(1)
        if line.endswith("the worker's log is too slow"):
            dropped = int(line.split()[0])
        else:
            kept.append(int(line))
    output_log.write(one, text("again\n"))
    while (line := heard.take(1)[0]) != "again":
        kept.append(int(line))
    assert kept == list(range(len(kept)))
    assert 50 < len(kept) < 200
    assert dropped == sum(len(f"{n}") + SIZE + 1 for n in range(len(kept), count))


def test_a_line_that_does_not_end_is_cut(output_log: OutputLog, heard: Heard) -> None:
    one = execution("one")
    for _ in range(400):
        output_log.write(one, text("x" * 1000))
    output_log.forget(one)
    lines: list[str] = []
    while sum(map(len, lines)) < 400_000:
        lines += heard.take(1)
    assert len(lines) == 7
    assert max(map(len, lines)) < 70_000


def test_late_output_of_a_task_is_logged_and_then_forgotten(
    output_log: OutputLog, heard: Heard
) -> None:
    output_log.write(FinishedTask("one", 17), text("late", late=True))
    output_log.write(FinishedTask("one", 17), text("r", late=True))
    assert heard.take(1) == ["later"]
    assert not len(output_log._late)
    output_log.write(None, Gap(stream="stdout", lost_bytes=7, lost_messages=1))
    assert heard.take(1) == ["7 bytes of the output of a task were dropped"]


def test_at_the_end_all_is_written_and_a_hanging_handler_is_abandoned(
    output_log: OutputLog, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_log.write(execution("one"), text("a\nb"))
    output_log.stop()
    assert heard.take(2) == ["a", "b"]
    monkeypatch.setattr(OutputLog, "stop_limit_s", 0.01)
    stuck = OutputLog(Celery("shop", set_as_current=False))
    stuck.start()
    heard.gate.clear()
    stuck.write(execution("one"), text("c\n"))
    stuck.stop()
    heard.gate.set()
    assert heard.take(1) == ["c"]


def test_a_pipe_without_a_reader_blocks_the_thread_only(
    output_log: OutputLog, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, written = threading.Event(), threading.Event(), list[bytes]()

    def write(_descriptor: int, data: bytes) -> int:
        begun.set()
        assert go.wait(HANG_S)
        written.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    raw = Output(stream="stderr", data="raw", raw=True)
    output_log.write(execution("one"), raw)
    assert begun.wait(HANG_S)
    output_log.write(execution("one"), raw)
    go.set()
    output_log.stop()
    assert written == [b"raw", b"raw"]


def test_pieces_cost_no_more_the_longer_the_line_is() -> None:
    lines: list[str] = []
    made = Lines(lambda _source, line: lines.append(line))
    key = (FinishedTask("one", 17), "stdout")
    for _ in range(10_000):
        made.add(key, "x" * 10)
    made.end(key)
    assert sum(map(len, lines)) == 100_000
    assert len(lines) == 2
    assert not len(made)
