"""Tasks that run in the caller's process, without Redis and without a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from capsule_tasks.testing.answers import answering

_SETTINGS: dict[str, Any] = {"task_always_eager": True, "task_store_eager_result": False}


@contextlib.contextmanager
def eager(
    app: Any, *, propagates: bool = False, answers: Iterable[str] | None = None
) -> Iterator[Any]:
    """Have every `.delay()` of `app` run its task before it returns, until the block ends.

    With `propagates` an exception of a task is raised by its `.delay()`, instead of its `.get()`.
    Steps of the tasks are stored in a dict that is discarded at the end. With `answers` each
    `input()` of a task takes the next answer, and raises AssertionError when none is left; without,
    `input()` stays that of the test.
    """
    from capsule_tasks.testing.steps import StepsInMemory  # noqa: PLC0415  loads Redis's client

    wanted = {
        **_SETTINGS,
        "task_eager_propagates": propagates,
        "capsule_store": StepsInMemory(),
    }
    before = {name: app.conf.get(name) for name in wanted}
    with contextlib.nullcontext() if answers is None else answering(answers):
        app.conf.update(wanted)
        try:
            yield app
        finally:
            app.conf.update(before)
