"""Checkpoints, in Redis and behind URLs: the latest whole one is what is read."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from capsule_tasks.errors import (
    BlobsUnavailable,
    CheckpointUnreadable,
    InvalidSetting,
    SessionOwnerLost,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.storage.sessions import checkpoints
from capsule_tasks.storage.sessions.blobs import BlobChunks, check_place, checkpoint_store
from capsule_tasks.storage.sessions.checkpoints import (
    CHUNK_BYTES,
    CheckpointManifest,
    CheckpointStore,
)
from tests.contract.storage.history.subjects import raw_client
from tests.contract.storage.sessions.subjects import Subject
from tests.servers import fresh_prefix

ROOT = Path(__file__).parents[4]
VICTIM = "tests.contract.storage.sessions.checkpoint_victim"
SMALL = SavedNamespace(
    pieces=(b"one", b"two"),
    saved=("a", "b"),
    skipped={"lock": "TypeError: cannot pickle"},
    python="3.11.7",
    packages={"numpy": "2.1"},
)
PLACES = {
    "redis62": ("redis62_url", "redis"),
    "valkey": ("valkey_url", "redis"),
    "cluster": ("cluster_url", "redis"),
    "file": ("valkey_url", "file"),
    "memory": ("valkey_url", "memory"),
}
"""Where the manifests are, and the chunks."""


@dataclass
class Place:
    """One place of checkpoints, with a session that a worker holds."""

    store: CheckpointStore
    where: str
    subject: Subject
    redis_url: str
    token: int = 0

    async def take(self, worker: str) -> int:
        """Give the session to another worker; the token of that."""
        await self.subject.worker(worker)
        self.token = (await self.subject.take(worker)).token
        return self.token

    async def lose(self, worker: str) -> None:
        await self.subject.kill(worker)

    @property
    def keys(self) -> set[str]:
        """The lists of chunks in Redis, or the files."""
        place: Any = self.store._place
        if isinstance(place, BlobChunks):
            folder = place.folder_of("s")
            found = place._files.ls(folder, detail=False) if place._files.exists(folder) else []
            return {path.rpartition("/")[2] for path in found}
        with raw_client(self.redis_url) as client:
            pattern = f"{self.subject.prefix}:*:checkpoint:*"
            return {key.decode().rpartition(":")[2] for key in client.scan_iter(match=pattern)}


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    server, kind = PLACES[request.param]
    url, prefix = request.getfixturevalue(server), fresh_prefix()
    urls = {
        "redis": "redis",
        "file": f"file://{tmp_path}/blobs",
        "memory": f"memory://{prefix.replace(':', '-')}",
    }
    async with AsyncRedis(url) as connections:
        settings = NamedSessionSettings(prefix=prefix)
        store = checkpoint_store(connections, urls[kind], settings=settings)
        made = Place(store, urls[kind], Subject(connections, prefix), url)
        await made.take("w1")
        yield made


class AsyncRedis:
    """Connections that are closed with a block."""

    def __init__(self, url: str) -> None:
        self.connections = AsyncConnections(url)

    async def __aenter__(self) -> AsyncConnections:
        return self.connections

    async def __aexit__(self, *_: object) -> None:
        await self.connections.close()


async def test_a_checkpoint_is_read_as_it_was_written(place: Place) -> None:
    manifest = await place.store.write("s", place.token, SMALL)
    assert (manifest.size, manifest.saved, manifest.saved_count) == (6, ("a", "b"), 2)
    assert (manifest.skipped, manifest.skipped_count) == (SMALL.skipped, 1)
    assert (manifest.python, manifest.packages) == ("3.11.7", {"numpy": "2.1"})
    assert manifest.at > 1e9
    assert await place.store.find("s") == manifest
    assert b"".join(await place.store.read("s", manifest)) == b"onetwo"


async def test_the_owner_gets_the_manifest_when_it_takes_the_session(place: Place) -> None:
    manifest = await place.store.write("s", place.token, SMALL)
    await place.lose("w1")
    await place.subject.worker("w2")
    taken = await place.subject.take("w2")
    assert taken.checkpoint is not None
    assert CheckpointManifest.unpacked(taken.checkpoint) == manifest
    info = await place.subject.sessions().info("s")
    assert taken.checkpoint is not None
    assert info.checkpoint == CheckpointManifest.unpacked(taken.checkpoint)


async def test_an_empty_checkpoint_is_one(place: Place) -> None:
    manifest = await place.store.write("s", place.token, SavedNamespace(pieces=()))
    assert (manifest.size, await place.store.read("s", manifest)) == (0, [])


async def test_a_session_without_a_checkpoint_has_none(place: Place) -> None:
    assert await place.store.find("s") is None
    assert await place.store.find("never used") is None
    await place.store.delete("s")
    await place.store.delete("never used")


async def test_large_pieces_are_stored_in_bounded_chunks(place: Place) -> None:
    pieces = (b"x" * (2 * CHUNK_BYTES + 5), b"", b"y" * 3)
    manifest = await place.store.write("s", place.token, SavedNamespace(pieces=pieces))
    read = await place.store.read("s", manifest)
    assert b"".join(read) == b"".join(pieces)
    assert max(map(len, read)) <= CHUNK_BYTES


async def test_the_previous_checkpoint_is_removed_once_another_is_stored(place: Place) -> None:
    await place.store.write("s", place.token, SMALL)
    second = await place.store.write("s", place.token, SavedNamespace(pieces=(b"2",)))
    assert place.keys == {second.generation}
    assert await place.store.read("s", second) == [b"2"]


async def test_an_owner_that_has_lost_the_session_replaces_nothing(place: Place) -> None:
    stale = place.token
    manifest = await place.store.write("s", stale, SMALL)
    await place.lose("w1")
    await place.take("w2")
    with pytest.raises(SessionOwnerLost) as lost:
        await place.store.write("s", stale, SavedNamespace(pieces=(b"stale",)))
    assert lost.value.owner == "w2"
    assert await place.store.find("s") == manifest
    assert place.keys == {manifest.generation}


async def test_an_owner_that_loses_the_session_while_it_writes_replaces_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = place.token
    manifest = await place.store.write("s", stale, SMALL)
    put = place.store._place.put

    async def put_and_lose(*args: Any) -> None:
        await put(*args)
        await place.lose("w1")
        await place.take("w2")

    monkeypatch.setattr(place.store._place, "put", put_and_lose)
    with pytest.raises(SessionOwnerLost):
        await place.store.write("s", stale, SavedNamespace(pieces=(b"stale",)))
    monkeypatch.undo()
    assert await place.store.find("s") == manifest
    assert b"".join(await place.store.read("s", manifest)) == b"onetwo"
    if place.where != "redis":  # there, what is left over expires
        assert place.keys == {manifest.generation}


@pytest.mark.parametrize("fault", [StorageFull("Redis: OOM"), BlobsUnavailable("no space")])
async def test_a_checkpoint_that_is_refused_leaves_nothing_but_the_one_before(
    place: Place, monkeypatch: pytest.MonkeyPatch, fault: StorageError | BlobsUnavailable
) -> None:
    manifest = await place.store.write("s", place.token, SMALL)
    put = place.store._place.put

    async def put_and_fail(*args: Any) -> None:
        await put(*args)
        raise fault

    monkeypatch.setattr(place.store._place, "put", put_and_fail)
    for _ in range(2):
        with pytest.raises(type(fault)):
            await place.store.write("s", place.token, SavedNamespace(pieces=(b"refused",)))
    assert place.keys == {manifest.generation}
    assert await place.store.find("s") == manifest


async def test_a_repeated_write_goes_on_with_what_is_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, missing = place.store._place.put, StorageUnavailable("the connection was lost")
    with monkeypatch.context() as patched:

        async def put_and_lose_the_connection(*args: Any) -> None:
            await put(*args)
            raise missing

        patched.setattr(place.store._place, "put", put_and_lose_the_connection)
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await place.store.write("s", place.token, SMALL, operation_id="1")
    assert len(place.keys) == 1
    manifest = await place.store.write("s", place.token, SMALL, operation_id="1")
    assert place.keys == {manifest.generation}
    assert await place.store.write("s", place.token, SMALL, operation_id="1") == manifest
    assert b"".join(await place.store.read("s", manifest)) == b"onetwo"


async def test_data_that_was_changed_is_not_restored(place: Place) -> None:
    manifest = await place.store.write("s", place.token, SMALL)
    other = await place.store.write("s", place.token, SavedNamespace(pieces=(b"onetwp",)))
    forged = CheckpointManifest(
        generation=other.generation, place=other.place, size=6, chunks=1, sha256=manifest.sha256
    )
    with pytest.raises(CheckpointUnreadable, match="'s' cannot be read: its data is not what was"):
        await place.store.read("s", forged)


async def test_data_that_is_missing_is_reported(place: Place) -> None:
    old = await place.store.write("s", place.token, SMALL)
    await place.store.write("s", place.token, SMALL)
    with pytest.raises(CheckpointUnreadable, match=r"is not in Redis|there is no"):
        await place.store.read("s", old)


async def test_a_deleted_checkpoint_is_gone_with_all_that_is_left_over(place: Place) -> None:
    await place.store.write("s", place.token, SMALL)
    await place.store.delete("s")
    assert await place.store.find("s") is None
    assert place.keys == set()


async def test_an_owner_that_has_lost_the_session_deletes_nothing_of_the_next(
    place: Place,
) -> None:
    stale = place.token
    inherited = await place.store.write("s", stale, SMALL)
    await place.lose("w1")
    await place.take("w2")
    with pytest.raises(SessionOwnerLost) as lost:
        await place.store.delete("s", stale)
    assert lost.value.owner == "w2"
    assert b"".join(await place.store.read("s", inherited)) == b"onetwo"
    manifest = await place.store.write("s", place.token, SMALL)
    with pytest.raises(SessionOwnerLost):
        await place.store.delete("s", stale)
    assert await place.store.find("s") == manifest
    assert b"".join(await place.store.read("s", manifest)) == b"onetwo"
    await place.store.delete("s", place.token)
    assert await place.store.find("s") is None
    assert place.keys == set()


async def test_a_deletion_leaves_what_a_later_owner_is_writing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.store.write("s", place.token, SMALL)
    clear = place.store._place.clear
    found: list[CheckpointManifest] = []

    async def lose_and_clear(*args: Any) -> None:
        await place.lose("w1")
        found.append(await place.store.write("s", await place.take("w2"), SMALL))
        await clear(*args)

    monkeypatch.setattr(place.store._place, "clear", lose_and_clear)
    await place.store.delete("s", place.token)
    assert await place.store.find("s") == found[0]
    assert b"".join(await place.store.read("s", found[0])) == b"onetwo"


async def test_lists_of_a_manifest_are_bounded(place: Place) -> None:
    names = tuple(f"name_{number:06}" for number in range(50_000))
    reasons = dict.fromkeys(names, "x" * 500)
    manifest = await place.store.write(
        "s", place.token, SavedNamespace(pieces=(b"1",), saved=names, skipped=reasons)
    )
    assert manifest.saved == names[: len(manifest.saved)]
    assert 1000 < len(manifest.saved) < 10_000
    assert 50 < len(manifest.skipped) < 1000
    assert (manifest.saved_count, manifest.skipped_count) == (50_000, 50_000)


STEPS = {"redis": 4, "file": 5}
"""Calls of Redis, and changes of files, that one write of two chunks makes."""


@pytest.mark.parametrize("where", ["redis", "file"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(
    where: str, moment: str, valkey_url: str, tmp_path: Path
) -> None:
    """Killed before or after each step: the checkpoint is the old one or the new one."""
    seen = set()
    for step in range(1, 100):
        prefix = fresh_prefix()
        url = "redis" if where == "redis" else f"file://{tmp_path}/{step}"
        async with AsyncRedis(valkey_url) as connections:
            store = checkpoint_store(connections, url, settings=NamedSessionSettings(prefix=prefix))
            place = Place(store, url, Subject(connections, prefix), valkey_url)
            await place.take("w1")
            old = await store.write("s", place.token, SMALL)
            arguments = [valkey_url, prefix, url, str(place.token), moment, str(step)]
            victim = await asyncio.create_subprocess_exec(
                sys.executable, "-m", VICTIM, *arguments, cwd=ROOT
            )
            await victim.wait()
            found = await store.find("s")
            assert found is not None
            data = b"".join(await store.read("s", found))
            assert data == (b"onetwo" if found == old else b"newer")
            seen.add(data)
            await place.lose("w1")
            await place.take("w2")
            last = await store.write("s", place.token, SMALL)
            left_over = place.keys - {last.generation}
            if where == "file":
                assert left_over == set()
            else:
                with redis.Redis.from_url(valkey_url) as client:
                    for generation in left_over:
                        key = store.keys_of("s").checkpoint(generation)
                        assert 0 < client.pttl(key) <= checkpoints.STAGED_TTL_MS
        if victim.returncode == 0:
            break
        assert victim.returncode == -signal.SIGKILL
    assert seen == {b"onetwo", b"newer"}
    assert step == STEPS[where] + 1


async def test_after_a_move_to_a_url_checkpoints_in_redis_are_still_read(
    valkey_url: str, tmp_path: Path
) -> None:
    prefix = fresh_prefix()
    settings = NamedSessionSettings(prefix=prefix)
    async with AsyncRedis(valkey_url) as connections:
        in_redis = checkpoint_store(connections, settings=settings)
        in_files = checkpoint_store(connections, f"file://{tmp_path}", settings=settings)
        place = Place(in_redis, "redis", Subject(connections, prefix), valkey_url)
        await place.take("w1")
        manifest = await in_redis.write("s", place.token, SMALL)
        assert await in_files.read("s", manifest) == [b"one", b"two"]
        moved = await in_files.write("s", place.token, SMALL)
        assert place.keys == set()
        assert b"".join(await in_files.read("s", moved)) == b"onetwo"
        with pytest.raises(CheckpointUnreadable, match="is kept in 'file', not in 'redis'"):
            await in_redis.read("s", moved)


async def test_a_directory_that_cannot_be_written_is_reported(
    valkey_url: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with AsyncRedis(valkey_url) as connections:
        settings = NamedSessionSettings(prefix=fresh_prefix())
        store = checkpoint_store(connections, f"file://{tmp_path}/file", settings=settings)
        place = Place(store, "file", Subject(connections, settings.prefix), valkey_url)
        await place.take("w1")
        with pytest.raises(BlobsUnavailable, match=r"checkpoints in file: .*Error"):
            await store.write("s", place.token, SMALL)
        assert await store.find("s") is None


async def test_files_are_for_their_owner_only(valkey_url: str, tmp_path: Path) -> None:
    async with AsyncRedis(valkey_url) as connections:
        settings = NamedSessionSettings(prefix=fresh_prefix())
        store = checkpoint_store(connections, f"file://{tmp_path}", settings=settings)
        place = Place(store, "file", Subject(connections, settings.prefix), valkey_url)
        await place.take("w1")
        await store.write("s", place.token, SMALL)
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0


WRONG = {
    "": "must be 'redis', or a URL such as",
    "rediss": "must be 'redis', or a URL such as",
    "/var/checkpoints": "must be 'redis', or a URL such as",
    "nope://x": "fsspec does not know the protocol 'nope'",
    "file://checkpoints": "must be an absolute path",
    "dropbox://x": "has its package installed",
}


@pytest.mark.parametrize("where", [*WRONG, 5, None])
def test_a_wrong_place_is_refused_under_the_name_of_the_setting(where: Any) -> None:
    with pytest.raises(InvalidSetting) as wrong:
        check_place("capsule_checkpoints", where)
    assert wrong.value.name == "capsule_checkpoints"
    assert WRONG.get(where, "must be 'redis', or a URL") in str(wrong.value)


def test_a_url_without_fsspec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    check_place("capsule_checkpoints", "redis")
    with pytest.raises(InvalidSetting, match=r"pip install 'capsule-tasks\[blobs\]'"):
        check_place("capsule_checkpoints", "file:///x")
