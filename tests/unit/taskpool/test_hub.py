"""The bridge between the runtime thread and Celery's hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from capsule_tasks.taskpool.hub import Bridge


@pytest.fixture
def made() -> Iterator[Bridge]:
    made = Bridge()
    yield made
    made.stop()


def test_calls_of_another_thread_are_made_in_order(made: Bridge) -> None:
    heard: list[int] = []
    thread = threading.Thread(
        target=lambda: [made.put(lambda n=n: heard.append(n)) for n in range(100_000)]
    )
    thread.start()
    while len(heard) < 100_000:
        made.wait(None)  # a wake-up that is lost is a hang
        made.drain()
    thread.join()
    assert heard == list(range(100_000))


def test_a_call_that_fails_holds_up_no_other(
    made: Bridge, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    made.put(lambda: 1 / 0)
    made.put(lambda: heard.append("next"))
    made.drain()
    assert heard == ["next"]
    assert "ZeroDivisionError" in caplog.text


def test_closed_it_takes_no_offence(made: Bridge) -> None:
    made.stop()
    made.put(lambda: None)
    made.stop()
