"""Stores the revokes that a worker receives in Redis, and reads those that it has missed.

Celery's own set of revoked tasks still decides: it is checked before each task starts. A broadcast
revoke reaches only the workers that are connected at that moment, so the set is completed from
Redis when the worker starts or reconnects, when a stored revoke is announced, and at intervals.
Without Redis everything stays as Celery has it, `--statedb` included.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state

from capsule_tasks.client.revokes import RevokeStore, revoke_store
from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage.connections.doorbells import OnRing
from capsule_tasks.storage.revokes import Revoked
from capsule_tasks.system.service import ThreadService

log = logging.getLogger("capsule_tasks.taskpool")

Stamp = tuple[str, Any]
News = tuple[list[str], list[Stamp]]
Listen = Callable[[str, OnRing], object]

_POLL_S = 5.0
"""Between two reads without announcements, and before a failed call is repeated."""
_REREAD_S = 60.0
"""Between two reads with announcements."""
_GATHER_S = 0.1
"""At least between two reads: revokes that are announced together are read together."""
_SLACK_MS = 2000
"""Read again on each read: a failover may have changed the clock."""
_MAX_WAITING = 10_000


class Revokes(ThreadService):
    """Stores and reads revokes for a consumer. `stop` writes those that wait."""

    thread_name = "capsule-revokes"

    def __init__(
        self,
        app: Any,
        hub: Any,
        listen: Listen,
        *,
        poll_s: float = _POLL_S,
        reread_s: float = _REREAD_S,
    ) -> None:
        """`listen` subscribes `ring` to announcements, where streams are on."""
        super().__init__()
        self._store = revoke_store(app)
        # Celery's set belongs to the hub thread, where there is one.
        self._learn_soon = hub.call_soon if hub is not None else lambda learn, found: learn(found)
        self._listen = listen
        self._poll_s = poll_s
        self._reread_s = reread_s
        self._is_announced = False
        self._is_well = True
        self._changed = threading.Condition()
        self._new: deque[News] = deque()
        self._is_ringing = False
        self._reading = threading.Lock()
        self._since_ms = 0
        self._read_all_at = 0.0

    def start(self) -> None:
        """Read the revokes before the consumer gets its first message; again on reconnect."""
        store = self._store
        if store is None:
            log.info("revokes are kept in memory: no Redis is known, see capsule_redis_url")
            return
        super().start()
        if not self.stopping.is_set():
            try:
                _learn(self._read(store))
            except CapsuleError as fault:
                log.warning("revokes cannot be read from Redis: %s", fault)
                with self._changed:  # the connection may have been lost: read again soon
                    self._is_ringing = True
                    self._changed.notify()

    def set_up(self) -> None:
        assert self._store is not None
        self._listen(self._store.core.channel, self.ring)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def store(self, ids: Iterable[str] = (), stamps: Iterable[Stamp] = ()) -> None:
        """On the hub thread, which waits for nothing."""
        if not self.is_started:
            return
        with self._changed:
            if len(self._new) >= _MAX_WAITING:
                log.warning("revokes come faster than Redis takes them: some are in memory only")
                return
            self._new.append((list(ids), list(stamps)))
            self._changed.notify()

    def ring(self, _message: bytes | None = None) -> None:
        """Read what was announced, or may have been announced meanwhile; any thread."""
        with self._changed:
            self._is_announced = self._is_ringing = True
            self._changed.notify()

    # --- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        store = self._store
        assert store is not None
        is_over = False
        read_at = time.monotonic()
        due = read_at + self._poll_s
        while not is_over:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._has_work() or self.stopping.is_set(),
                    max(0.0, due - time.monotonic()),
                )
                is_over = self.stopping.is_set()
                was_ringing, self._is_ringing = self._is_ringing, False
            if was_ringing:
                due = min(due, read_at + _GATHER_S)
            try:
                while self._new:
                    store.add(*self._new[0])
                    self._new.popleft()
                if time.monotonic() >= due:
                    self._learn_soon(_learn, self._read(store))
                    read_at = time.monotonic()
                    due = read_at + (self._reread_s if self._is_announced else self._poll_s)
            except CapsuleError as fault:
                if self._is_well:
                    log.warning("revokes cannot be written to Redis: %s", fault)
                self._is_well = False
                due = time.monotonic() + self._poll_s
            else:
                self._is_well = True
        with self._reading:
            store.close()

    def _has_work(self) -> bool:
        """While Redis fails, new revokes wait for the next try."""
        return self._is_ringing or (self._is_well and bool(self._new))

    def _read(self, store: RevokeStore) -> Revoked:
        """Read new revokes; at intervals all, since Celery's set forgets sooner than Redis."""
        with self._reading:
            now = time.monotonic()
            is_all = not self._since_ms or now - self._read_all_at > state.REVOKE_EXPIRES / 2
            found = store.read(0 if is_all else max(0, self._since_ms - _SLACK_MS))
            self._since_ms = found.until_ms
            if is_all:
                self._read_all_at = now
            return found


def _learn(found: Revoked) -> None:
    state.merge_revoked([task_id for task_id in found.ids if task_id not in state.revoked])
    for header, value in found.stamps:
        known = list(maybe_list(state.revoked_stamps.get(header)) or [])
        if value not in known:
            state.revoked_stamps[header] = [*known, value]
