"""The bridge between the runtime thread and Celery's hub."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from capsule_tasks.taskpool.hub import Bridge, SharedLoop


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


def test_an_error_while_the_loop_closes_is_no_noise_of_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = SharedLoop()

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("while cancelled")

    shared.asyncio_loop.create_task(fail_when_cancelled())
    shared.run_once()
    shared.close()
    gc.collect()
    assert not caplog.records
