"""The log handlers of an app in a child: their connections, and the attribution of their output."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from logging.handlers import SocketHandler, SysLogHandler, WatchedFileHandler
from typing import Any

from capsule_tasks.child.io.capture import Capture


def reopen_handlers() -> None:
    """Close connections that were forked along; each handler opens its own on its next record."""
    for handler in _handlers():
        if isinstance(handler, logging.FileHandler):
            # A handler that opens its file later must not truncate what other processes wrote.
            handler.mode = handler.mode.replace("w", "a")
        elif isinstance(handler, (SocketHandler, SysLogHandler)):
            name = "sock" if isinstance(handler, SocketHandler) else "socket"
            opened = getattr(handler, name, None)
            setattr(handler, name, None)
            if opened is not None:
                with contextlib.suppress(OSError, ValueError):
                    opened.close()


def log_as_session(logger: logging.Logger, capture: Capture) -> None:
    """Keep what is logged by `logger` out of the running task's output: it is the session's.

    Records pass through filters, formatters and handlers as usual. Only streams that write to
    descriptors 1 and 2, which the parent reads as the task's output, heed `Capture.as_session`.
    """
    streams = list(capture.originals)  # not only handlers may have stored them
    for handler in _handlers():
        if isinstance(handler, WatchedFileHandler):
            with contextlib.suppress(OSError):
                handler.reopenIfNeeded()  # `--logfile=/dev/stderr` is another file in each process
        streams.append(getattr(handler, "stream", None))
    for stream in {id(stream): stream for stream in streams}.values():
        capture.attribute_by_context(stream)
    # The class's method at the time of the call: error reporting libraries replace it.
    kind = type(logger)
    logger.callHandlers = lambda record: capture.as_session(kind.callHandlers, logger, record)  # type: ignore[method-assign]


def _handlers() -> Iterator[Any]:
    """All handlers of this process."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # noqa: SLF001 - the only list of all
        if (handler := reference()) is not None:
            yield handler
