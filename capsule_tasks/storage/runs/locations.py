"""Where runs live: from the id of a run to its session, a part of its keys, and its first agent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic

from capsule_tasks.errors import RunExists, RunNotFound
from capsule_tasks.settings import RunSettings
from capsule_tasks.storage.keys import RunKeys, escaped, run_location
from capsule_tasks.storage.operations import Operation, call_script
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.scripts import Code

KNOWN_S = 86_400.0
"""How long a location is cached; reading it again renews its time to live in Redis."""
MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lives, and the agent with which it began; they never change."""

    run_id: str
    session_id: str
    agent: str
    keys: RunKeys


class RunLocations:
    """In which sessions runs live, with a cache: a run never changes its session."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        # Far longer than a run is kept: a run is found, and so its place renewed, before that.
        longest_s = max(10 * settings.ttl_s, 10 * settings.ended_ttl_s, 366 * 86_400.0)
        self._ttl_ms = int(longest_s * 1000)
        self._known: dict[str, tuple[Place, float]] = {}

    def take(self, run_id: str, session_id: str, agent: str) -> Operation[Place]:
        """Bind a run to a session; raises RunExists if it is bound to another."""
        keys = self.keys(session_id, run_id)
        location = run_location(run_id, self._settings.prefix)
        call = scripts.run_locate.call(
            location, session=session_id, agent=agent, ttl_ms=self._ttl_ms
        )
        reply = yield from call_script(call, self._settings.retry)
        if reply[0] == Code.CONFLICT:
            raise RunExists(run_id, f"in session {reply[1].decode()!r:.100}")
        return self._remember(Place(run_id, session_id, reply[1].decode(), keys))

    def find(self, run_id: str) -> Operation[Place]:
        """The place of a run; raises RunNotFound."""
        escaped("run id", run_id)
        place, known_at = self._known.get(run_id, (None, -math.inf))
        if place is None or monotonic() - known_at >= KNOWN_S:
            location = run_location(run_id, self._settings.prefix)
            call = scripts.run_find.call(location, ttl_ms=self._ttl_ms)
            reply = yield from call_script(call, self._settings.retry)
            if reply[0] != Code.DONE:
                raise RunNotFound(run_id)
            session_id = reply[1].decode()
            place = self._remember(
                Place(run_id, session_id, reply[2].decode(), self.keys(session_id, run_id))
            )
        return place

    def erase(self, run_id: str) -> Operation[None]:
        """Erase the place of a run that was deleted."""
        call = scripts.run_unlocate.call(run_location(run_id, self._settings.prefix))
        yield from call_script(call, self._settings.retry)
        self._known.pop(run_id, None)

    def keys(self, session_id: str, run_id: str) -> RunKeys:
        place, _ = self._known.get(run_id, (None, 0.0))
        if place is not None and place.session_id == session_id:
            return place.keys
        return RunKeys(session_id, run_id, self._settings.prefix)

    def _remember(self, place: Place) -> Place:
        self._known.pop(place.run_id, None)
        self._known[place.run_id] = place, monotonic()
        if len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        return place
