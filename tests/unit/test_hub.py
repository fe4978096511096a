"""The thread that watches for those who block."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

import pytest

from capsule_tasks.client.hub import hub

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
        hub.call(work())
    assert is_over.wait(HANG_S)
