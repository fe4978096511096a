"""The lists of named sessions that are wanted: they have calls, and no live owner."""

from __future__ import annotations

from capsule_tasks.storage.keys import WantedKeys
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.base import SessionStoreBase, ms_of
from capsule_tasks.storage.sessions.types import Wanted, WantedPage, WantedState


class WantedStore(SessionStoreBase):
    """One list for each profile.

    A listing has a mark. Whoever removes it names the mark, so that a session which was listed
    again meanwhile stays.
    """

    def wanted_channel(self, profile: str) -> str:
        """The channel that rings when a session of the profile is listed."""
        return WantedKeys(profile, self._prefix).channel

    async def want(self, profile: str, session_id: str) -> int:
        """List a session for workers with room and ring them; the mark of this listing.

        Also for a session that may be listed already, or may have an owner: whoever takes it from
        the list finds out.
        """
        keys = WantedKeys(profile, self._prefix)
        call = scripts.session_want.call(keys, session_id=session_id, ttl_ms=self._ttl_ms)
        return int((await self._call(call))[1])

    async def unwant(self, profile: str, wanted: Wanted) -> bool:
        """Remove a session from the list unless it was listed again; whether it was removed.

        For a worker that has taken the session after `take_wanted` gave it, or has found it with an
        owner whose lease lasts: whoever ends an ownership lists the session again if it must be.
        """
        call = scripts.session_unwant.call(
            WantedKeys(profile, self._prefix), session_id=wanted.session_id, mark=wanted.mark
        )
        return int((await self._call(call))[1]) == 1

    async def take_wanted(
        self, profile: str, count: int, visible_again_s: float = 5.0
    ) -> WantedPage:
        """Sessions for a worker with room for `count`, those that wait longest first.

        They stay listed and are given to another worker after `visible_again_s`, unless `unwant`
        removes them.
        """
        call = scripts.session_take_wanted.call(
            WantedKeys(profile, self._prefix),
            count=count,
            postpone_ms=ms_of(visible_again_s),
            ttl_ms=self._ttl_ms,
        )
        reply = await self._call(call)
        wanted = tuple(
            Wanted(reply[n].decode(), int(reply[n + 1])) for n in range(2, len(reply), 2)
        )
        return WantedPage(wanted, int(reply[1]) / 1000 if int(reply[1]) >= 0 else None)

    async def wanted_state(self, profile: str) -> WantedState:
        """How many sessions of a profile are wanted, and how many workers host such sessions."""
        call = scripts.session_wanted_state.call(WantedKeys(profile, self._prefix))
        _, sessions, hosts = await self._call(call)
        return WantedState(int(sessions), int(hosts) if int(hosts) >= 0 else None)
