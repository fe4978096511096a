"""Checkpoints of named sessions: chunks in one of two places, and a manifest in Redis.

The chunks of a new checkpoint go under a generation of their own. Then one script, under the token
of the session's owner, makes the manifest in the session's record name that generation. So a writer
that dies leaves the previous checkpoint as it was, and an owner that has lost the session cannot
replace what the next owner wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from capsule_tasks.errors import (
    BlobsUnavailable,
    CheckpointUnreadable,
    OperatorError,
    SessionOwnerLost,
    StorageError,
)
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.settings import MIB, NamedSessionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget
from capsule_tasks.storage.keys import NamedSessionKeys
from capsule_tasks.storage.operations import Reply, call_script, new_operation, refused
from capsule_tasks.storage.scripts import Call, Code, script

log = logging.getLogger("capsule_tasks.storage")

CHUNK_BYTES = MIB
STAGED_TTL_MS = 600_000
"""From the last chunk that was staged: after that a checkpoint nobody finished is forgotten."""
MAX_LISTED_BYTES = 64 * 1024
"""Entries of each list in a manifest: a child may send any number of names and versions."""


@script("sessions/checkpoint_find")
def checkpoint_find(keys: NamedSessionKeys, *, token: int) -> None: ...


@script("sessions/checkpoint_stage")
def checkpoint_stage(staged: str, *, index: int, ttl_ms: int, chunk: bytes) -> None: ...


@script("sessions/checkpoint_unstage")
def checkpoint_unstage(keys: NamedSessionKeys, staged: str, *, generation: str) -> None: ...


@script("sessions/checkpoint_switch")
def checkpoint_switch(
    keys: NamedSessionKeys,
    staged: str,
    previous: str,
    *,
    token: int,
    chunks: int,
    manifest: bytes,
    ttl_ms: int,
) -> None: ...


@script("sessions/checkpoint_read")
def checkpoint_read(staged: str, *, index: int, ttl_ms: int) -> None: ...


@script("sessions/checkpoint_drop")
def checkpoint_drop(keys: NamedSessionKeys, staged: str, *, token: int, stored: bytes) -> None: ...


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A description of a checkpoint, without its data; lists the first names if there are many."""

    generation: str
    place: str
    """Where the chunks are: `redis`, or the protocol of a URL."""
    size: int
    """Bytes of all chunks together."""
    executions: int = 0
    """Calls of the session that were done when the checkpoint was made."""
    chunks: int
    sha256: bytes
    """The hash of all chunks, one after the other."""
    saved: tuple[str, ...] = ()
    saved_count: int = 0
    skipped: dict[str, str] = {}
    skipped_count: int = 0
    python: str = ""
    packages: dict[str, str] = {}
    at_us: int = 0
    """When it became the checkpoint, in microseconds of Redis's clock."""

    @property
    def at(self) -> float:
        """When it became the checkpoint, in seconds of Redis's clock."""
        return self.at_us / 1e6

    @classmethod
    def unpacked(cls, stored: bytes) -> CheckpointManifest:
        """The manifest that the record of a session holds, behind the time and a space."""
        at_us, _, packed = stored.partition(b" ")
        return msgspec.structs.replace(_decode(packed), at_us=int(at_us))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CheckpointManifest).decode


class ChunkPlace(Protocol):
    """Where the chunks of checkpoints are kept; each generation is written once."""

    @property
    def name(self) -> str: ...

    async def put(self, session_id: str, generation: str, chunks: Sequence[bytes]) -> None:
        """Store the chunks of a generation that no manifest names yet."""

    async def get(self, session_id: str, manifest: CheckpointManifest) -> list[bytes]:
        """The chunks of a generation; CheckpointUnreadable if they are not there."""
        ...

    async def tidy(self, session_id: str, generation: str, previous: str) -> None:
        """Remove the previous generation, and all that owners before that of this one wrote."""

    async def drop(self, session_id: str, generation: str) -> None:
        """Remove a generation that no manifest will ever name."""

    async def clear(self, session_id: str, token: int) -> None:
        """Remove what owners up to this token wrote; 0 for all generations of a session."""


class CheckpointStore(AsyncFacade):
    """The latest checkpoint of each named session. Every call can be repeated."""

    def __init__(
        self,
        redis: AsyncTarget,
        *,
        settings: NamedSessionSettings | None = None,
        place: ChunkPlace | None = None,
    ) -> None:
        super().__init__(redis)
        self.settings = settings or NamedSessionSettings()
        self._retry = self.settings.retry
        self._ttl_ms = int(self.settings.ttl_s * 1000)
        self._in_redis = RedisChunks(self)
        self._place: ChunkPlace = place or self._in_redis

    def keys_of(self, session_id: str) -> NamedSessionKeys:
        return NamedSessionKeys(session_id, self.settings.prefix)

    async def call(self, call: Call) -> Reply:
        return await drive(call_script(call, self._retry), self.store)

    async def write(
        self,
        session_id: str,
        token: int,
        namespace: SavedNamespace,
        *,
        executions: int = 0,
        operation_id: str | None = None,
    ) -> CheckpointManifest:
        """Make this the checkpoint of a session, whose owner has this token.

        `executions` of the session are done by now. After StorageUnavailable a call under the same
        `operation_id` goes on with the chunks that are stored already.

        Raises SessionOwnerLost if the session has another owner now. The checkpoint before stays
        as it was until this one is stored as a whole, and is removed then. If Redis, or the place
        of the chunks, refuses to store this one, the chunks that it has are removed.
        """
        generation = f"{token}-{operation_id or new_operation()}"
        previous = await self._find(session_id, token)
        if previous is not None and previous.generation == generation:
            return previous  # the reply to the call before was lost
        try:
            return await self._write(session_id, token, generation, previous, namespace, executions)
        except (OperatorError, BlobsUnavailable):
            await self._drop(session_id, generation)
            raise

    async def _write(
        self,
        session_id: str,
        token: int,
        generation: str,
        previous: CheckpointManifest | None,
        namespace: SavedNamespace,
        executions: int,
    ) -> CheckpointManifest:
        keys = self.keys_of(session_id)
        chunks = list(_chunks(namespace.pieces))
        digest = await asyncio.to_thread(_digest, chunks)
        await self._place.put(session_id, generation, chunks)
        manifest = CheckpointManifest(
            generation=generation,
            place=self._place.name,
            size=namespace.size,
            executions=executions,
            chunks=len(chunks),
            sha256=digest,
            saved=tuple(_within(namespace.saved)),
            saved_count=len(namespace.saved),
            skipped=_dict_within(namespace.skipped),
            skipped_count=len(namespace.skipped),
            python=namespace.python[:100],
            packages=_dict_within(namespace.packages),
        )
        reply = await self.call(
            checkpoint_switch.call(
                keys,
                keys.checkpoint(generation),
                keys.checkpoint(previous.generation if previous else generation),
                token=token,
                chunks=len(chunks) if self._place is self._in_redis else 0,
                manifest=_encode(manifest),
                ttl_ms=self._ttl_ms,
            )
        )
        match reply[0]:
            case Code.DONE:
                await self._tidy(session_id, generation, previous)
                return CheckpointManifest.unpacked(reply[1])
            case Code.STALE:
                await self._drop(session_id, generation)
                raise SessionOwnerLost(session_id, reply[1].decode())
            case Code.LOST:
                reason = f"{reply[1]} of its {len(chunks)} chunks are left in Redis"
                raise CheckpointUnreadable(session_id, reason)
        raise refused(reply, "checkpoint_switch")

    async def _drop(self, session_id: str, generation: str) -> None:
        """Remove chunks that no manifest will name; chunks that stay expire, or are tidied."""
        with contextlib.suppress(BlobsUnavailable, StorageError):
            await self._place.drop(session_id, generation)

    async def _tidy(
        self, session_id: str, generation: str, previous: CheckpointManifest | None
    ) -> None:
        try:
            before = previous.generation if previous is not None else ""
            await self._place.tidy(session_id, generation, before)
        except BlobsUnavailable as fault:  # the checkpoint is stored: the next writer tidies
            log.warning("older checkpoints of session %s remain: %s", session_id, fault)

    async def find(self, session_id: str) -> CheckpointManifest | None:
        """The manifest of a session's checkpoint; None if it has no checkpoint."""
        return await self._find(session_id, 0)

    async def read(self, session_id: str, manifest: CheckpointManifest) -> list[bytes]:
        """The pieces of a checkpoint, for a child to restore; its time to live begins again.

        Raises CheckpointUnreadable if data is missing, or is not what was written.
        """
        place = self._in_redis if manifest.place == self._in_redis.name else self._place
        if manifest.place != place.name:
            reason = f"its data is kept in {manifest.place!r}, not in {place.name!r}"
            raise CheckpointUnreadable(session_id, reason)
        chunks = await place.get(session_id, manifest)
        if await asyncio.to_thread(_digest, chunks) != manifest.sha256:
            raise CheckpointUnreadable(session_id, "its data is not what was written")
        return chunks

    async def delete(self, session_id: str, token: int = 0) -> None:
        """Remove the checkpoint of a session, and what writers that died have left of others.

        `token` is that of the session's latest owner, who need not own it any more. What a later
        owner has stays, and SessionOwnerLost is raised if the checkpoint is among that. Without a
        token everything is removed, whoever owns the session.
        """
        while stored := await self._find_stored(session_id, 0):
            keys = self.keys_of(session_id)
            staged = keys.checkpoint(CheckpointManifest.unpacked(stored).generation)
            drop = checkpoint_drop.call(keys, staged, token=token, stored=stored)
            reply = await self.call(drop)
            if reply[0] == Code.STALE:
                raise SessionOwnerLost(session_id, reply[1].decode())
            if reply[0] == Code.DONE:
                break
        await self._place.clear(session_id, token)

    async def _find(self, session_id: str, token: int) -> CheckpointManifest | None:
        stored = await self._find_stored(session_id, token)
        return CheckpointManifest.unpacked(stored) if stored else None

    async def _find_stored(self, session_id: str, token: int) -> bytes:
        reply = await self.call(checkpoint_find.call(self.keys_of(session_id), token=token))
        if reply[0] == Code.STALE:
            raise SessionOwnerLost(session_id, reply[1].decode())
        stored: bytes = reply[1]
        return stored


class RedisChunks:
    """Chunks in lists of Redis, beside the record of their session.

    What a writer that died has left expires, and the script that switches the manifest removes
    the generation before: there is nothing to tidy.
    """

    name = "redis"

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._ttl_ms = int(store.settings.ttl_s * 1000)

    async def put(self, session_id: str, generation: str, chunks: Sequence[bytes]) -> None:
        staged = self._store.keys_of(session_id).checkpoint(generation)
        for index, chunk in enumerate(chunks):
            call = checkpoint_stage.call(staged, index=index, ttl_ms=STAGED_TTL_MS, chunk=chunk)
            reply = await self._store.call(call)
            if reply[0] != Code.DONE:
                reason = f"{reply[1]} of the {index} chunks before are left in Redis"
                raise CheckpointUnreadable(session_id, reason)

    async def get(self, session_id: str, manifest: CheckpointManifest) -> list[bytes]:
        staged = self._store.keys_of(session_id).checkpoint(manifest.generation)
        chunks: list[bytes] = []
        for index in range(manifest.chunks):
            call = checkpoint_read.call(staged, index=index, ttl_ms=self._ttl_ms)
            reply = await self._store.call(call)
            if reply[0] != Code.DONE:
                reason = f"chunk {index} of {manifest.chunks} is not in Redis"
                raise CheckpointUnreadable(session_id, reason)
            chunks.append(reply[1])
        return chunks

    async def tidy(self, session_id: str, generation: str, previous: str) -> None:
        pass

    async def drop(self, session_id: str, generation: str) -> None:
        keys = self._store.keys_of(session_id)
        staged = keys.checkpoint(generation)
        await self._store.call(checkpoint_unstage.call(keys, staged, generation=generation))

    async def clear(self, session_id: str, token: int) -> None:
        pass


def _chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            # A piece of one chunk is not copied.
            yield piece[start : start + CHUNK_BYTES]


def _digest(chunks: Iterable[bytes]) -> bytes:
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.digest()


def _within(texts: Iterable[str]) -> Iterator[str]:
    """The first texts, up to the bound of a list in a manifest."""
    size = 0
    for text in texts:
        size += len(text.encode())
        if size > MAX_LISTED_BYTES:
            return
        yield text


def _dict_within(texts: dict[str, str]) -> dict[str, str]:
    count = sum(1 for _ in _within(f"{name}{text}" for name, text in texts.items()))
    return dict(list(texts.items())[:count])
