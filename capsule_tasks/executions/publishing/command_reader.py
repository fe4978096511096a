"""Reads the commands that one execution was sent, each once and in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.protocol.events import Command, decode_command
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import Told

log = logging.getLogger("capsule_tasks.taskpool")


class CommandReader:
    """Reads when the execution's bell rang; a reply to a claim brings commands, too."""

    def __init__(
        self,
        execution_id: str,
        store: ExecutionStore,
        background: BackgroundTasks,
        on_command: Callable[[Command], object],
    ) -> None:
        self._execution_id = execution_id
        self._store = store
        self._background = background
        self._on_command = on_command
        self._last_id = ""
        self._is_ringing: bool | None = None
        """None while nothing is being read; else whether the bell rang since."""

    def take(self, entries: Iterable[Told]) -> None:
        """Hand on the commands that are new."""
        for entry in entries:
            if _is_after(entry.id, self._last_id):
                self._last_id = entry.id
                command = decode_command(entry.data)
                if command is None:
                    log.warning("task %s was sent an unknown command", self._execution_id)
                else:
                    self._on_command(command)

    def read(self, is_wanted: Callable[[], bool]) -> None:
        """Read what is new, for as long as the bell rings."""
        is_reading = self._is_ringing is not None
        self._is_ringing = True
        if not is_reading:
            self._background.spawn(self._read(is_wanted))

    async def _read(self, is_wanted: Callable[[], bool]) -> None:
        try:
            while self._is_ringing and is_wanted():
                self._is_ringing = False
                ask = partial(self._store.told, self._execution_id, self._last_id)
                self.take(await self._background.call_until_answered(ask))
        finally:
            self._is_ringing = None


def _is_after(entry_id: str, last_id: str) -> bool:
    return not last_id or _parts(entry_id) > _parts(last_id)


def _parts(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
