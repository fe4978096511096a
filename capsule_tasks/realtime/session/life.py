"""The life of a session: its phases, how it is opened, and how everything of it is released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from enum import StrEnum
from typing import Any, TypeVar

from capsule_tasks.errors import RealtimeClosed
from capsule_tasks.errors.base import reason_of
from capsule_tasks.realtime.session.tasks import OwnedTasks

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Phase(StrEnum):
    """The phases of a session. Errors show their values."""

    NEW = "not open yet"
    """Nothing was acquired. Entering the session moves on."""
    OPENING = "opening"
    """`__aenter__` resolves the agent, reads the history and connects. It moves on, or a close."""
    OPEN = "open"
    """Commands are taken. A close, a failure or the end of the connection moves on."""
    CLOSING = "closing"
    """The cleanup runs in its own task, and moves on."""
    CLOSED = "closed"
    """Everything was released. Nothing moves on."""
    CLOSE_FAILED = "not closed, as a step of its cleanup failed"
    """The steps that failed are left. Another `close()` makes them again."""


_P = Phase

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    _P.NEW: frozenset({_P.OPENING, _P.CLOSING}),
    _P.OPENING: frozenset({_P.OPEN, _P.CLOSING}),
    _P.OPEN: frozenset({_P.CLOSING}),
    _P.CLOSING: frozenset({_P.CLOSED, _P.CLOSE_FAILED}),
    _P.CLOSE_FAILED: frozenset({_P.CLOSING}),
    _P.CLOSED: frozenset(),
}

ACTIVE = frozenset({_P.OPENING, _P.OPEN})
"""Phases in which the model may be told something, and tasks may be started."""

Step = Callable[[], Awaitable[None]]
"""A step of the cleanup."""


class SessionLife:
    """Moves a session through its phases, and refuses what a phase does not allow."""

    def __init__(
        self, tasks: OwnedTasks, on_close: Callable[[Exception | None], None], *steps: Step
    ) -> None:
        """`on_close` is called when a close begins, with the failure if there is one.

        Then all tasks end, and the steps are made in their order.
        """
        self.phase = Phase.NEW
        self.failure: Exception | None = None
        """The error with which the session failed."""
        self._tasks = tasks
        self._on_close = on_close
        self._steps = (tasks.end, *steps)
        self._steps_left: set[Step] = {tasks.end}
        """Those that are to be made when the session closes, until they have succeeded once."""
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

    async def open(self, opening: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Open the session. After an error, a cancel or a close on the way, all is released."""
        self._move(Phase.OPENING)
        self._tasks.context = copy_context()
        try:
            task = await self._tasks.finished(opening(), "opening of a realtime session")
            if task.cancelled() and not self.is_active:
                raise self.failure or self.closed()  # noqa: TRY301
            task.result()
            self._move(Phase.OPEN)
        except BaseException as error:
            await self.close_after(error)
            raise

    def add_to_cleanup(self, step: Step) -> None:
        """From now on, this step has something to release."""
        self._steps_left.add(step)

    # --- tasks ------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        """Do this in a task that ends with the session."""
        self._check_active(work)
        return self._tasks.start(work, about)

    async def do(self, work: Coroutine[Any, Any, None], about: str) -> None:
        """Do this in such a task. A cancel of the caller does not cut it, but a close does."""
        self._check_active(work)
        task = await self._tasks.finished(work, about)
        if task.cancelled() and not self.is_active:
            raise self.closed()
        task.result()

    async def ask(self, work: Coroutine[Any, Any, T], about: str) -> T:
        """Do this in such a task, and return the result. A cancel of the caller cuts it, too."""
        task = self.start(work, about)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.is_active or (caller is not None and caller.cancelling()):
                raise
            raise self.closed() from None

    def _check_active(self, work: Coroutine[Any, Any, T]) -> None:
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
        self._move(Phase.CLOSING)
        self.failure = self.failure or failure
        try:
            self._on_close(self.failure)
        finally:
            self._closing = asyncio.create_task(
                self._cleanup(), name="closing of a realtime session", context=self._tasks.context
            )
        return self._closing

    async def _cleanup(self) -> BaseException | None:
        """Make all steps that are left, whatever becomes of each; the first error of them."""
        first: BaseException | None = None
        for step in self._steps:
            if step in self._steps_left:
                try:
                    await step()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                    # A cancel can only be that of an event loop which ends.
                    first = first or error
                else:
                    self._steps_left.remove(step)
        self._move(Phase.CLOSED if first is None else Phase.CLOSE_FAILED)
        return first

    def _move(self, to: Phase) -> None:
        if to not in TRANSITIONS[self.phase]:
            raise self.closed()
        self.phase = to


def _log_failure(closing: asyncio.Task[BaseException | None]) -> None:
    if not closing.cancelled() and (error := closing.result()) is not None:
        _log.warning("Closing a realtime session failed; close() tries again: %s", reason_of(error))
