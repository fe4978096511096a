"""The thread that watches for blocking callers."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

import pytest

from capsule_tasks.client.watching.watch_thread import watch_thread

HANG_S = 30


def test_a_call_that_is_interrupted_leaves_nothing_running() -> None:
    caller = threading.get_ident()
    is_over = threading.Event()

    async def work() -> None:
        try:
            while sys._current_frames()[caller].f_code.co_name != "wait":
                await asyncio.sleep(0.001)  # the caller is on its way there
            signal.pthread_kill(caller, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            is_over.set()

    with pytest.raises(KeyboardInterrupt):
        watch_thread.call(work())
    assert is_over.wait(HANG_S)


def test_the_thread_can_be_stopped_and_used_again() -> None:
    async def where() -> int:
        return threading.get_ident()

    first = watch_thread.call(where())
    waiting = asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), watch_thread.loop)
    watch_thread.stop()
    watch_thread.stop()
    assert waiting.cancelled()
    assert first not in {thread.ident for thread in threading.enumerate()}
    assert watch_thread.call(where()) != threading.get_ident()
