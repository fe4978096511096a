"""Revokes, stored for workers that missed the broadcast, and announced to those that listen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage.keys import RevokeKeys
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.scripts import script

MAX_REVOKES = 50_000
"""As many as Celery keeps in memory."""
_BATCH_SIZE = 1000
_ONCE = RetrySettings(attempts=1)


@script("workers/revokes_add")
def revokes_add(
    keys: RevokeKeys, *, ttl_ms: int, max_revokes: int, members: Sequence[str]
) -> None: ...


@script("workers/revokes_read")
def revokes_read(keys: RevokeKeys, *, since_ms: int, max_revokes: int) -> None: ...


@dataclass
class Revoked:
    """Task ids, and stamps as (header, value); `until_ms` is the moment to go on from."""

    ids: list[str] = field(default_factory=list)
    stamps: list[tuple[str, Any]] = field(default_factory=list)
    until_ms: int = 0


class RevokeCore:
    """Stores and reads revokes. Each call is tried once; its callers retry."""

    def __init__(self, revoke_ttl_s: float, prefix: str = "capsule") -> None:
        self._ttl_ms = int(revoke_ttl_s * 1000)
        self._keys = RevokeKeys(prefix)
        self.channel = self._keys.channel

    def add(
        self, ids: Iterable[str] = (), stamps: Iterable[tuple[str, Any]] = ()
    ) -> Operation[None]:
        """Store revokes; the oldest are dropped above MAX_REVOKES."""
        members = iter(
            [*(f"t{task_id}" for task_id in ids), *(f"s{json.dumps(pair)}" for pair in stamps)]
        )
        for batch in _batches(members):
            call = revokes_add.call(
                self._keys, ttl_ms=self._ttl_ms, max_revokes=MAX_REVOKES, members=batch
            )
            yield from call_script(call, _ONCE)

    def read(self, since_ms: int = 0) -> Operation[Revoked]:
        """Revokes since a moment, and the moment of this reply."""
        reply = yield from call_script(
            revokes_read.call(self._keys, since_ms=since_ms, max_revokes=MAX_REVOKES), _ONCE
        )
        found = Revoked(until_ms=int(reply[1]))
        for member in reply[2]:
            kind, revoked = member[:1], member[1:].decode()
            if kind == b"t":
                found.ids.append(revoked)
            elif kind == b"s":  # skips other kinds, which a newer release may store
                header, value = json.loads(revoked)
                found.stamps.append((header, value))
        return found


def _batches(members: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(members, _BATCH_SIZE)):
        yield batch
