"""Owners of runs: which incarnations have runs, and which runs each of them holds.

A hold is recorded before its claim and removed after it, so the record may hold too much and never
too little: whoever reads it checks each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from capsule_tasks.errors import LeaseLost, LeaseMissing, StorageError
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import OwnerKeys, run_owners
from capsule_tasks.storage.operations import Operation, Reply, call_script
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.scripts import Code

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[str, str]).decode


def run_of(hold: bytes) -> str:
    """The run of a hold."""
    return _decode(hold)[0]


class Owners:
    """Owners of runs in one Redis."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._known = set[str]()
        """Owners that this process has registered and whose lease was seen since then."""

    def hold(self, owner: str, run_id: str, claim: str) -> Operation[tuple[bytes, int]]:
        """Record that an owner is about to claim a run, and when; LeaseMissing or LeaseLost.

        The claim is refused if that was too long ago. So if the lease has lapsed meanwhile, whoever
        queues the owner's runs still finds the hold of a claim that came late.
        """
        hold = _encode((run_id, claim))
        reply = yield from self._record(owner, 1, hold)
        if reply[0] != Code.DONE:
            raise LeaseMissing(owner) if reply[0] == Code.MISSING else LeaseLost(owner)
        if owner not in self._known:
            yield from self.due(0, owner)
            self._known.add(owner)
        return hold, int(reply[1])

    def drop(self, owner: str, hold: bytes) -> Operation[None]:
        """Record that an owner no longer has a run; a hold that stays does no harm."""
        if not hold:
            return
        with contextlib.suppress(StorageError):
            yield from self._record(owner, 0, hold)

    def due(
        self, count: int, owner: str = "", *, in_s: float = 0.0, forget: Sequence[str] = ()
    ) -> Operation[tuple[list[str], float | None]]:
        """Owners to look at, and the seconds until the next is due.

        An `owner` is registered, to be looked at after `in_s`.
        """
        call = scripts.run_owners.call(
            run_owners(self._settings.prefix),
            owner=owner,
            in_ms=int(in_s * 1000),
            ttl_ms=self._ttl_ms,
            max_due=count,
            incarnations=forget,
        )
        reply = yield from call_script(call, self._settings.retry)
        next_in_s = int(reply[1]) / 1000 if int(reply[1]) >= 0 else None
        return [each.decode() for each in reply[2:]], next_in_s

    def held_by(
        self, owner: str, done: Sequence[bytes], count: int
    ) -> Operation[list[bytes] | None]:
        """Holds of an owner, without those that are done; None while its lease lasts."""
        keys = OwnerKeys(owner, self._settings.prefix)
        call = scripts.run_held.call(keys, count=count, holds=done)
        reply = yield from call_script(call, self._settings.retry)
        return reply[1:] if reply[0] == Code.DONE else None

    def _record(self, owner: str, count: int, hold: bytes) -> Operation[Reply]:
        keys = OwnerKeys(owner, self._settings.prefix)
        call = scripts.run_hold.call(keys, ttl_ms=self._ttl_ms, count=count, holds=[hold])
        return (yield from call_script(call, self._settings.retry))
