"""A pytest plugin for the SDK's own tests: their sessions become the session of durable runs.

`SQLiteSession` and the tests' `SimpleListSession` are replaced, before the tests import them, by a
session that stores its items in a `History` of a private server, and that writes through a
`BufferedSession` during each call of the SDK's runner, as a durable run does in each turn. What is
in the buffer is stored when the call ends.

It is imported in the SDK's checkout, whose `tests` hides ours: it imports nothing of ours but the
package.
"""

from __future__ import annotations

import inspect
import uuid
from functools import wraps
from hashlib import sha256
from typing import Any

import agents
import agents.memory
from agents.memory import SessionABC, SessionSettings, sqlite_session
from agents.run import AgentRunner

from capsule_tasks import History, SyncHistory
from capsule_tasks.openai_agents.session import BufferedSession
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import AsyncConnections, SyncConnections
from capsule_tasks.testing import PrivateServer


class Server:
    """The private server of this process and the connections to it."""

    def __init__(self) -> None:
        self._server = PrivateServer()
        self._server.__enter__()
        self.url = self._server.url
        self.awaiting = AsyncConnections(self.url)
        self.blocking = SyncConnections(self.url)

    def stop(self) -> None:
        self._server.__exit__(None, None, None)


_servers: list[Server] = []


def server() -> Server:
    if not _servers:
        _servers.append(Server())
    return _servers[0]


class CapsuleSession(SessionABC):
    """A history behind a `BufferedSession`, with what the tests use of the sessions it replaces."""

    def __init__(
        self,
        session_id: str = "test",
        place: Any = ":memory:",
        *_: Any,
        history: list[Any] | None = None,
        session_settings: SessionSettings | None = None,
        **others: Any,
    ) -> None:
        """`place` is the database of a SQLiteSession, or the first items of a SimpleListSession."""
        place = others.get("db_path", place)
        first = place if isinstance(place, list) else history
        is_shared = not isinstance(place, list) and str(place) != ":memory:"
        self.prefix = sha256(str(place).encode()).hexdigest() if is_shared else uuid.uuid4().hex
        keys = HistorySettings(prefix=self.prefix)
        limit = SessionSettings() if session_settings is None else session_settings
        self.stored = History(session_id, server().awaiting, settings=keys, session_settings=limit)
        self._blocking = SyncHistory(session_id, server().blocking, settings=keys)
        self._calls = 0
        self.buffer = self._new_buffer()
        self._ignore_ids_for_matching = False
        if first:
            self._blocking.add_items(first)

    @property
    def session_id(self) -> str:
        return self.stored.session_id

    @session_id.setter
    def session_id(self, value: str) -> None:
        self.stored.session_id = self._blocking.session_id = value

    @property
    def session_settings(self) -> Any:
        return self.stored.session_settings

    @session_settings.setter
    def session_settings(self, value: Any) -> None:
        self.stored.session_settings = value
        self.buffer.session_settings = self.stored.session_settings

    def _new_buffer(self) -> BufferedSession:
        return BufferedSession(self.stored)

    # --- a call of the runner --------------------------------------------------------------------

    def call_begins(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self.buffer = self._new_buffer()

    def call_ends(self) -> None:
        self._calls -= 1
        if self._calls == 0:
            self.flush()

    def flush(self) -> None:
        """Store what the buffer has, as the commit of a turn does."""
        added = self.buffer.added
        self.buffer = self._new_buffer()
        if added:
            self._blocking.add_items(added)

    # --- the session -----------------------------------------------------------------------------

    async def get_items(self, limit: int | None = None) -> list[Any]:
        return await (self.buffer if self._calls else self.stored).get_items(limit)

    async def add_items(self, items: list[Any]) -> None:
        await (self.buffer if self._calls else self.stored).add_items(items)

    async def pop_item(self) -> Any:
        return await (self.buffer if self._calls else self.stored).pop_item()

    async def clear_session(self) -> None:
        await (self.buffer if self._calls else self.stored).clear_session()

    def close(self) -> None:
        pass

    # --- what the tests look at ------------------------------------------------------------------

    @property
    def saved_items(self) -> list[Any]:
        return [*self._blocking.get_items(), *self.buffer.added]

    @property
    def _items(self) -> list[Any]:
        return self.saved_items


class CapsuleSQLiteSession(CapsuleSession):
    """Stands for a session whose items compaction can replace in one step, as a History's are."""

    async def _get_compaction_snapshot(self, *args: Any, **options: Any) -> Any:
        """What compaction looks for; it wraps a history, and is outside of durable runs."""
        if type(self) is not CapsuleSQLiteSession:
            return None
        return await self.stored._get_compaction_snapshot(*args, **options)

    async def _atomic_replace_items(self, items: list[Any]) -> bool:
        if type(self) is not CapsuleSQLiteSession:
            return False
        return await self.stored._atomic_replace_items(items)


def _around_run(run: Any) -> Any:
    @wraps(run)
    async def with_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = kwargs.get("session")
        if not isinstance(session, CapsuleSession):
            return await run(self, *args, **kwargs)
        session.call_begins()
        try:
            return await run(self, *args, **kwargs)
        finally:
            session.call_ends()

    return with_buffer


def _around_run_streamed(run_streamed: Any) -> Any:
    @wraps(run_streamed)
    def with_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = kwargs.get("session")
        if not isinstance(session, CapsuleSession):
            return run_streamed(self, *args, **kwargs)
        session.call_begins()
        try:
            result = run_streamed(self, *args, **kwargs)
        except BaseException:
            session.call_ends()
            raise
        result.run_loop_task.add_done_callback(lambda _: session.call_ends())
        return result

    return with_buffer


def swap() -> None:
    AgentRunner.run = _around_run(AgentRunner.run)  # type: ignore[method-assign]
    AgentRunner.run_streamed = _around_run_streamed(AgentRunner.run_streamed)  # type: ignore[method-assign]
    for module in (agents, agents.memory, sqlite_session):
        module.SQLiteSession = CapsuleSQLiteSession  # type: ignore[attr-defined]
    import tests.utils.simple_session as simple  # the SDK's

    # Its subclasses are defined again, over ours.
    source = inspect.getsource(simple)
    source = source.replace("class SimpleListSession(", "class _Replaced(")
    vars(simple)["SimpleListSession"] = CapsuleSession
    exec(compile(source, simple.__file__, "exec"), vars(simple))


def pytest_configure() -> None:
    swap()


def pytest_unconfigure() -> None:
    while _servers:
        _servers.pop().stop()
