"""An app that records which functions of ours one task passes, in the worker and in its child.

A profile function stands in every thread. While a path is open it records each call of ours:

- *delivered*: from kombu's delivery of the message until the Execute frame is sent to the child;
- *begun*: in the child, from the decoding of that frame to the first line of the task;
- *ended*: from the decoding of the terminal message until the end is reported to Celery
  and the message is acknowledged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

from celery import Celery, signals
from celery.worker.state import task_ready
from kombu.asynchronous import Hub
from kombu.message import Message as CeleryMessage
from kombu.messaging import Consumer

from capsule_tasks.protocol import codec
from capsule_tasks.protocol.codec import MessageDecoder
from capsule_tasks.protocol.messages import Error, Execute, Result, TaskResult

URL = os.environ.get("REDIS_URL", "redis://localhost")

app = Celery("tests.acceptance.hop_app", broker=URL, backend=URL)
app.conf.update(
    worker_pool="capsule_tasks.taskpool:TaskPool",
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    capsule_streams=os.environ.get("TEST_STREAMS", "1") == "1",
)

_OURS = "capsule_tasks."
_TERMINAL = (Result, TaskResult, Error)
_OUTERMOST = {Hub.create_loop.__code__, threading.Thread.run.__code__}
"""Frames below these stay for a thread's whole life: no message passes them."""


class Path:
    """The calls of ours between two points, as `module:function`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._is_open = False

    def begin(self, frame: FrameType | None) -> None:
        """Start again, with the calls that have led to this frame."""
        led_here: list[FrameType] = []
        while frame is not None and frame.f_code not in _OUTERMOST:
            led_here.append(frame)
            frame = frame.f_back
        self.calls, self._is_open = [], True
        for caller in reversed(led_here):
            self.note(caller)

    def note(self, frame: FrameType) -> None:
        module = frame.f_globals.get("__name__", "")
        if self._is_open and module.startswith(_OURS):
            self.calls.append(f"{module.removeprefix(_OURS)}:{frame.f_code.co_qualname}")

    def end(self) -> list[str]:
        self._is_open = False
        return self.calls


class Recorder:
    """The profile function; for one task at a time."""

    def __init__(self) -> None:
        self.records: SimpleQueue[dict[str, list[str]]] = SimpleQueue()
        self.begun = Path()
        self._delivered, self._ended = Path(), Path()
        self._awaits_send = self._is_sent = self._is_reported = self._is_acknowledged = False
        self._marks = {
            Consumer._receive_callback.__code__: self._on_delivery,
            codec.encode_frame.__code__: self._on_encoding,
            task_ready.__code__: self._on_reported,
            CeleryMessage.ack.__code__: self._on_acknowledgement,
        }

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._awaits_send and argument.__name__ == "send":
            self._awaits_send, self._is_sent = False, True
            self._delivered.end()
        if event != "call":
            return
        for path in (self._delivered, self.begun, self._ended):
            path.note(frame)
        mark = self._marks.get(frame.f_code)
        if mark is not None:
            mark(frame)

    def on_decoded(self, message: Any, reader: FrameType | None) -> None:
        if isinstance(message, Execute):
            self.begun.begin(reader)
        elif isinstance(message, _TERMINAL) and self._is_sent:
            self._ended.begin(reader)

    def _on_delivery(self, frame: FrameType) -> None:
        if str(frame.f_locals["message"].headers.get("task")).startswith("hop_"):
            self._is_sent = self._is_reported = self._is_acknowledged = False
            self._delivered.begin(frame)

    def _on_encoding(self, frame: FrameType) -> None:
        self._awaits_send = isinstance(frame.f_locals["message"], Execute)

    def _on_reported(self, _frame: FrameType) -> None:
        self._is_reported = True
        self._end()

    def _on_acknowledgement(self, _frame: FrameType) -> None:
        self._is_acknowledged = True
        self._end()

    def _end(self) -> None:
        if self._is_sent and self._is_reported and self._is_acknowledged:
            self._is_sent = False
            self.records.put({"delivered": self._delivered.calls, "ended": self._ended.end()})


recorder = Recorder()
_feed = MessageDecoder.feed


def feed(self: MessageDecoder[Any], data: bytes) -> Iterator[Any]:
    """Show each message to the recorder first.

    The thread that reads messages gets the profile function here: a child's control thread may
    have been started before this app was imported, and Python 3.11 sets the function of no other
    thread.
    """
    if sys.getprofile() is not recorder:
        sys.setprofile(recorder)
    for message in _feed(self, data):
        recorder.on_decoded(message, sys._getframe(1))
        yield message


MessageDecoder.feed = feed  # type: ignore[method-assign]
threading.setprofile(recorder)
sys.setprofile(recorder)


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    threading.Thread(target=tell_test, daemon=True).start()
    os.write(int(os.environ["TEST_READY_FD"]), b"ready\n")


def tell_test() -> None:
    while True:
        app.backend.client.rpush("mark:hops", json.dumps(recorder.records.get()))


@app.task(name="hop_early")
def hop_early() -> list[str]:
    return recorder.begun.end()


@app.task(name="hop_late", acks_late=True)
def hop_late() -> list[str]:
    return recorder.begun.end()
