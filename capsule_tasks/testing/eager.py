"""Tasks that run where they are called, without Redis and without a worker."""

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
    """Have every `.delay()` of `app` run its task at once; afterwards all is as it was.

    With `propagates` an exception of a task is raised by its `.delay()`, instead of its `.get()`.
    What tasks do in a `step` is kept in a dict, as long as this lasts. With `answers` each
    `input()` takes the next of them, and AssertionError says so where there is none left; without,
    `input()` is what it is in the test.
    """
    from capsule_tasks.testing.steps import StepsInMemory  # noqa: PLC0415  it loads Redis's client

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
