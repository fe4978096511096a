"""Revokes that a worker hears of are kept in Redis, and those it has missed are found there.

Celery's own set of revoked tasks stays what decides: it is asked before each task starts. This
fills it: when the worker starts or has connected again, and every few seconds, as a command that is
broadcast reaches those only who listen at that moment. Without a Redis all stays as Celery has it,
`--statedb` included.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state

from capsule_tasks.client.revokes import RevokeStore, revoke_store
from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage.revoke_core import Revoked
from capsule_tasks.taskpool.turns import QuietThread

log = logging.getLogger("capsule_tasks.taskpool")

Stamp = tuple[str, Any]
News = tuple[list[str], list[Stamp]]

_EVERY_S = 5.0
_SLACK_MS = 2000
"""Read once more: what was written while the last answer was under way."""
_MOST_WAITING = 10_000
_JOIN_S = 5.0


class Revokes:
    """Keeps and finds, from the first `watch` to `stop`; both idempotent."""

    def __init__(self) -> None:
        self._store: RevokeStore | None = None
        self._thread: threading.Thread | None = None
        self._news: queue.Queue[News | None] = queue.Queue(_MOST_WAITING)
        self._since_ms = 0
        self._read_all_at = 0.0
        self._hub: Any = None

    def watch(self, consumer: Any) -> None:
        """Know what was revoked before this consumer gets its first message."""
        self._hub = consumer.hub
        if self._store is None:
            self._store = revoke_store(consumer.app)
            if self._store is None:
                log.info("revokes are kept in memory: no Redis is known, see capsule_redis_url")
                return
        try:
            _learn(self._read(self._store))
        except CapsuleError as fault:
            log.warning("what was revoked cannot be read yet: %s", fault)
        if self._thread is None:
            self._thread = QuietThread(target=self._run, name="capsule-revokes", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write what is waiting, and end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._put(None)
            thread.join(_JOIN_S)
            self._store = None

    def keep(self, ids: Iterable[str] = (), stamps: Iterable[Stamp] = ()) -> None:
        """On the hub thread, which waits for nothing."""
        if self._thread is not None:
            self._put((list(ids), list(stamps)))

    def _put(self, news: News | None) -> None:
        try:
            self._news.put_nowait(news)
        except queue.Full:
            log.warning("revokes come faster than Redis takes them: some are kept in memory only")

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        store = self._store
        assert store is not None
        unwritten: deque[News] = deque(maxlen=_MOST_WAITING)
        is_over, is_well = False, True
        due = time.monotonic() + _EVERY_S
        while not is_over:
            is_over = self._take(unwritten, due)
            try:
                while unwritten:
                    store.add(*unwritten[0])
                    unwritten.popleft()
                if is_due := time.monotonic() >= due:
                    self._tell(self._read(store))
            except CapsuleError as fault:
                if is_well:
                    log.warning("revokes are in memory only for now: %s", fault)
                is_well, is_due = False, True
            else:
                is_well = True
            if is_due:
                due = time.monotonic() + _EVERY_S
        store.close()

    def _take(self, unwritten: deque[News], due: float) -> bool:
        """Wait for something to write, until then; whether it is over."""
        try:
            news = self._news.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            return False
        if news is None:
            return True
        unwritten.append(news)
        return False

    def _read(self, store: RevokeStore) -> Revoked:
        """What is new; now and then all of it, as Celery's set forgets sooner than Redis."""
        now = time.monotonic()
        is_all = not self._since_ms or now - self._read_all_at > state.REVOKE_EXPIRES / 2
        found = store.read(0 if is_all else max(0, self._since_ms - _SLACK_MS))
        self._since_ms = found.until_ms
        if is_all:
            self._read_all_at = now
        return found

    def _tell(self, found: Revoked) -> None:
        """On the hub thread, whose set it is."""
        if self._hub is not None and (found.ids or found.stamps):
            self._hub.call_soon(_learn, found)
        else:
            _learn(found)


def _learn(found: Revoked) -> None:
    state.merge_revoked([task_id for task_id in found.ids if task_id not in state.revoked])
    for header, value in found.stamps:
        known = list(maybe_list(state.revoked_stamps.get(header)) or [])
        if value not in known:
            state.revoked_stamps[header] = [*known, value]
