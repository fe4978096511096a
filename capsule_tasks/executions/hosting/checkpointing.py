"""Checkpoints of one named session: from its child into the store, and back into a new child.

A namespace may be hundreds of megabytes large. While a session is saved, its bytes are in the
worker's main process from the first piece that the child sends until they are stored; while it is
restored, from the store to the child. A session holds a turn for as long as that, so the bytes are
bounded by the number of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from capsule_tasks.errors import (
    CapsuleError,
    OperatorError,
    SnapshotError,
    StorageError,
    reason_of,
)
from capsule_tasks.protocol.calls import CheckpointMade
from capsule_tasks.protocol.events import SessionRestored
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions.session import Session
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest, CheckpointStore

if TYPE_CHECKING:
    from capsule_tasks.executions.background import BackgroundTasks

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

_LIMIT_S = 120.0
"""How long the child may take to save or to restore a namespace."""
_MAX_NAMES = 200
"""Names that a notice lists."""
SAVES_AT_ONCE = 3
RESTORES_AT_ONCE = 3
SAVE_S = 10.0
"""How long a child may take to hand over its namespace while other sessions wait to be saved."""
STOPPING_SAVE_S = 2.0
"""The same in a worker that stops, which has some seconds for all its sessions."""


class Turn:
    """One of a number of turns, from `begin` to the first `end`."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._is_held = False

    async def begin(self) -> None:
        """Wait for a turn; those that wait get one in order."""
        await self._free.acquire()
        self._is_held = True

    def end(self) -> None:
        """Let the next one begin; safe at any time."""
        if self._is_held:
            self._is_held = False
            self._free.release()


class SaveTurns:
    """Turns to save sessions.

    A child may be slow, maybe on purpose. So that this keeps no other session from being saved, a
    save fails that takes longer than `save_s` to reach this process while other sessions wait.
    """

    def __init__(self, at_once: int, save_s: float) -> None:
        self.save_s = save_s
        self._free = asyncio.Semaphore(at_once)
        self._waiting = 0
        self._arriving: set[SaveTurn] = set()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[SaveTurn]:
        """Wait for a turn, which lasts as long as the block."""
        turn = Turn(self._free)
        self._waiting += 1
        try:
            self.limit_saves()
            await turn.begin()
        finally:
            self._waiting -= 1
        try:
            yield SaveTurn(self, self._arriving)
        finally:
            turn.end()

    def hurry(self, save_s: float) -> None:
        """Have every save, also those that have begun, take less time."""
        self.save_s = save_s
        self.limit_saves()

    def limit_saves(self) -> None:
        """Have the saves that take too long fail, if others wait."""
        if self._waiting > 0 and self._free.locked():
            for turn in self._arriving:
                turn.limit(self.save_s)


class SaveTurn:
    """The turn of one session."""

    def __init__(self, turns: SaveTurns, arriving: set[SaveTurn]) -> None:
        self._turns = turns
        self._arriving = arriving
        self._began_at = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout(None)

    async def arrival(self, save: Awaitable[T]) -> T:
        """The namespace, once it is here; SnapshotError if that takes too long."""
        try:
            async with self._timeout:
                self._arriving.add(self)
                self._turns.limit_saves()
                return await save
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise SnapshotError(
                f"the child did not hand over its namespace within {self._turns.save_s:g} s, and "
                "other sessions wait to be saved"
            ) from None
        finally:
            self._arriving.discard(self)

    def limit(self, save_s: float) -> None:
        """Have the save fail once it has taken so long."""
        if not self._timeout.expired():
            self._timeout.reschedule(self._began_at + save_s)


class Checkpoints:
    """The latest checkpoint of one session, as its owner sees it."""

    def __init__(
        self,
        session_id: str,
        store: CheckpointStore,
        background: BackgroundTasks,
        restores: asyncio.Semaphore,
    ) -> None:
        """`restores` are shared by the sessions of a worker."""
        self._session_id = session_id
        self._store = store
        self._background = background
        self._restores = restores

    async def write(
        self, token: int, namespace: SavedNamespace, executions: int, operation_id: str
    ) -> CheckpointManifest:
        """Make it the session's checkpoint; `executions` are done by now."""
        manifest = await self._store.write(
            *(self._session_id, token, namespace),
            executions=executions,
            operation_id=operation_id,
        )
        log.info(
            "session %r has a checkpoint of %d bytes; %d names were skipped",
            *(self._session_id, manifest.size, manifest.skipped_count),
        )
        return manifest

    async def delete(self, token: int) -> None:
        """Remove the checkpoint: the next child has an empty namespace."""
        await self._store.delete(self._session_id, token)

    async def restore(
        self, session: Session, executions: int, before_restart: int
    ) -> SessionRestored | None:
        """Give a new child the namespace of the checkpoint; what to tell the next call.

        `executions` of the session are done; of those, `before_restart` before one. None for a
        session that has never run a call. Raises SnapshotError, CheckpointUnreadable.
        """
        manifest = await self._background.call_until_answered(self._find)
        if manifest is None:
            lost_calls = executions - before_restart
            return SessionRestored(lost_calls=lost_calls) if lost_calls else None
        lost, differences = await self._restore(session, manifest)
        return SessionRestored(
            saved_at=manifest.at,
            lost_calls=max(0, executions - manifest.executions),
            lost=tuple(sorted({*manifest.skipped, *lost}))[:_MAX_NAMES],
            differences=differences[:_MAX_NAMES],
        )

    async def _restore(
        self, session: Session, manifest: CheckpointManifest
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that did not come back, and the versions that differ.

        The turn ends once the child has all bytes: how long code of the checkpoint then runs in
        the child holds up no other session.
        """
        turn = Turn(self._restores)
        await turn.begin()
        try:
            pieces = await self._background.call_until_answered(lambda: self._read(manifest))

            def on_sent() -> None:
                pieces.clear()
                turn.end()

            return await restore_namespace(session, pieces, on_sent)
        finally:
            turn.end()

    async def _find(self) -> CheckpointManifest | None:
        return await self._store.find(self._session_id)

    async def _read(self, manifest: CheckpointManifest) -> list[bytes]:
        return await self._store.read(self._session_id, manifest)


async def save_namespace(session: Session, max_bytes: int) -> SavedNamespace:
    """The namespace of a child that runs no code; SnapshotError if it cannot be saved."""
    return await session.checkpoint(_LIMIT_S, max_bytes=max_bytes)


async def restore_namespace(
    session: Session, pieces: list[bytes], on_sent: Callable[[], object]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that did not come back, and the versions that differ."""
    restored = await session.restore(pieces, timeout_s=_LIMIT_S, on_sent=on_sent)
    differences = (f"{name} {versions}" for name, versions in restored.differences.items())
    return tuple(restored.lost), tuple(differences)


def why_not_saved(fault: BaseException) -> str | None:
    """The reason of a checkpoint that failed; None for a fault that is none of it."""
    is_repeated = isinstance(fault, StorageError) and not isinstance(fault, OperatorError)
    if isinstance(fault, CapsuleError | TimeoutError) and not is_repeated:
        return reason_of(fault)
    return None


def checkpoint_made(manifest: CheckpointManifest) -> CheckpointMade:
    """The reply to a request for a checkpoint."""
    return CheckpointMade(
        at=manifest.at,
        size=manifest.size,
        saved=manifest.saved,
        skipped=manifest.skipped,
    )


def with_lost_call(restored: SessionRestored | None) -> SessionRestored:
    """A call of the owner before may have run: what it changed is not in this namespace."""
    restored = restored or SessionRestored()
    return msgspec.structs.replace(restored, lost_calls=restored.lost_calls + 1)
