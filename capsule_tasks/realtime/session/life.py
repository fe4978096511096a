"""The life of a session: it is opened once, owns tasks while it is active, and is released once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from capsule_tasks.errors import RealtimeClosed
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.session.lifecycle import ACTIVE, Move, Phase, moved
from capsule_tasks.realtime.session.releasing import Cleanup, OwnedTasks

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SessionLife:
    """Moves a session through its phases, and refuses what a phase does not allow."""

    def __init__(
        self,
        tasks: OwnedTasks,
        cleanup: Cleanup,
        on_close: Callable[[Exception | None], None],
    ) -> None:
        """`on_close` is called when a close begins, before the cleanup, with the failure if any."""
        self.phase = Phase.NEW
        self.failure: Exception | None = None
        """The error with which the session failed."""
        self._tasks = tasks
        self._cleanup = cleanup
        self._on_close = on_close
        self._context: Context | None = None
        """That of whoever has entered the session."""
        self._closing: asyncio.Task[BaseException | None] | None = None

    @property
    def is_active(self) -> bool:
        return self.phase in ACTIVE

    def closed(self) -> RealtimeClosed:
        """The error of what the phase does not allow."""
        error = RealtimeClosed(self.phase.value)
        error.__cause__ = self.failure
        return error

    def check_open(self) -> None:
        """Raises RealtimeClosed."""
        if self.phase is not Phase.OPEN:
            raise self.closed()

    # --- opening ----------------------------------------------------------------------------------

    async def open(self, opening: Coroutine[Any, Any, None], *steps: str) -> None:
        """Open the session by this work, which adds steps to the cleanup beside these.

        After an error, a cancel, a close or a failure on the way, everything is released.
        """
        try:
            self._move(Move.ENTER)
        except RealtimeClosed:
            opening.close()
            raise
        self._context = copy_context()
        self._cleanup.add(*steps)
        try:
            task = await self._finished(opening, "opening of a realtime session")
            if task.cancelled() and not self.is_active:
                raise self.failure or self.closed()  # noqa: TRY301
            task.result()
            self._move(Move.CONNECTED)
        except BaseException as error:
            await self.close_after(error)
            raise

    # --- tasks ------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        """Do this in a task that ends with the session."""
        self._check_active(work)
        return self._tasks.start(work, about, self._context)

    async def do(self, work: Coroutine[Any, Any, None], about: str) -> None:
        """Do this in such a task. A cancel of the caller does not cut it, but a close does."""
        task = await self._finished(work, about)
        if task.cancelled() and not self.is_active:
            raise self.closed()
        task.result()

    async def _finished(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        self._check_active(work)
        return await self._tasks.finished(work, about, self._context)

    def _check_active(self, work: Coroutine[Any, Any, Any]) -> None:
        if not self.is_active:
            work.close()
            raise self.closed()

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Wait for the cleanup that runs, or for a new one, and raise the first error of it."""
        if self.phase is not Phase.CLOSED:
            closing = self._begin_close(None)
            if self._tasks.are_ended_here():
                # As in the `finally` block of a tool: the cleanup waits for the end of this task.
                raise asyncio.CancelledError
            # Not awaited itself: a cancel of the caller must not reach it.
            await asyncio.wait({closing})
            if (error := closing.result()) is not None:
                raise error

    async def close_after(self, error: BaseException) -> None:
        """Close because of an error, which is the one that the caller is to see."""
        try:
            await self.close()
        except Exception as other:  # noqa: BLE001  the error gets a note of it
            error.add_note(f"closing the session failed, too: {reason_of(other)}")

    def end(self, failure: Exception | None) -> None:
        """Close in the background: the session has failed, or its connection has ended."""
        if self.is_active:
            self._begin_close(failure).add_done_callback(_log_failure)

    def _begin_close(self, failure: Exception | None) -> asyncio.Task[BaseException | None]:
        if self.phase is Phase.CLOSING and self._closing is not None:
            return self._closing
        self._move(Move.CLOSE)
        self.failure = self.failure or failure
        try:
            self._on_close(self.failure)
        finally:
            self._closing = asyncio.create_task(
                self._release(), name="closing of a realtime session", context=self._context
            )
        return self._closing

    async def _release(self) -> BaseException | None:
        error = await self._cleanup.run()
        self._move(Move.RELEASED if error is None else Move.RELEASE_FAILED)
        return error

    def _move(self, move: Move) -> None:
        after = moved(self.phase, move)
        if after is None:
            raise self.closed()
        self.phase = after


def _log_failure(closing: asyncio.Task[BaseException | None]) -> None:
    if not closing.cancelled() and (error := closing.result()) is not None:
        _log.warning("Closing a realtime session failed; close() tries again: %s", reason_of(error))
