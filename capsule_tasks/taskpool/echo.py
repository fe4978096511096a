"""What tasks write reaches the worker's own output and log, as under prefork."""

from __future__ import annotations

import logging
import os
from typing import Any

from celery.utils.log import get_logger, mlevel

from capsule_tasks.protocol.messages import Gap, Output

log = logging.getLogger("capsule_tasks.taskpool")

_REDIRECTED = "celery.redirected"
_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class Echo:
    """Writes on the runtime's loop. Text that was printed is logged if the worker redirects."""

    def __init__(self, app: Any) -> None:
        redirects = bool(app.conf.worker_redirect_stdouts)
        self._level = mlevel(app.conf.worker_redirect_stdouts_level) if redirects else None
        self._logger = get_logger(_REDIRECTED)
        self._partial: dict[tuple[object, str], str] = {}

    def say(self, source: object, output: Output | Gap) -> None:
        """One message of a child, of a job or of none."""
        if isinstance(output, Gap):
            log.warning("%d bytes of a task's output were dropped", output.lost_bytes)
        elif (
            output.raw
            or (source is None and not output.late)
            or self._level is None
            or not self._logger.hasHandlers()
        ):
            self._write(output)
        else:
            self._log_lines(source, output)

    def forget(self, source: object) -> None:
        """The task is over: what it left without a newline is a line."""
        for stream in _DESCRIPTORS:
            if rest := self._partial.pop((source, stream), ""):
                self._logger.log(self._level or logging.WARNING, "%s", rest)

    def _log_lines(self, source: object, output: Output) -> None:
        key = (source, output.stream)
        *lines, rest = (self._partial.pop(key, "") + output.data).split("\n")
        for line in lines:
            if line.strip():
                self._logger.log(self._level or logging.WARNING, "%s", line)
        if rest:
            self._partial[key] = rest

    def _write(self, output: Output) -> None:
        data = output.data.encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(_DESCRIPTORS[output.stream], data) :]
        except OSError as fault:
            log.debug("a task's output could not be written: %s", fault)
