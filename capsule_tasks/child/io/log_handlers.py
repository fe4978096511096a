"""The log handlers of an app in a child: what they have open, and whose output they write."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from logging.handlers import SocketHandler, SysLogHandler, WatchedFileHandler
from typing import Any

from capsule_tasks.child.io.capture import Capture


def reopen_handlers() -> None:
    """Have each handler open its connection anew, when it is next used."""
    for handler in _handlers():
        if isinstance(handler, logging.FileHandler):
            handler.mode = handler.mode.replace("w", "a")  # others write into it, if it is opened
        elif isinstance(handler, SocketHandler):
            _let_go(handler, "sock")
        elif isinstance(handler, SysLogHandler):
            _let_go(handler, "socket")


def log_as_session(logger: logging.Logger, capture: Capture) -> None:
    """Keep what is logged by `logger` out of the running task's output: it is the session's.

    Records take the usual way through filters, formatters and handlers. Only the streams that end
    at descriptors 1 and 2, which are read as the task's output, heed `Capture.aside`.
    """
    streams = list(capture.originals)  # which others than handlers may have kept
    for handler in _handlers():
        if isinstance(handler, WatchedFileHandler):
            with contextlib.suppress(OSError):
                handler.reopenIfNeeded()  # `--logfile=/dev/stderr` is another file in each process
        streams.append(getattr(handler, "stream", None))
    for stream in {id(stream): stream for stream in streams}.values():
        capture.attribute_by_context(stream)
    # The class's at the time of the call: libraries that report errors replace it.
    kind = type(logger)
    logger.callHandlers = lambda record: capture.aside(kind.callHandlers, logger, record)  # type: ignore[method-assign]


def _handlers() -> Iterator[Any]:
    """All handlers of this process."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # noqa: SLF001 - the only list of all
        if (handler := reference()) is not None:
            yield handler


def _let_go(handler: Any, name: str) -> None:
    """Without what it had, a handler of the standard library opens it."""
    opened = getattr(handler, name, None)
    setattr(handler, name, None)
    if opened is not None:
        with contextlib.suppress(OSError, ValueError):
            opened.close()
