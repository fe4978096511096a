"""Coroutines that run in processes of their own, which die at a chosen turn of the event loop.

Nothing of such a process runs after its death: no `except`, no `finally`, no cancel. So it dies as
by `kill -9`, but at each await in turn.
"""

from __future__ import annotations

import asyncio
import os
import traceback
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from capsule_tasks.settings import LeaseSettings

KILLED = 99
LASTING = LeaseSettings(lease_s=600)
"""For a worker whose lease nobody renews: no test takes this long."""


def runs_to_its_end(make: Callable[[], Coroutine[Any, Any, Any]], dies_at: int | None) -> bool:
    """Run a coroutine in a forked process that dies at this turn of its loop, counted from 0.

    True if the coroutine returned; False if its process died before. An error in it is printed by
    the process and fails the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest's plugins may have threads
        pid = os.fork()
    if pid == 0:
        _run(make, dies_at)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), f"the process ended with {code}"
    return code == 0


def _run(make: Callable[[], Coroutine[Any, Any, Any]], dies_at: int | None) -> None:
    try:
        loop: Any = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        run_once, turns = loop._run_once, 0

        def run_once_or_die() -> None:
            nonlocal turns
            if turns == dies_at:
                os._exit(KILLED)
            turns += 1
            run_once()

        loop._run_once = run_once_or_die
        loop.run_until_complete(make())
    except BaseException:  # noqa: BLE001  no error may leave the forked process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
