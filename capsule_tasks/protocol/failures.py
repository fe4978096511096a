"""An exception of a Celery task as data: the parts that can be carried, and text for the rest."""

from __future__ import annotations

from typing import Any

import msgspec


class Raised(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Enough of an exception to rebuild it where its type is known."""

    module: str
    name: str
    """The qualified name of the type in that module."""
    args: list[Any] | None = None
    """None if an argument cannot be carried."""
    message: str = ""
    text: str = ""
    """The `repr` of the exception."""
    notes: tuple[str, ...] = ()
    state: dict[str, Any] = {}
    """Attributes that Celery reads: `when` of a retry, `requeue` of a reject."""


class Failure(Raised, kw_only=True, omit_defaults=True):
    """How a task failed, or why it is to be retried, ignored or rejected."""

    traceback: str = ""
    internal: bool = False
    """Celery's own code raised the exception, not the task."""
    inner: Raised | None = None
    """The exception that a retry was raised for."""
