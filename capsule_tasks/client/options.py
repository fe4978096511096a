"""Options of `apply_async`. Celery sends those it does not know, and nobody would read them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import celery
from kombu.messaging import Producer

_OPTIONS = {
    *inspect.signature(celery.Celery.send_task).parameters,
    *inspect.signature(Producer.publish).parameters,
    *("queue", "ignore_result", "stamped_headers"),
} - {"self", "name", "body", "args", "kwargs", "options", "properties", "timeout"}
"""`timeout`, which kombu knows, is for most who write it `timeout_s`."""


def check_options(of: str, options: Iterable[str], arguments: Sequence[str]) -> None:
    """Refuse what is no option of `apply_async`; `arguments` are those of the call itself."""
    known = [*_OPTIONS, *arguments]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{of} has no argument {name!r}{hint}")
