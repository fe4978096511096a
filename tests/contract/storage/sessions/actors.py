"""Processes that use the store of named sessions, carried on one call of Redis at a time.

Each is a coroutine that runs the store's own methods. Where it would call Redis it stops; whoever
drives it calls Redis, or loses the call or its reply, or leaves the coroutine where it is.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any

from capsule_tasks.errors import (
    CapsuleError,
    LeaseLost,
    SessionHeld,
    SessionOwnerLost,
    SessionUnfinished,
)
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import BegunCall, Wanted

PROFILE = "sandbox"
IDS = [f"call{number}" for number in range(5)]


@dataclass(frozen=True)
class Choice:
    """A decision of an actor that whoever drives it takes."""

    options: int


@coroutine
def stopped(what: Call | Choice) -> Generator[Call | Choice, Any, Any]:
    return (yield what)


class SteppedStore:
    """Connections over which nothing goes by itself."""

    is_closed = False
    location: Any = None

    async def run(self, call: Call) -> Reply:
        reply: Reply = await stopped(call)
        return reply

    async def close(self) -> None: ...


@dataclass(eq=False)
class Actor:
    """A coroutine, and the call or the choice at which it stands."""

    name: str
    steps: Coroutine[Any, Any, None]
    at: Call | Choice | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.go_on(None)

    def go_on(self, reply: Any, error: BaseException | None = None) -> None:
        try:
            self.at = self.steps.send(reply) if error is None else self.steps.throw(error)
            while self.at is None:  # a pause before a repeat
                self.at = self.steps.send(None)
        except StopIteration:
            self.at, self.is_over = None, True

    def kill(self) -> None:
        self.steps.close()
        self.at, self.is_over = None, True


@dataclass
class Host:
    """A worker that hosts one session at a time; it does what every host has to."""

    store: NamedSessionStore
    incarnation: str
    lease_token: str
    has_lease: bool = True
    is_dead: bool = False
    owned: dict[str, int] = field(default_factory=dict)
    """The sessions that it believes it owns, with the tokens."""
    began: list[tuple[str, int, BegunCall]] = field(default_factory=list)

    async def run(self) -> None:
        """Take a session that is wanted, run its calls, release it."""
        page = await self.store.take_wanted(PROFILE, 1, visible_again_s=0)
        for wanted in page.sessions:
            try:
                await self._host(wanted)
            except LeaseLost:
                return

    async def _host(self, wanted: Wanted) -> None:
        session_id = wanted.session_id
        await self.store.hold(self.incarnation, self.lease_token, [session_id])
        try:
            taken = await self.store.take(session_id, self.incarnation, profile=PROFILE)
            if not self.has_lease:
                # A reaper may have looked for this session before it was taken.
                raise LeaseLost(self.incarnation)
            self.owned[session_id] = taken.token
            await self.store.unwant(PROFILE, wanted)
            await self._run_calls(session_id, taken.token)
        except SessionHeld as held:
            if held.owner:
                await self.store.unwant(PROFILE, wanted)
        except SessionOwnerLost:
            pass
        except CapsuleError:  # the host does not know what was done
            await self.store.reap(session_id, self.incarnation)
            raise
        finally:
            self.owned.pop(session_id, None)
        await self.store.reap(session_id, self.incarnation)
        await self.store.hold(self.incarnation, self.lease_token, [], [session_id])

    async def _run_calls(self, session_id: str, token: int) -> None:
        while True:
            begun = await self.store.begin(session_id, token)
            if begun is not None:
                self.began.append((session_id, token, begun))
                if await stopped(Choice(4)) == 0:  # a shutdown: the call is not over
                    await self.store.release(session_id, token, even_unfinished=True)
                    return
                await self.store.done(session_id, token, begun.seq)
            elif await stopped(Choice(2)) == 0:
                try:
                    await self.store.release(session_id, token)
                except SessionUnfinished:
                    continue
                return


async def produce(
    store: NamedSessionStore, session_id: str, call_id: str, acknowledged: set[tuple[str, str]]
) -> None:
    await store.submit(session_id, call_id, call_id.encode(), profile=PROFILE)
    acknowledged.add((session_id, call_id))


async def reap(store: NamedSessionStore, incarnation: str) -> None:
    """What any worker does for one whose lease has lapsed."""
    done: list[str] = []
    while held := await store.held_sessions(incarnation, done):
        for session_id in held:
            await store.reap(session_id, incarnation)
        done = held
