"""Coroutines that are killed or cancelled at each await in turn.

Killed ones run in processes of their own, which die at a chosen turn of the event loop. Nothing of
such a process runs after its death: no `except`, no `finally`, no cancel. So it dies as by
`kill -9`.
"""

from __future__ import annotations

import asyncio
import os
import traceback
import warnings
from collections.abc import Callable, Coroutine, Generator
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


class _Cancelling:
    """Awaits a coroutine, and cancels its task when it waits for the nth time, and maybe after."""

    def __init__(self, inner: Coroutine[Any, Any, Any], at: int, times: int) -> None:
        self._inner, self._cancels = inner, range(at, at + times)
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            try:
                waited = self._inner.throw(thrown) if thrown else self._inner.send(sent)
            except StopIteration as stop:
                return stop.value
            if self.waits in self._cancels:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            self.waits += 1
            sent = thrown = None
            try:
                sent = yield waited
            except BaseException as error:  # noqa: BLE001  the coroutine gets every error
                thrown = error


async def cancelled_at(
    make: Callable[[], Coroutine[Any, Any, Any]], at: int, times: int = 1
) -> bool:
    """Run a coroutine in a task that is cancelled at its await `at`, counted from 0.

    With two `times` it is cancelled again at the await after it. True if the coroutine ended before
    that; then every await has been tried. Fails if a task is left behind.
    """
    before = asyncio.all_tasks()
    cancelling = _Cancelling(make(), at, times)

    async def run() -> None:
        await cancelling

    task = asyncio.ensure_future(run())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    left = asyncio.all_tasks() - before - {task}
    assert not left, left
    return cancelling.waits <= at
