"""Answers of the pool to `inspect`."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from capsule_tasks.taskpool.pool import TaskPool


class _Thread:
    """Every coroutine on its loop fails."""

    def start_coroutine(self, work: Any) -> Future[dict[str, str]]:
        work.close()
        failed = Future[dict[str, str]]()
        failed.set_exception(OSError(24, "Too many open files"))
        return failed


def test_a_stack_that_cannot_be_had_is_answered_with_the_reason() -> None:
    pool: Any = object.__new__(TaskPool)
    pool._runtime = SimpleNamespace(supervisor=None)
    pool._thread = _Thread()
    pool._bridge = SimpleNamespace(put=lambda call, *arguments: call(*arguments))
    answer = pool.stack_of("one")
    assert answer.result(timeout=0) == {"error": "task 'one': OSError(24, 'Too many open files')"}
