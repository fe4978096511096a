"""Logging in a copy of a process that holds nothing open of its original's."""

from __future__ import annotations

import contextlib
import logging
from logging.handlers import SocketHandler, SysLogHandler
from typing import Any


def reopen_handlers() -> None:
    """Have each handler open its file or its connection anew, when it is next used."""
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # noqa: SLF001 - the only list of all
        handler = reference()
        if isinstance(handler, logging.FileHandler):
            handler.mode = handler.mode.replace("w", "a")  # the original has written into it
            _let_go(handler, "stream")
        elif isinstance(handler, SocketHandler):
            _let_go(handler, "sock")
        elif isinstance(handler, SysLogHandler):
            _let_go(handler, "socket")


def _let_go(handler: Any, name: str) -> None:
    """Without what it had, a handler of the standard library opens it."""
    opened = getattr(handler, name, None)
    setattr(handler, name, None)
    if opened is not None:
        with contextlib.suppress(OSError, ValueError):
            opened.close()
