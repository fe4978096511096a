"""Threads for blocking functions of coroutines: how many, and which nobody waits for."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from capsule_tasks.child.executors.threads import BlockingThreads


async def test_a_function_that_runs_on_after_its_timeout_is_counted() -> None:
    threads, go_on = BlockingThreads(2), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    started = threading.Event()

    def block() -> None:
        started.set()
        go_on.wait()

    waiting = asyncio.create_task(asyncio.to_thread(block))
    while not started.is_set():
        await asyncio.sleep(0)
    assert threads.abandoned == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert threads.abandoned == 1
    assert await asyncio.to_thread(lambda: "the other thread") == "the other thread"
    go_on.set()
    threads.shutdown()
    assert threads.abandoned == 0


async def test_a_function_that_has_not_started_is_cancelled() -> None:
    threads, go_on = BlockingThreads(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    first = asyncio.create_task(asyncio.to_thread(go_on.wait))
    called: list[str] = []
    second = asyncio.create_task(asyncio.to_thread(called.append, "second"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert threads.abandoned == 0
    go_on.set()
    await first
    threads.shutdown()
    assert called == []


async def test_a_warning_says_that_all_threads_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    threads, go_on = BlockingThreads(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    started = threading.Event()

    def block() -> None:
        started.set()
        go_on.wait()

    lost = asyncio.create_task(asyncio.to_thread(block))
    while not started.is_set():
        await asyncio.sleep(0)
    lost.cancel()
    with caplog.at_level(logging.WARNING):
        waiting = [asyncio.create_task(asyncio.to_thread(int)) for _ in range(3)]
        await asyncio.sleep(0)
    assert "all 1 threads" in caplog.text
    assert "in 1 of them" in caplog.text
    assert len(caplog.records) == 1
    go_on.set()
    assert await asyncio.gather(*waiting) == [0, 0, 0]
    threads.shutdown()
