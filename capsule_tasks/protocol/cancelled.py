"""asyncio's CancelledError in a form that Celery takes for the failure of a task."""

from __future__ import annotations

import asyncio
from typing import Any


class CancelledFailure(asyncio.CancelledError, Exception):
    """A CancelledError that a coroutine task raised without being stopped.

    Celery takes a BaseException that is no Exception for the end of its worker. This class is both:
    handlers and `autoretry_for` see asyncio's type, and it is stored and raised under its name.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return asyncio.CancelledError, self.args


CancelledFailure.__module__ = asyncio.CancelledError.__module__
CancelledFailure.__qualname__ = CancelledFailure.__name__ = asyncio.CancelledError.__name__


def as_failure(error: asyncio.CancelledError) -> CancelledFailure:
    """A copy with the arguments, the notes and the traceback of `error`."""
    failure = CancelledFailure(*error.args)
    failure.__dict__.update(error.__dict__)
    failure.__cause__, failure.__context__ = error.__cause__, error.__context__
    failure.__suppress_context__ = error.__suppress_context__
    return failure.with_traceback(error.__traceback__)
