"""Every operation on a history, as generators without I/O; both facades run them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from capsule_tasks.errors import (
    HistoryConflict,
    HistoryFull,
    ItemNotStorable,
    ItemTooLarge,
)
from capsule_tasks.settings import Count, HistorySettings, check_value
from capsule_tasks.storage.codec import (
    Codec,
    Item,
    JsonCodec,
    Unreadable,
    all_decoded,
    all_encoded,
    canonical,
    unpacked,
)
from capsule_tasks.storage.history import scripts
from capsule_tasks.storage.history.types import (
    HistoryInfo,
    PoppedSuffix,
    Snapshot,
    Version,
    limit_of,
)
from capsule_tasks.storage.keys import SessionKeys
from capsule_tasks.storage.operations import (
    Operation,
    Reply,
    call_script,
    call_script_named,
    named,
    new_operation,
    refused,
)
from capsule_tasks.storage.scripts import Code

CHUNK_ITEMS = 5000
CHUNK_BYTES = 4 * 1024 * 1024
"""The bytes that one call reads or stages, so that it does not block Redis for long."""
FORGET_KEYS = 1000
"""Popped records that one call removes."""
STAGE_TTL_MS = 600_000
RESTARTS = 5
"""How often reading or staging starts over when another writer interferes."""
Limit = Count | None


class _Chunk(NamedTuple):
    generation: str
    start: int
    stop: int
    packed: list[bytes]


class HistoryCore:
    """The operations of one history; the docstrings hold for both facades.

    Items are dicts. Public methods type them as Any, so that a type checker accepts a History as
    the `Session` of openai-agents, whose items are typed dicts.

    Every write takes an `operation_id`, under which it is done at most once. Without one a write
    makes its own, which covers lost replies. Give one to repeat a whole call safely, from another
    process too, for ten minutes and 10,000 writes.
    """

    def __init__(
        self, session_id: str, settings: HistorySettings, session_settings: Any, codec: Codec
    ) -> None:
        keys = SessionKeys(session_id, settings.prefix)
        self.session_id = session_id
        self.settings = settings
        limit_of(session_settings)  # refuses what has none
        self.session_settings = session_settings
        self.codec = codec
        self._retry = settings.retry
        self._ttl_ms = max(1, int(settings.ttl_s * 1000))
        self._renew_ms = self._ttl_ms if settings.renew_on_read else 0
        self._keys = keys

    def get_items(self, limit: int | None = None) -> Operation[list[Any]]:
        """The latest `limit` readable items, oldest first.

        Without a limit that of `session_settings` holds, if there is one.
        """
        limit = limit_of(self.session_settings) if limit is None else limit
        return (yield from self.read(limit)).items

    def read(self, limit: int | None = None) -> Operation[Snapshot]:
        """The history, or its latest `limit` readable items, with the version to replace it by.

        The snapshot is of one moment, even if it takes many calls. Corrupt records do not count
        towards the limit.
        """
        check_value("limit", limit, Limit)
        for _ in range(RESTARTS):
            snapshot = yield from self._read_once(limit, CHUNK_ITEMS, CHUNK_BYTES)
            if snapshot is not None:
                return snapshot
        # Other writers keep removing items. One call for everything is of one moment, too.
        snapshot = yield from self._read_once(limit, self.settings.max_items, 2**52)
        if snapshot is None:
            raise HistoryConflict(self.session_id, "items were removed again and again")
        return snapshot

    def add_items(
        self, items: Iterable[Any], *, operation_id: str | None = None
    ) -> Operation[None]:
        """Append one batch of items in order: all of them, or none."""
        records = self.encoded(items)
        if not records:
            return
        call = scripts.history_append.call(
            self._keys,
            operation_id=named("add", operation_id),
            ttl_ms=self._ttl_ms,
            max_items=self.settings.max_items,
            max_bytes=self.settings.max_bytes,
            records=records,
        )
        reply = yield from call_script(call, self._retry)
        if reply[0] != Code.DONE:
            raise self.refusal(reply, "append")

    def pop_item(self, *, operation_id: str | None = None) -> Operation[Any]:
        """Remove and return the last readable item; None if there is none.

        Corrupt records after it go to quarantine.
        """
        operation_id = operation_id if operation_id is not None else new_operation()
        corrupt, corrupt_key = "", self._keys.popped
        guard = self.codec.guard
        step = 0
        while True:
            # A repeat of the whole call takes the same steps under the same names.
            name = named(f"pop.{step}" if step else "pop", operation_id)
            taken_key = self._keys.popped_by(name)
            call = scripts.history_pop.call(
                self._keys,
                taken_key,
                corrupt_key,
                operation_id=name,
                ttl_ms=self._ttl_ms,
                corrupt_operation=corrupt,
                max_quarantined=self.settings.max_quarantined,
                guards=guard,
            )
            done_as, reply = yield from call_script_named(call, self._retry)
            if len(reply) == 1:
                return None
            try:
                item = self.codec.decode(reply[1], self.session_id)
            except Unreadable:
                if reply[0] == Code.DONE:
                    corrupt, corrupt_key = done_as or name, taken_key
                    step += 1
                else:
                    # The record only starts like a sealed one: allow it to be taken.
                    guard = (*guard, reply[1])
                continue
            if reply[0] != Code.DONE:
                raise refused(reply, "pop")
            return item

    def pop_suffix(
        self, expected: Iterable[Any], *, operation_id: str | None = None
    ) -> Operation[PoppedSuffix]:
        """Remove exactly these items from the end, or change nothing and return the end.

        One script compares and removes. Items are compared as JSON: the order of keys, and how a
        codec spells an item, make no difference.
        """
        items = list(expected)
        records = self.encoded(items)
        if not records:
            return PoppedSuffix(True, [])
        for _ in range(RESTARTS):
            call = scripts.history_pop_suffix.call(
                self._keys,
                operation_id=named("pop_suffix", operation_id),
                ttl_ms=self._ttl_ms,
                records=records,
            )
            reply = yield from call_script(call, self._retry)
            if reply[0] == Code.DONE:
                return PoppedSuffix(True, items)
            found, unreadable = self._decoded(reply[1:])
            wanted, _ = self._decoded(records)
            if unreadable or list(map(canonical, found)) != list(map(canonical, wanted)):
                return PoppedSuffix(False, found)
            records = reply[1:]
        return PoppedSuffix(False, found)

    def replace(
        self, version: Version, items: Iterable[Any], *, operation_id: str | None = None
    ) -> Operation[None]:
        """Replace what was read at `version` by these items, in one step.

        Items before it and items appended since stay. Raises HistoryConflict and changes
        nothing if items were removed since. Corrupt records among the replaced go to quarantine.
        """
        records = self.encoded(items)
        chunks = list(_chunks(records))
        last = chunks.pop() if chunks else []
        stage = self._keys.staging(new_operation())
        call = scripts.history_replace.call(
            self._keys,
            stage,
            operation_id=named("replace", operation_id),
            ttl_ms=self._ttl_ms,
            generation=version.generation,
            start=version.start,
            stop=version.stop,
            pruned=version.pruned,
            staged=len(records) - len(last),
            staged_bytes=sum(map(len, records)) - sum(map(len, last)),
            max_items=self.settings.max_items,
            max_bytes=self.settings.max_bytes,
            max_quarantined=self.settings.max_quarantined,
            corrupt=",".join(map(str, version.corrupt)),
            records=last,
        )
        for _ in range(RESTARTS):
            if not (yield from self._stage(stage, chunks)):
                continue
            reply = yield from call_script(call, self._retry)
            if reply[0] == Code.DONE:
                return
            if reply[0] != Code.LOST:
                raise self.refusal(reply, "replace")
        raise HistoryConflict(self.session_id, "what was staged for it was lost again and again")

    def prunable(self, version: Version, is_old: Callable[[Any], bool]) -> Operation[int]:
        """How many of the oldest records, all before `version`, are old.

        Raises HistoryConflict if items were removed since `version` was read.
        """
        found, count = 0, CHUNK_ITEMS
        while found < version.start:
            before = min(found + count, version.start)
            chunk = yield from self._read_chunk(
                version.generation, before, before - found, CHUNK_BYTES
            )
            if chunk is None:
                raise HistoryConflict(self.session_id, "items were removed since it was read")
            if chunk.start > found:  # these records are too large for one call
                count = chunk.stop - chunk.start
                continue
            for record in unpacked(chunk.packed):
                try:
                    item = self.codec.decode(record, self.session_id)
                except Unreadable:
                    return found
                if not is_old(item):
                    return found
                found += 1
        return found

    def clear_session(self, *, operation_id: str | None = None) -> Operation[None]:
        """Remove the history, its quarantine, and records that were popped lately."""
        call = scripts.history_clear.call(self._keys, operation_id=named("clear", operation_id))
        _, *taken = yield from call_script(call, self._retry)
        for first in range(0, len(taken), FORGET_KEYS):
            some = [key.decode() for key in taken[first : first + FORGET_KEYS]]
            yield from call_script(scripts.history_forget.call(self._keys, some), self._retry)

    def info(self) -> Operation[HistoryInfo]:
        """Size, times and quarantine of the history."""
        reply = yield from call_script(scripts.history_info.call(self._keys), self._retry)
        _, length, size, created, updated, ttl_ms, bad = (int(part) for part in reply)
        return HistoryInfo(
            session_id=self.session_id,
            items=length,
            bytes=size,
            created_at=_time(created),
            updated_at=_time(updated),
            expires_in_s=ttl_ms / 1000 if ttl_ms >= 0 else None,
            quarantined=bad,
        )

    def _read_once(
        self, limit: int | None, chunk_items: int, chunk_bytes: int
    ) -> Operation[Snapshot | None]:
        """None if items were removed between two chunks."""
        generation, before, stop = "", -1, 0
        chunks: list[tuple[list[Item], list[int]]] = []
        missing = sys.maxsize if limit is None else limit
        while True:
            count = min(missing, chunk_items)
            chunk = yield from self._read_chunk(generation, before, count, chunk_bytes)
            if chunk is None:
                return None
            if not generation:
                generation, stop = chunk.generation, chunk.stop
            before = chunk.start
            items, corrupt = self._decoded_chunk(chunk)
            chunks.append((items, corrupt))
            missing -= len(items)
            if before == 0 or missing <= 0:
                break
        chunks.reverse()
        return Snapshot(
            [item for items, _ in chunks for item in items] if len(chunks) > 1 else chunks[0][0],
            Version(generation, before, stop, tuple(at for _, places in chunks for at in places)),
        )

    def _read_chunk(
        self, generation: str, before: int, count: int, chunk_bytes: int
    ) -> Operation[_Chunk | None]:
        call = scripts.history_read.call(
            self._keys,
            generation=generation,
            before=before,
            count=count,
            max_bytes=chunk_bytes,
            renew_ms=self._renew_ms,
        )
        reply = yield from call_script(call, self._retry)
        if reply[0] == Code.CONFLICT:
            return None
        _, current, stop, start, *packed = reply
        return _Chunk(current.decode(), start, stop, packed)

    def _stage(self, stage: str, chunks: Sequence[list[bytes]]) -> Operation[bool]:
        """Whether the chunks are staged; False if another writer used the same staging list."""
        offset = 0
        for chunk in chunks:
            call = scripts.history_stage.call(
                stage, offset=offset, ttl_ms=STAGE_TTL_MS, records=chunk
            )
            reply = yield from call_script(call, self._retry)
            if reply[0] != Code.DONE:
                return False
            offset += len(chunk)
        return True

    def refusal(self, reply: Reply, call: str) -> Exception:
        match reply[0]:
            case Code.CONFLICT:
                return HistoryConflict(self.session_id, "items were removed since it was read")
            case Code.FULL:
                limits = self.settings.max_items, self.settings.max_bytes
                return HistoryFull(self.session_id, int(reply[1]), int(reply[2]), *limits)
        return refused(reply, call)

    def encoded(self, items: Iterable[Item]) -> list[bytes]:
        """The records of a batch; refuses the whole batch for one item that cannot be stored."""
        max_size = self.settings.max_item_bytes
        if type(self.codec) is JsonCodec:
            items = list(items)
            quickly = all_encoded(items)
            if quickly is not None and max(map(len, quickly), default=0) <= max_size:
                return quickly
        records = []
        for index, item in enumerate(items):
            try:
                record = self.codec.encode(item, self.session_id)
            except (TypeError, ValueError) as error:
                raise ItemNotStorable(index, str(error)) from error
            if len(record) > max_size:
                raise ItemTooLarge(index, len(record), max_size)
            records.append(record)
        return records

    def _decoded_chunk(self, chunk: _Chunk) -> tuple[list[Item], list[int]]:
        """The readable items, and the indexes of corrupt records."""
        if type(self.codec) is JsonCodec and (items := all_decoded(chunk.packed)) is not None:
            return items, []
        return self._decoded(unpacked(chunk.packed), chunk.start)

    def _decoded(self, records: Iterable[bytes], start: int = 0) -> tuple[list[Item], list[int]]:
        decode, session_id = self.codec.decode, self.session_id
        items: list[Item] = []
        corrupt: list[int] = []
        for index, record in enumerate(records, start):
            try:
                items.append(decode(record, session_id))
            except Unreadable:
                corrupt.append(index)
        return items, corrupt


def _chunks(records: list[bytes]) -> Iterable[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for record in records:
        if chunk and (len(chunk) >= CHUNK_ITEMS or size + len(record) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += len(record)
    if chunk:
        yield chunk


def _time(microseconds: int) -> datetime | None:
    return datetime.fromtimestamp(microseconds / 1e6, UTC) if microseconds else None
