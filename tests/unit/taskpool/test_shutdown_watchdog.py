"""When a worker that was told to leave is ended by force."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.taskpool.shutdown_watchdog import ShutdownWatchdog

HANG_S = 30
SHORT_S = 0.05
MANY = 25
"""Looks at the servers: several limits long."""


class Ground:
    """A worker that is told to leave, and its servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        self.do_answer = True
        self.cannot_be_asked = False
        self.ended = threading.Event()
        self.forced: SimpleQueue[str] = SimpleQueue()
        self._looked = threading.Semaphore(0)
        leaving = ShutdownWatchdog(SHORT_S, lambda: self.is_busy, self._answer)

        def force(reason: str) -> None:
            self.forced.put(reason)
            leaving.on_worker_stopped()

        monkeypatch.setattr(leaving, "_end_by_force", force)
        leaving.watch(self.ended)
        leaving.start()
        leaving.on_stopping()

    def _answer(self) -> bool:
        self._looked.release()
        if self.cannot_be_asked:
            raise InvalidSetting("redis_url", "redis://host?odd=1", "a URL without odd options")
        return self.do_answer

    def is_looked_at(self, times: int) -> None:
        for _ in range(times):
            assert self._looked.acquire(timeout=HANG_S)


def test_tasks_are_waited_for_as_long_as_the_servers_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, is_busy=True)
    ground.is_looked_at(MANY)
    assert ground.forced.empty()
    ground.do_answer = False
    assert "does not answer" in ground.forced.get(timeout=HANG_S)


def test_a_worker_without_tasks_has_its_limit_whatever_the_servers_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, is_busy=False)
    assert "nothing left" in ground.forced.get(timeout=HANG_S)


def test_the_limit_starts_again_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch, is_busy=True)
    ground.is_looked_at(MANY)
    ground.is_busy = False
    assert "nothing left" in ground.forced.get(timeout=HANG_S)


def test_servers_that_cannot_be_asked_end_neither_tasks_nor_the_last_resort(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ground = Ground(monkeypatch, is_busy=True)
    ground.cannot_be_asked = True
    ground.is_looked_at(MANY)
    assert ground.forced.empty()
    ground.is_busy = False
    assert "nothing left" in ground.forced.get(timeout=HANG_S)
    assert len([one for one in caplog.records if "cannot check" in one.message]) == 1
