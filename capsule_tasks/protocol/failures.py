"""An exception of a Celery task as data: what can be carried of it, and words for the rest."""

from __future__ import annotations

from typing import Any

import msgspec


class Raised(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Enough of an exception to make one of the same type again, where that type is known."""

    module: str
    name: str
    """The qualified name of its type in that module."""
    args: list[Any] | None = None
    """None if one of them cannot be carried."""
    message: str = ""
    text: str = ""
    """Its `repr`."""
    notes: tuple[str, ...] = ()
    state: dict[str, Any] = {}
    """Attributes that Celery reads: `when` of a retry, `requeue` of a reject."""


class Failure(Raised, kw_only=True, omit_defaults=True):
    """How a task failed, or why it is to be retried, ignored or rejected."""

    traceback: str = ""
    internal: bool = False
    """Celery's own machinery raised it, not the task."""
    inner: Raised | None = None
    """What a retry was raised for."""
