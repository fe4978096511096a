"""Reads the commands that one execution was sent, each once and in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.protocol.events import decode_command
from capsule_tasks.storage.executions.types import CommandEntry

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter

log = logging.getLogger("capsule_tasks.taskpool")


class CommandReader:
    """Reads when the execution's doorbell rang; the reply to a claim brings commands, too."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._last_id = ""
        self._is_ringing: bool | None = None
        """None while nothing is being read; else whether the doorbell rang since."""

    def take(self, entries: Iterable[CommandEntry]) -> None:
        """Hand on the commands that are new."""
        for entry in entries:
            if _is_after(entry.id, self._last_id):
                self._last_id = entry.id
                command = decode_command(entry.data)
                if command is None:
                    log.warning("task %s was sent an unknown command", self._writer)
                else:
                    self._writer.feed(Lifecycle.on_command_received, command)

    def read(self) -> None:
        """Read new commands until the doorbell is quiet."""
        is_reading = self._is_ringing is not None
        self._is_ringing = True
        if not is_reading:
            self._writer.publisher.background.spawn(self._read())

    async def _read(self) -> None:
        publisher, execution_id = self._writer.publisher, self._writer.execution_id
        try:
            while self._is_ringing and self._writer.takes_commands:
                self._is_ringing = False
                read = partial(publisher.store.read_commands, execution_id, self._last_id)
                self.take(await publisher.background.call_until_answered(read))
        finally:
            self._is_ringing = None


def _is_after(entry_id: str, last_id: str) -> bool:
    return not last_id or _parts(entry_id) > _parts(last_id)


def _parts(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
