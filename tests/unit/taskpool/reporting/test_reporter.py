"""Which tasks are coroutines, and that nothing keeps a task that a reload has replaced."""

from __future__ import annotations

import gc
import weakref

from capsule_tasks.taskpool.reporting.reporter import is_coroutine_task


class _Blocking:
    def run(self) -> None: ...

    def __call__(self) -> None: ...


class _Coroutine(_Blocking):
    async def run(self) -> None: ...  # type: ignore[override]


def test_a_coroutine_task_is_known_as_one_each_time() -> None:
    blocking, coroutine = _Blocking(), _Coroutine()
    for _ in range(2):
        assert is_coroutine_task(coroutine)
        assert not is_coroutine_task(blocking)


def test_a_replaced_task_is_dropped() -> None:
    task = _Blocking()
    is_coroutine_task(task)
    dropped = weakref.ref(task)
    del task
    gc.collect()
    assert dropped() is None
