"""Writes the output of tasks to the worker's own output and log, as under prefork.

A printed line is logged under the name of its process, after the name and id of its task. A thread
of its own does that: the reader of the worker's output may be slow or stuck, and logging many short
lines takes long, so the hub must not wait for it. Beyond a bound, output that comes faster than it
can be written is dropped, and the log says how much.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from io import StringIO
from typing import Any, NamedTuple

from celery.signals import setup_logging
from celery.utils.log import get_logger, mlevel

from capsule_tasks.errors import reason_of
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.execution import Execution
from capsule_tasks.protocol.flow import utf8_size
from capsule_tasks.protocol.messages import Gap, Output
from capsule_tasks.system.service import ThreadService

log = logging.getLogger("capsule_tasks.taskpool")

_REDIRECTED = "celery.redirected"
_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_MAX_WAITING = 8 * 1024 * 1024
"""Characters that wait to be written, including the overhead of each message."""
_OVERHEAD = 500
_MAX_LINE = 64 * 1024
_UNKNOWN = "???"
"""Celery's own log writes this in place of an unknown task."""
_LATE_S = 1.0
"""After this time without output an unfinished line of a finished task is logged as it is."""
_MAX_LATE = 100
_MAX_KNOWN = 1000
"""Finished tasks whose names are remembered, for output that comes later."""
_FLUSH_S = 3.0
"""The time for writing the rest when the worker stops."""


class FinishedTask(NamedTuple):
    """A task that is over, and may have left threads that still write."""

    execution_id: str
    pid: int


_Source = Execution | FinishedTask | None
_Key = tuple[_Source, str]


class Lines:
    """Joins pieces into lines, separately for each key; cuts a line at 64 KiB."""

    def __init__(self, put: Callable[[_Source, str], object]) -> None:
        self._put = put
        self._unfinished: dict[_Key, StringIO] = {}

    def __len__(self) -> int:
        """The number of unfinished lines."""
        return len(self._unfinished)

    def add(self, key: _Key, text: str) -> None:
        *lines, rest = text.split("\n")
        if lines:
            lines[0] = self._take(key) + lines[0]
            for line in lines:
                self._put_line(key, line)
        if rest:
            unfinished = self._unfinished.setdefault(key, StringIO(newline=""))
            unfinished.write(rest)
            if unfinished.tell() >= _MAX_LINE:
                self.end(key)

    def end(self, key: _Key) -> None:
        """Finish a line that has no newline."""
        self._put_line(key, self._take(key))

    def end_all(self) -> None:
        for key in list(self._unfinished):
            self.end(key)

    def _take(self, key: _Key) -> str:
        return self._unfinished.pop(key, StringIO()).getvalue()

    def _put_line(self, key: _Key, line: str) -> None:
        if line.strip():
            self._put(key[0], line)


class OutputLog(ThreadService):
    """`write` and `forget` are for the runtime's loop, and never wait.

    Printed text is logged if the worker redirects. The output of one task stays in order. `stop`
    waits a few seconds for the rest to be written.
    """

    thread_name = "capsule-output"
    stop_limit_s = _FLUSH_S
    # Nothing is logged of a thread that hangs: it may hang in a handler, with its lock.

    def __init__(self, app: Any) -> None:
        super().__init__()
        # Celery redirects nothing where the app has set up logging by itself.
        redirects = bool(app.conf.worker_redirect_stdouts) and not setup_logging.receivers
        self._level = mlevel(app.conf.worker_redirect_stdouts_level) if redirects else None
        self._logger = get_logger(_REDIRECTED)
        self._lines = Lines(self._log)
        self._late = Lines(self._log)
        self._has_output: set[Execution] = set()
        """Executions that may have an unfinished line."""
        self._over: dict[str, tuple[str, str]] = {}
        """Name and id of tasks that printed, by execution; the oldest are forgotten."""
        self._waiting: deque[tuple[_Source, Output | Gap | None]] = deque()
        self._size = 0
        self._dropped_bytes = 0
        """Not 0 while there is no room."""
        self._changed = threading.Condition()

    def write(self, source: _Source, output: Output | Gap) -> None:
        """One message of a child: of an execution, of a finished one, or of none."""
        if isinstance(source, Execution):
            if isinstance(source.call, CodeCall):
                return  # what code prints is for whoever sent it, and could fill the log
            self._has_output.add(source)
        with self._changed:
            size = _size(output)
            if self._dropped_bytes or (self._waiting and self._size + size > _MAX_WAITING):
                self._dropped_bytes += _bytes(output)
                return
            self._size += size
            self._waiting.append((source, output))
            self._changed.notify()

    def forget(self, source: Execution) -> None:
        """The task is over: finish its last line."""
        if source in self._has_output:
            self._has_output.discard(source)
            if len(self._over) >= _MAX_KNOWN:
                del self._over[next(iter(self._over))]
            self._over[source.child_execution_id] = source.call.name, source.call.task_id
            with self._changed:
                self._waiting.append((source, None))
                self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # --- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        while self._await():
            with self._changed:
                source, output = self._waiting.popleft()
                self._size -= _size(output)
            try:
                self._echo(source, output)
            except Exception:
                log.exception("task output could not be logged")
            if self._dropped_bytes and self._size <= _MAX_WAITING // 2:
                self._log_dropped()
        self._lines.end_all()
        self._late.end_all()

    def _await(self) -> bool:
        """Wait for output; False once the log is stopped and nothing is left."""
        while True:
            with self._changed:
                timeout_s = _LATE_S if self._late else None
                self._changed.wait_for(lambda: self._waiting or self.stopping.is_set(), timeout_s)
                if self._waiting or self.stopping.is_set():
                    return bool(self._waiting)
            self._late.end_all()

    def _log_dropped(self) -> None:
        with self._changed:
            lost, self._dropped_bytes = self._dropped_bytes, 0
        log.warning("%d bytes of tasks' output were dropped: the worker's log is too slow", lost)

    def _echo(self, source: _Source, output: Output | Gap | None) -> None:
        if output is None:
            for stream in _DESCRIPTORS:
                self._lines.end((source, stream))
        elif isinstance(output, Gap):
            call = source.call if isinstance(source, Execution) else None
            who = f"task {call.name}[{call.task_id}]" if call is not None else "a task"
            log.warning("%d bytes of the output of %s were dropped", output.lost_bytes, who)
        elif output.raw or source is None or self._level is None or not self._logger.hasHandlers():
            _write(output)
        elif isinstance(source, FinishedTask):
            if len(self._late) >= _MAX_LATE:
                self._late.end_all()
            self._late.add((source, output.stream), output.data)
        else:
            self._lines.add((source, output.stream), output.data)

    def _log(self, source: _Source, line: str) -> None:
        """Log the line as the child would: under its process name, with its task."""
        level = self._level or logging.WARNING
        if not self._logger.isEnabledFor(level):
            return
        name, task_id, pid = self._source_name(source)
        task = {"task_name": name, "task_id": task_id}
        arguments = (name, task_id, line)
        record = self._logger.makeRecord(
            self._logger.name, level, __file__, 0, "%s[%s]: %s", arguments, None, extra=task
        )
        record.process, record.processName = pid, f"Session-{pid}"
        self._logger.handle(record)

    def _source_name(self, source: _Source) -> tuple[str, str, int]:
        """The task's name, its id, and its process."""
        if isinstance(source, Execution):
            return source.call.name, source.call.task_id, source.pid
        assert source is not None  # output of no task makes no lines
        name, task_id = self._over.get(source.execution_id, (_UNKNOWN, source.execution_id))
        return name, task_id, source.pid


def _write(output: Output) -> None:
    data = output.data.encode("utf-8", "backslashreplace")
    try:
        while data:
            data = data[os.write(_DESCRIPTORS[output.stream], data) :]
    except OSError as fault:
        log.debug("a task's output could not be written: %s", reason_of(fault))


def _size(output: Output | Gap | None) -> int:
    """The size of an item that waits. The end of a task has none, since it is never dropped."""
    if output is None:
        return 0
    return _OVERHEAD + (len(output.data) if isinstance(output, Output) else 0)


def _bytes(output: Output | Gap) -> int:
    return utf8_size(output.data) if isinstance(output, Output) else output.lost_bytes
