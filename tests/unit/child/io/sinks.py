"""An `OutputSink` with everything around it replaced by something that can be watched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from capsule_tasks.child.io.capture import CapturedStream
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition
from capsule_tasks.protocol.messages import Gap, Message, Output
from capsule_tasks.settings import OutputSettings
from tests.sessions import HANG_S


class FakeOutbox:
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        self.pump = FakePump()
        self.messages: list[Message] = []
        self.on_message: Callable[[Message], None] = lambda _: None
        self._changed = threading.Condition()

    def bulk(self, message: Message) -> None:
        self.on_message(message)
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, HANG_S)

    @property
    def sent(self) -> list[Any]:
        """Outputs as (stream, text), gaps as (stream, bytes lost), other messages as they are."""
        return [_summary(message) for message in self.messages]

    def text(self, stream: str = "stdout") -> str:
        outputs = [m for m in self.messages if isinstance(m, Output)]
        return "".join(m.data for m in outputs if m.stream == stream)


def _summary(message: Message) -> Any:
    if isinstance(message, Output):
        return message.stream, message.data
    if isinstance(message, Gap):
        return message.stream, message.lost_bytes
    return message


class FakePump:
    """Remembers what is added; calls nothing."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], bool]] = []

    def add(self, flush: Callable[[], bool]) -> None:
        self.calls.append(flush)


class WatchedCondition(InterruptibleCondition):
    """Tells when a thread has to wait."""

    blocked: threading.Event = msgspec.field(default_factory=threading.Event)

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        def watched() -> bool:
            is_ready = ready()
            if not is_ready:
                self.blocked.set()
            return is_ready

        return super().wait(watched, timeout_s)


class Bench:
    """One execution's sink and the session's, both on one outbox."""

    def __init__(self, *, limit_bytes: int | None = None, **settings: Any) -> None:
        self.settings = OutputSettings(**settings)
        self.outbox, self.condition = FakeOutbox(), WatchedCondition()
        self.pump = self.outbox.pump
        outbox: Any = self.outbox
        self.session = OutputSink(None, outbox, self.settings)
        self.sink = OutputSink(
            "e", outbox, self.settings, late=self.session, limit_bytes=limit_bytes
        )
        self.sink._condition = self.condition
        self.stdout = CapturedStream(1, lambda: None, lambda: self.sink)
        self.stderr = CapturedStream(2, lambda: None, lambda: self.sink)

    def flush_all(self) -> None:
        """Flush for as long as the sink asks the pump for it."""
        while self.sink.flush_from_pump():
            pass

    def spend_credit(self) -> None:
        """Use up the window, and forget the messages sent for that."""
        while self.sink.credit > 0:
            self.stdout.write("x")
            self.sink.flush_ready()
        self.outbox.messages.clear()
        self.flush_all()

    def in_thread(self, work: Callable[[], object]) -> threading.Thread:
        """Start work that has to wait, and wait until it does."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.condition.blocked.wait(HANG_S)
        return thread
