"""Checkpoints of one named session: from its child into the store, and back into a new child."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from capsule_tasks.errors import CapsuleError, OperatorError, StorageError, reason_of
from capsule_tasks.protocol.calls import CheckpointMade
from capsule_tasks.protocol.events import SessionRestored
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions.session import Session
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest, CheckpointStore

if TYPE_CHECKING:
    from capsule_tasks.executions.background import BackgroundTasks

log = logging.getLogger("capsule_tasks.taskpool")

_LIMIT_S = 120.0
"""How long the child may take to save or to restore a namespace."""
_MAX_NAMES = 200
"""Names that a notice lists."""
SAVES_AT_ONCE = 3
"""Each namespace that is being saved is in the worker's memory until it is stored."""
TURN_S = 2.0
"""How long a child may take to hand over its namespace until another session may begin."""


class SaveTurns:
    """Lets few sessions of a worker be saved at the same time."""

    def __init__(self, at_once: int, turn_s: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._turn_s = turn_s

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[SaveTurn]:
        """Wait for a turn; it ends with the block, or is passed on before."""
        await self._free.acquire()
        turn = SaveTurn(self._free, self._turn_s)
        try:
            yield turn
        finally:
            turn.end()


class SaveTurn:
    """The turn of one session. Until `keep` it is passed on after its time.

    So children that are slow, maybe on purpose, do not keep other sessions from being saved;
    namespaces that wait for the store do, since they take memory.
    """

    def __init__(self, free: asyncio.Semaphore, turn_s: float) -> None:
        self._free = free
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(turn_s, self.end)

    def keep(self) -> None:
        """The namespace is here: do not pass the turn on."""
        self._timer.cancel()

    def end(self) -> None:
        """Give the turn to the next session, once."""
        self._timer.cancel()
        if not self._is_over:
            self._is_over = True
            self._free.release()


class Checkpoints:
    """The latest checkpoint of one session, as its owner sees it."""

    def __init__(
        self, session_id: str, store: CheckpointStore, background: BackgroundTasks
    ) -> None:
        self._session_id = session_id
        self._store = store
        self._background = background

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
        pieces = await self._background.call_until_answered(lambda: self._read(manifest))
        lost, differences = await restore_namespace(session, pieces)
        return SessionRestored(
            saved_at=manifest.at,
            lost_calls=max(0, executions - manifest.executions),
            lost=tuple(sorted({*manifest.skipped, *lost}))[:_MAX_NAMES],
            differences=differences[:_MAX_NAMES],
        )

    async def _find(self) -> CheckpointManifest | None:
        return await self._store.find(self._session_id)

    async def _read(self, manifest: CheckpointManifest) -> list[bytes]:
        return await self._store.read(self._session_id, manifest)


async def save_namespace(session: Session, max_bytes: int) -> SavedNamespace:
    """The namespace of a child that runs no code; SnapshotError if it cannot be saved."""
    return await session.checkpoint(_LIMIT_S, max_bytes=max_bytes)


async def restore_namespace(
    session: Session, pieces: list[bytes]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that did not come back, and the versions that differ."""
    restored = await session.restore(pieces, timeout_s=_LIMIT_S)
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
