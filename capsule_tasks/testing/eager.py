"""Tasks that run where they are called, without Redis and without a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_SETTINGS: dict[str, Any] = {"task_always_eager": True, "task_store_eager_result": False}


@contextlib.contextmanager
def eager(app: Any, *, propagates: bool = False) -> Iterator[Any]:
    """Have every `.delay()` of `app` run its task at once; afterwards all is as it was.

    With `propagates` an exception of a task is raised by its `.delay()`, instead of its `.get()`.
    """
    wanted = {**_SETTINGS, "task_eager_propagates": propagates}
    before = {name: app.conf[name] for name in wanted}
    app.conf.update(wanted)
    try:
        yield app
    finally:
        app.conf.update(before)
