"""Checkpoints in a directory or in an object store: any URL that fsspec knows (extra `blobs`)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from capsule_tasks.errors import BlobsUnavailable, CheckpointUnreadable, InvalidSetting
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.facades import AsyncTarget
from capsule_tasks.storage.sessions.checkpoints import (
    CHUNK_BYTES,
    CheckpointManifest,
    CheckpointStore,
)

IN_REDIS = "redis"
_LOCAL = frozenset({"file", "local"})
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols without folders; to make one would make a bucket whose name was mistyped."""

T = TypeVar("T")


def checkpoint_store(
    redis: AsyncTarget,
    where: str = IN_REDIS,
    *,
    settings: NamedSessionSettings | None = None,
) -> CheckpointStore:
    """The store of checkpoints that an app's setting `capsule_checkpoints` asks for."""
    settings = settings or NamedSessionSettings()
    check_place("capsule_checkpoints", where)
    place = None if where == IN_REDIS else BlobChunks(where, settings.prefix)
    return CheckpointStore(redis, settings=settings, place=place)


def check_place(name: str, where: Any) -> None:
    """Refuse a place of checkpoints that is neither Redis nor a URL that fsspec can open."""
    if where == IN_REDIS:
        return
    must = "'redis', or a URL such as file:///var/checkpoints or s3://bucket/checkpoints"
    if not isinstance(where, str) or "://" not in where:
        raise InvalidSetting(name, where, must)
    protocol, _, path = where.partition("://")
    try:
        import fsspec  # noqa: PLC0415 - an extra, and not needed for Redis
    except ImportError:
        must = "'redis', unless fsspec is installed: pip install 'capsule-tasks[blobs]'"
        raise InvalidSetting(name, where, must) from None
    if protocol not in fsspec.available_protocols():
        must += f"; fsspec does not know the protocol {protocol!r}"
        raise InvalidSetting(name, where, must)
    if protocol in _LOCAL and not path.startswith("/"):
        raise InvalidSetting(name, where, "an absolute path, such as file:///var/checkpoints")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as missing:
        must = f"a URL whose protocol has its package installed: {missing}"
        raise InvalidSetting(name, where, must) from None


class BlobChunks:
    """One file for each generation, in a directory for each session.

    The name of the directory is a hash: ids of sessions can be longer than names of files. Files
    have no time to live. A writer removes older generations once its own is the checkpoint; what
    belongs to sessions that are never used again is removed by whoever forgets them, or by a rule
    of the object store.
    """

    def __init__(self, url: str, prefix: str) -> None:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra

        self.name = url.partition("://")[0]
        self._prefix = prefix
        self._files, self._root = url_to_fs(url)

    def folder_of(self, session_id: str) -> str:
        digest = hashlib.sha256(f"{self._prefix}\0{session_id}".encode()).hexdigest()
        return f"{self._root.rstrip('/')}/{digest}"

    async def put(self, session_id: str, generation: str, chunks: Sequence[bytes]) -> None:
        await self._do(self._write, self.folder_of(session_id), generation, chunks)

    async def get(self, session_id: str, manifest: CheckpointManifest) -> list[bytes]:
        path = f"{self.folder_of(session_id)}/{manifest.generation}"
        chunks = await self._do(self._read, path, manifest.size)
        if chunks is None:
            raise CheckpointUnreadable(session_id, f"there is no {self.name} object {path!r}")
        return chunks

    async def tidy(self, session_id: str, generation: str, previous: str) -> None:
        await self._do(self._tidy, self.folder_of(session_id), generation, previous)

    async def drop(self, session_id: str, generation: str) -> None:
        await self._do(self._files.rm_file, f"{self.folder_of(session_id)}/{generation}")

    async def clear(self, session_id: str, token: int) -> None:
        await self._do(self._clear, self.folder_of(session_id), token)

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.to_thread(work, *args)
        except Exception as fault:  # each kind of store has errors of its own
            reason = f"{type(fault).__name__}: {fault}"
            raise BlobsUnavailable(f"checkpoints in {self.name}: {reason}") from fault

    def _write(self, folder: str, generation: str, chunks: Sequence[bytes]) -> None:
        if self.name not in _OBJECT_STORES:
            self._files.makedirs(folder, exist_ok=True)
        is_local = self.name in _LOCAL
        if is_local:
            Path(folder).chmod(0o700)
        with self._files.open(f"{folder}/{generation}", "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            if is_local:  # the checkpoint before is removed once this one is named
                file.flush()
                os.fsync(file.fileno())
        if is_local:
            _sync_directory(folder)

    def _read(self, path: str, size: int) -> list[bytes] | None:
        chunks: list[bytes] = []
        try:
            with self._files.open(path, "rb") as file:
                while size > 0 and (chunk := file.read(min(CHUNK_BYTES, size))):
                    chunks.append(chunk)
                    size -= len(chunk)
        except FileNotFoundError:
            return None
        return chunks

    def _tidy(self, folder: str, generation: str, previous: str) -> None:
        self._files.invalidate_cache(folder)
        for path in self._files.ls(folder, detail=False):
            name = path.rpartition("/")[2]
            # Not what this owner, or a later one, may be writing at this moment.
            if name == previous or _token_of(name) < _token_of(generation):
                self._files.rm_file(path)

    def _clear(self, folder: str, token: int) -> None:
        self._files.invalidate_cache(folder)
        if not self._files.exists(folder):
            return
        if token == 0:
            self._files.rm(folder, recursive=True)
            return
        for path in self._files.ls(folder, detail=False):
            if _token_of(path.rpartition("/")[2]) <= token:
                self._files.rm_file(path)
        if self.name in _LOCAL:
            with contextlib.suppress(OSError):  # a later owner's checkpoint is there
                self._files.rmdir(folder)


def _sync_directory(path: str) -> None:
    """Write the names of a directory's files to disk, as `fsync` of a file writes its bytes."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _token_of(generation: str) -> int:
    return int(generation.partition("-")[0])
