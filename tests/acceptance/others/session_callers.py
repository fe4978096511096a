"""Producers that call named sessions again and again, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from capsule_tasks import Execution
from capsule_tasks.client.sessions.named_session import NamedSession
from capsule_tasks.errors import StorageError
from tests.acceptance.workers import HANG_S, eventually, unique

COUNT = "n = globals().get('n', 0) + 1\nn"
ASK = "print('asks', flush=True)\nanswer = input('?')\nanswer"


def submit(session: NamedSession, source: str, call_id: str = "") -> Execution:
    """Submit a call; repeat it under its id while Redis is unavailable, as callers are told to."""
    call_id = call_id or unique("call")

    def attempt() -> Execution | None:
        try:
            return session.execute(source, call_id=call_id)
        except StorageError as fault:
            if fault.operation_id != call_id:
                raise
            return None

    execution: Execution = eventually(attempt, f"the submission of call {call_id}")
    return execution


def asking(session: NamedSession) -> Execution:
    """A call that has begun and waits for an answer."""
    execution = submit(session, ASK)
    next(execution.output())
    return execution


class Counting:
    """One caller for each session: each call adds 1 to a number, and waits for its value."""

    def __init__(self, sessions: Sequence[NamedSession]) -> None:
        self.values: dict[str, list[Any]] = {session.id: [] for session in sessions}
        self._sessions = sessions
        self._stops = threading.Event()
        self._threads = ThreadPoolExecutor(len(sessions))

    def __enter__(self) -> Self:
        self._running = [self._threads.submit(self._count, one) for one in self._sessions]
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        with self._threads:
            for running in self._running:
                running.result(2 * HANG_S)

    def goes_on(self, calls: int = 3) -> None:
        """Return once each caller has so many values more than now."""
        before = {name: len(values) for name, values in self.values.items()}

        def is_on() -> bool:
            for running in self._running:
                if running.done():
                    running.result()
            return all(len(values) >= before[name] + calls for name, values in self.values.items())

        eventually(is_on, "more values of each session")

    def missed_nothing(self) -> bool:
        """Whether each session counted each call once, and forgot none."""
        return all(values == list(range(1, len(values) + 1)) for values in self.values.values())

    def _count(self, session: NamedSession) -> None:
        values = self.values[session.id]
        while not self._stops.is_set():
            values.append(submit(session, COUNT).get(timeout=HANG_S))
