"""Looks now and then after a call of a named session for which somebody waits.

Redis may lose writes when it fails over, and an owner may die while no worker is left to reap it.
Then nothing would ever run the call, and nothing would tell whoever waits for it.
"""

from __future__ import annotations

import logging
from typing import Any

from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import StorageError
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.storage.sessions.types import CallPlace

log = logging.getLogger("capsule_tasks.client")

_LOST = "CallLost"


class CallLooks:
    """The looks of one watcher at one call."""

    def __init__(self, app: Any, session_id: str, call_id: str) -> None:
        self._app = app
        self._session_id = session_id
        self._call_id = call_id
        self._was_gone = False

    async def look(self) -> Ended | None:
        """The end of a call that has no other; a session that no worker would run is listed again.

        A call is called gone only at the second look. The owner may have begun it before a Redis
        lost it, and may store its end and its result at any time.
        """
        watcher = await watch_thread.watcher(self._app)
        try:
            found = await watcher.sessions.look_after(self._session_id, self._call_id)
        except StorageError:
            return None  # the next look is made all the same
        if found.hosts == 0 and found.profile not in watcher.unhosted:
            watcher.unhosted.add(found.profile)
            log.warning(
                "call %s of session %r waits: no worker hosts sessions of profile %r",
                self._call_id,
                self._session_id,
                found.profile,
            )
        elif found.hosts != 0 and found.place is CallPlace.UNFINISHED:
            watcher.unhosted.discard(found.profile)
        was_gone, self._was_gone = self._was_gone, found.place is CallPlace.GONE
        if found.place is CallPlace.DONE:
            return _lost("it has ended, but how it ended has expired, or was lost with a Redis")
        if self._was_gone and was_gone:
            return _lost(
                f"session {self._session_id!r} does not know the call any more: it was forgotten, "
                "or a Redis lost its last writes. The call may have run, and may still run"
            )
        return None


def _lost(message: str) -> Ended:
    return Ended(outcome=Outcome.LOST, type=_LOST, message=message)
